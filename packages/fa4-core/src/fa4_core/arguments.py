"""Checks of prefill()'s arguments: everything that a kernel may then take for granted."""

from __future__ import annotations

import math

import torch

from .batch import PrefillBatch
from .errors import bad
from .spec import LayerSpec

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
        raise bad("scale", repr(scale), "a finite number")
    if not _finite(softcap) or softcap < 0:
        raise bad("softcap", repr(softcap), "a finite number, at least 0")
    if spec.softcap != (softcap > 0):
        allowed = "above 0, since spec.softcap is on" if spec.softcap else "0, since spec.softcap is off"
        raise bad("softcap", softcap, allowed)
    if spec.sinks != (sinks is not None):
        raise bad("sinks", "None" if sinks is None else "a tensor", f"what spec.sinks ({spec.sinks}) says")
    if sinks is not None:
        _tensor("sinks", sinks, (spec.q_heads,), "[q_heads]", SINK_DTYPES, device)


def check_results(q: torch.Tensor, spec: LayerSpec, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Hold the caller's buffers against q and the spec.

    Raises:
        ValueError: out or lse is of another shape, dtype, device or layout, or overlaps itself.
    """
    rows = q.shape[0]
    if out is not None:
        shape = (rows, spec.q_heads, spec.head_dim_v)
        _tensor("out", out, shape, "[total_q, q_heads, head_dim_v]", spec.dtype, q.device)
        _writable("out", out)
    if lse is not None:
        _tensor("lse", lse, (spec.q_heads, rows), "[q_heads, total_q]", torch.float32, q.device, any_strides=True)
        _writable("lse", lse)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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


def _writable(name: str, t: torch.Tensor) -> None:
    if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride())):
        raise bad(name, f"of strides {t.stride()}", "a tensor whose elements do not share memory")
