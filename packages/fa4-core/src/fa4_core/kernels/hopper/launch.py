"""From the Kernel protocol to a launch: what is refused, the step's plan, the call of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...batch import PrefillBatch
from ...errors import bad
from ...spec import LayerSpec
from .config import BOX, TILES, Config
from .plan import ITEM_INTS, Step, work_list
from .ranges import window_sides

if TYPE_CHECKING:
    from .. import Question

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG2E = math.log2(math.e)
ALIGN = 8  # elements: 16 bytes, what the copy engine and vector stores need

Function = Callable[..., None]
_functions: dict[Config, Function] = {}


def function_of(config: Config) -> Function:
    """The compiled variant, kept for the life of the process."""
    found = _functions.get(config)
    if found is None:
        from .build import compile_variant

        found = _functions[config] = compile_variant(config)
    return found


def provide(config: Config, function: Function) -> None:
    """Use a variant that was compiled elsewhere."""
    _functions[config] = function


class HopperKernel:
    """Ours, for sm_90."""

    name = "hopper"
    by_name_on: frozenset[str] = frozenset()

    def refuses(self, question: Question) -> str | None:
        spec, target = question.spec, question.target
        if target.capability is None or target.capability[0] != 9:
            return f"is for sm_90, not {target}"
        if spec.dtype not in DTYPES:
            return f"has no {spec.dtype}, only bfloat16 and float16"
        if spec.kv_dtype != spec.dtype:
            return f"has no kv dtype {spec.kv_dtype} for {spec.dtype} queries"
        if (spec.head_dim, spec.head_dim_v) not in TILES:
            dims = ", ".join(f"{d}" if d == d_v else f"{d}/{d_v}" for d, d_v in TILES)
            return f"has no head dims {spec.head_dim}/{spec.head_dim_v}, only {dims}"
        return None

    def plan(self, batch: PrefillBatch, spec: LayerSpec, *, invariant: bool) -> HopperPlan:
        # Always invariant: no split yet, and tiles start at key 0.
        return HopperPlan(batch, spec)


class HopperPlan:
    """A step's work list on the device."""

    num_splits = 1

    def __init__(self, batch: PrefillBatch, spec: LayerSpec) -> None:
        load = "boxes" if batch.page_size % BOX == 0 else "rows"
        self.config = Config(spec.head_dim, spec.head_dim_v or spec.head_dim, DTYPES[spec.dtype], load, spec.softcap)
        self.load_path = f"tma-{load}"
        self.batch, self.spec = batch, spec
        self.left, self.right = window_sides(spec.window)
        q_lens, kv_lens = _host_lengths(batch)
        row_bytes = 2 * (self.config.d + self.config.d_v)
        step = Step(q_lens, kv_lens, spec.kv_heads, spec.ratio, self.left, self.right, row_bytes)
        items = work_list(step, self.config.tile)
        self.items = items.shape[0]
        # One copy: the control words (the counter, the number of items), then the list.
        host = np.zeros((self.items + 1, ITEM_INTS), np.int32)
        host[0, 1] = self.items
        host[1:] = items
        staged = torch.from_numpy(host)
        if batch.device.type == "cuda":
            staged = staged.pin_memory()
        sent = staged.to(batch.device, non_blocking=True)
        self.control, self.work = sent[0, :2], sent[1:]
        self.blocks = min(self.items, _multiprocessors(batch.device))
        self.nothing = torch.zeros(1, dtype=torch.float32, device=batch.device)

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if self.items == 0:
            return
        if scale <= 0:  # the largest score is the largest product only where the scale is positive
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        if not _aligned(q):
            q = q.contiguous()
        where = out if _aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flat = self.config.load == "rows" and _is_flat(k_pages) and _is_flat(v_pages)
        k, v = _pool("k_pages", k_pages, flat), _pool("v_pages", v_pages, flat)
        if softcap > 0:
            inner, scale = 2.0 * LOG2E * scale / softcap, softcap
        else:
            inner = 0.0
        batch = self.batch
        function_of(self.config)(
            q, k, v, where,
            self.nothing.view(1, 1) if lse is None else lse,
            self.nothing if sinks is None else sinks.float(),
            batch.cu_seqlens_q, batch.kv_lens, batch.page_table, self.work, self.control,
            scale * LOG2E, inner, self.left, self.right, batch.page_size, int(flat), int(lse is not None),
            int(sinks is not None), self.blocks,
        )  # fmt: skip
        if where is not out:
            # TODO: rows past cu_seqlens_q[-1] must keep what they hold
            out.copy_(where)


def _host_lengths(batch: PrefillBatch) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of the lengths of each request."""
    n = batch.num_requests
    q_lens: Any = batch.host_q_lens
    kv_lens: Any = batch.host_kv_lens
    if q_lens is None:
        if batch.max_q_len is None:
            raise bad("batch", "without host_q_lens and max_q_len", "one of them: the work list is made on the host")
        q_lens = np.full(n, batch.max_q_len, np.int64)
    if kv_lens is None:
        kv_lens = np.full(n, batch.max_kv_len, np.int64)
    return np.asarray(q_lens), np.asarray(kv_lens)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _aligned(t: torch.Tensor) -> bool:
    """Rows start at multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) % ALIGN == 0 and t.stride(1) % ALIGN == 0


def _is_flat(pool: torch.Tensor) -> bool:
    """Rows of consecutive pages stand at one stride, so that slots are one dimension."""
    pages, page_size = pool.shape[:2]
    return pages == 1 or page_size == 1 or pool.stride(0) == page_size * pool.stride(1)


def _pool(name: str, pool: torch.Tensor, flat: bool) -> torch.Tensor:
    """The pool as the kernel wants it: (1, slots, heads, d) where flat, and no stride that means nothing."""
    pages, page_size, heads, d = pool.shape
    s_page, s_row, s_head = pool.stride()[:3]
    if flat:
        s_row = s_page if page_size == 1 else s_row
        pages, page_size, s_page = 1, pages * page_size, ALIGN
    if pages == 1:
        s_page = ALIGN
    if page_size == 1:
        s_row = ALIGN
    if heads == 1:
        s_head = ALIGN
    strides = (s_page, s_row, s_head, 1)
    if pool.data_ptr() % 16 or any(s % ALIGN for s in strides[:3]):
        raise bad(name, f"of strides {pool.stride()} at {pool.data_ptr():#x}", "rows that start at multiples of 16 bytes")
    shape = (pages, page_size, heads, d)
    if shape == tuple(pool.shape) and strides == pool.stride():
        return pool
    return pool.as_strided(shape, strides)
