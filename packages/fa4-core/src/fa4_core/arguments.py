"""Checks of prefill()'s arguments: everything that a kernel may then take for granted."""

from __future__ import annotations

from numbers import Real

import torch

from .batch import PrefillBatch
from .errors import bad
from .spec import LayerSpec

FLOAT32_MAX = torch.finfo(torch.float32).max
SINK_DTYPES = (torch.bfloat16, torch.float32)


def check_tensors(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PrefillBatch, spec: LayerSpec
) -> None:
    """Hold q and the pages against the batch and the spec.

    Raises:
        ValueError: A tensor is of another shape, dtype, device or layout, named.
    """
    rows = q.shape[0] if isinstance(q, torch.Tensor) and q.dim() == 3 else 0
    pages = k_pages.shape[0] if isinstance(k_pages, torch.Tensor) and k_pages.dim() == 4 else 0
    _tensor("q", q, (rows, spec.q_heads, spec.head_dim), "[total_q, q_heads, head_dim]", spec.dtype, batch.device)
    for name, t, d in (("k_pages", k_pages, spec.head_dim), ("v_pages", v_pages, spec.head_dim_v)):
        shape = (pages, batch.page_size, spec.kv_heads, d)
        _tensor(name, t, shape, "[pages, page_size, kv_heads, head_dim]", spec.kv_dtype, batch.device)
    if batch.device.type == "cpu" and batch.cu_seqlens_q[-1] > rows:
        raise bad("q", f"of {rows} rows", f"at least the {batch.cu_seqlens_q[-1]} of cu_seqlens_q")


def check_values(
    spec: LayerSpec, scale: float, softcap: float, sinks: torch.Tensor | None, device: torch.device
) -> None:
    """Hold the layer's values against its spec.

    Raises:
        ValueError: scale, softcap or sinks is not what the spec allows.
    """
    if not _finite(scale):
        raise bad("scale", repr(scale), "a number that float32 holds")
    if not _finite(softcap) or softcap < 0:
        raise bad("softcap", repr(softcap), "a number that float32 holds, at least 0")
    if spec.softcap != (softcap > 0):
        allowed = "above 0, since spec.softcap is on" if spec.softcap else "0, since spec.softcap is off"
        raise bad("softcap", softcap, allowed)
    if spec.sinks != (sinks is not None):
        raise bad("sinks", "None" if sinks is None else "a tensor", f"what spec.sinks ({spec.sinks}) says")
    if sinks is not None:
        _tensor("sinks", sinks, (spec.q_heads,), "[q_heads]", SINK_DTYPES, device)


def check_results(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sinks: torch.Tensor | None,
    spec: LayerSpec,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Hold the caller's buffers against q and the spec.

    Raises:
        ValueError: out or lse is of another shape, dtype, device or layout, or overlaps itself or an input.
    """
    rows = q.shape[0]
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages} | ({} if sinks is None else {"sinks": sinks})
    if out is not None:
        shape = (rows, spec.q_heads, spec.head_dim_v)
        _tensor("out", out, shape, "[total_q, q_heads, head_dim_v]", spec.dtype, q.device)
        _writable("out", out, inputs)
    if lse is not None:
        _tensor("lse", lse, (spec.q_heads, rows), "[q_heads, total_q]", torch.float32, q.device, any_strides=True)
        _writable("lse", lse, inputs if out is None else {**inputs, "out": out})


def _finite(value: object) -> bool:
    """Whether a number has a value in float32, in which kernels compute."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return abs(float(value)) <= FLOAT32_MAX  # False for NaN, too
    except OverflowError:
        return False


def _tensor(
    name: str,
    t: object,
    shape: tuple[int | None, ...],
    words: str,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None,
    device: torch.device,
    any_strides: bool = False,
) -> None:
    if not isinstance(t, torch.Tensor):
        raise bad(name, type(t).__name__, f"a torch.Tensor {words}")
    if tuple(t.shape) != shape:
        raise bad(name, f"of shape {list(t.shape)}", f"{words} = {list(shape)}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if t.dtype not in dtypes:
        raise bad(name, t.dtype, " or ".join(map(str, dtypes)))
    if t.device != device:
        raise bad(name, f"on {t.device}", f"{device}, where the batch is")
    if not any_strides and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise bad(name, f"of strides {t.stride()}", "a last dimension that is contiguous")


def _writable(name: str, t: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    reach = 0  # of the elements within one step of the stride at hand
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride()) if n > 1):
        if stride <= reach:
            raise bad(name, f"of shape {list(t.shape)} and strides {t.stride()}", "elements that share no memory")
        reach += (size - 1) * stride
    if t.requires_grad and t.is_leaf:
        raise bad(name, "a leaf that requires grad", "a tensor that may be written: there is no backward pass")
    if t.is_inference() and not torch.is_inference_mode_enabled():
        raise bad(name, "made in inference mode, and written outside of it", "a tensor of the mode that is on")
    for other, source in inputs.items():
        if source.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() and _meet(t, source):
            raise bad(name, f"in the memory of {other}", "memory of its own")


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes from first to last of two tensors meet, each having some."""
    ends = []
    for t in (a, b):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size() if t.numel() else t.data_ptr()))
    return max(ends[0][0], ends[1][0]) < min(ends[0][1], ends[1][1])
