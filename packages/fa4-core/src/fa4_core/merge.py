"""merge_states(): one attention result from parts that each saw some of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import bad


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine partial outputs over disjoint keys by their LSE, added up in fp32 in the order given.

    A part in which a row saw no key (lse -inf) adds nothing to that row, whatever its out holds. A sink belongs in
    exactly one part.

    Args:
        outs: Each [total_q, q_heads, d_v], one dtype, at least one.
        lses: Each float32 [q_heads, total_q], natural logarithm, one for each of `outs`.

    Returns:
        out [total_q, q_heads, d_v] in the dtype of `outs`, and lse float32 [q_heads, total_q]; 0 and -inf for a row
        that no part saw a key for.

    Raises:
        ValueError: None given, a different number of each, or shapes and dtypes that do not agree.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence) or not all(isinstance(t, torch.Tensor) for t in parts):
            raise bad(name, f"a {type(parts).__name__}", "a list or tuple of tensors")
    if not outs or len(outs) != len(lses):
        raise bad("outs and lses", f"{len(outs)} and {len(lses)} parts", "as many of one as of the other, at least 1")
    first = outs[0]
    if first.dim() != 3 or not first.is_floating_point():
        raise bad("outs[0]", _of(first), "floating point [total_q, q_heads, d_v]")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            raise bad(f"outs[{i}]", _of(out), f"{_of(first)}, as outs[0]")
        if lse.shape != (first.shape[1], first.shape[0]) or lse.dtype != torch.float32 or lse.device != first.device:
            raise bad(f"lses[{i}]", _of(lse), f"float32 [q_heads, total_q] = {[first.shape[1], first.shape[0]]}")
    stacked = torch.stack(list(lses))  # [parts, q_heads, total_q]
    top = stacked.amax(0)
    base = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros_like(top)
    acc = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for out, lse in zip(outs, lses):
        weight = torch.exp(lse - base)
        total += weight
        acc += (weight.t().unsqueeze(-1) * out.float()).masked_fill((weight == 0).t().unsqueeze(-1), 0.0)
    empty = total == 0
    merged = acc / total.masked_fill(empty, 1.0).t().unsqueeze(-1)
    return merged.to(first.dtype), torch.where(empty, -torch.inf, base + torch.log(total))


def _of(t: torch.Tensor) -> str:
    return f"{t.dtype} {list(t.shape)} on {t.device}"
