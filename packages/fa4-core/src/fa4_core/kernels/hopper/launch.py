"""From the Kernel protocol to a launch: what is refused, the step's plan, the call of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import counters, settings, workspace
from ...batch import PrefillBatch
from ...errors import bad
from ...spec import LayerSpec
from . import dsl
from .config import BOX, NARROW, NARROW_KEYS, TILES, Config, name_of
from .objects.load import find
from .plan import ITEM_INTS, Step, box_table, work_list
from .ranges import window_sides

if TYPE_CHECKING:
    from .. import Question

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG2E = math.log2(math.e)
_SPARE = 1 << 20  # bytes of the workspace for rounding, and for what stands where nothing is gathered or split
ALIGN = 8  # elements: 16 bytes, what the copy engine and vector stores need

Function = Callable[..., None]
_functions: dict[Config | str, Function] = {}


def function_of(key: Config | str) -> Function:
    """A variant, or a helper kernel by name: loaded where FA4_HOPPER_OBJECTS has it, else compiled; kept for good."""
    found = _functions.get(key)
    if found is None:
        found = find(name_of(key))
        if found is None:
            from . import build

            found = build.compile_helper(key) if isinstance(key, str) else build.compile_variant(key)
            counters.add("compiles.hopper")
        _functions[key] = found
    return found


def provide(key: Config | str, function: Function) -> None:
    """Use a kernel that was compiled elsewhere."""
    _functions[key] = function


class HopperKernel:
    """Ours, for sm_90; by name until plans need no host lengths and all of its variants are built ahead of time."""

    name = "hopper"
    by_name_on: frozenset[str] = frozenset({"cuda"})
    about = f"compiled at first use, workspace up to {settings.WORKSPACE_MIB}"

    def refuses(self, question: Question) -> str | None:
        """As the protocol says."""
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
        return dsl.refusal(spec.head_dim, spec.head_dim_v or spec.head_dim, DTYPES[spec.dtype], spec.softcap)

    def workspace_bytes(self, question: Question) -> int:
        """As the protocol says: for keys gathered from slots and for results of splits, and so for neither none."""
        slots = question.page_size is None or question.page_size % BOX != 0
        return settings.workspace_bytes() if slots or not question.invariant else 0

    def plan(self, batch: PrefillBatch, spec: LayerSpec, *, invariant: bool) -> HopperPlan:
        """As the protocol says."""
        # Tiles start at key 0 and rescaling is a row's own decision: without splits nothing else is needed.
        return HopperPlan(batch, spec, split=not invariant)


class HopperPlan:
    """A step on the device: the work list, and by slots where each box of keys lies."""

    def __init__(self, batch: PrefillBatch, spec: LayerSpec, *, split: bool) -> None:
        load = "boxes" if batch.page_size % BOX == 0 else "slots"
        self.left, self.right = window_sides(spec.window)
        d, d_v = spec.head_dim, spec.head_dim_v or spec.head_dim
        narrow = self.left + self.right < NARROW_KEYS and (d, d_v) in NARROW
        self.config = Config(d, d_v, DTYPES[spec.dtype], load, spec.softcap, narrow)
        self.load_path = "tma-pages" if load == "boxes" else "tma-slots"
        self.batch, self.spec = batch, spec
        q_lens, kv_lens = _host_lengths(batch)
        row_bytes = 2 * (self.config.d + self.config.d_v)
        step = Step(q_lens, kv_lens, spec.kv_heads, spec.ratio, self.left, self.right, row_bytes)
        units, device = _multiprocessors(batch.device), batch.device
        boxes = int((-(-kv_lens // BOX)).sum()) if load == "slots" else 0
        scratch_bytes = boxes * BOX * spec.kv_heads * row_bytes
        # Beyond the bound scattered keys are read row by row: slow, and right.
        limit = settings.workspace_bytes()
        self.gathered = 0 < scratch_bytes <= limit - _SPARE
        work = work_list(step, self.config.tile, units if split else 0)
        room = limit - _SPARE - scratch_bytes * self.gathered
        if 4 * work.partials * self.config.tile.m * (self.config.d_v + 1) > room:
            work = work_list(step, self.config.tile)
        self.items, self.partials, self.num_splits = len(work.items), work.partials, work.num_splits
        self.blocks = min(self.items, units)
        self.split_tiles = len(work.split)
        owner = first_box = np.zeros(0, np.int32)
        if load == "slots":
            owner, first_box = box_table(kv_lens, BOX)
        self.control, self.work, self.split, self.owner, self.first_box = _send(
            [np.array([0, self.items], np.int32), work.items, work.split, owner, first_box], device
        )
        self.nothing = self.control.view(torch.float32)[:1]  # stands where nothing is read or written
        self.first_slots = self.owner
        self.boxes = owner.size
        if self.boxes:
            self.first_slots = torch.empty(self.boxes, dtype=torch.int32, device=device)
            if self.items:
                function_of("find_runs")(
                    batch.page_table, batch.cu_seqlens_q, batch.kv_lens, self.owner, self.first_box, self.first_slots,
                    batch.page_size, self.left,
                )  # fmt: skip
        self._take_workspace()

    def _take_workspace(self) -> None:
        """Views of the device's workspace: scratch for K and V, partial results. Plans share it, layers of a stream
        run one after the other."""
        config, heads, tile = self.config, self.spec.kv_heads, self.config.tile
        keys = self.boxes * BOX if self.gathered else 1
        rows = max(self.partials * tile.m, 1)
        sizes = [2 * keys * heads * config.d, 2 * keys * heads * config.d_v, 4 * rows * config.d_v, 4 * rows]
        parts = workspace.take(self.batch.device, sum(-(-n // 1024) * 1024 for n in sizes))
        views, at = [], 0
        for n in sizes:
            views.append(parts[at : at + n])
            at += -(-n // 1024) * 1024
        self.scratch = [
            views[0].view(self.spec.dtype).view(1, keys, heads, config.d),
            views[1].view(self.spec.dtype).view(1, keys, heads, config.d_v),
        ]
        self.part_o = views[2].view(torch.float32).view(rows, config.d_v)
        self.part_lse = views[3].view(torch.float32)

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
        """As the protocol says: one launch, one more for scattered slots and one for split keys."""
        if self.items == 0:
            return
        if scale <= 0:  # the largest score is the largest product only where the scale is positive
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        if not _aligned(q):
            q = torch.empty(q.shape, dtype=q.dtype, device=q.device).copy_(q)  # contiguous() may give it back as it is
        where = out
        if not _aligned(out):  # a copy of what it holds: rows past the batch's stay as they are
            where = torch.empty(out.shape, dtype=out.dtype, device=out.device).copy_(out)
        batch, config = self.batch, self.config
        k, v = _pool("k_pages", k_pages), _pool("v_pages", v_pages)
        flat = config.load == "slots" and _is_flat(k_pages) and _is_flat(v_pages)
        if self.gathered:
            k_scratch, v_scratch = self.scratch
            function_of("gather")(
                _chunks(k), _chunks(v), _chunks(k_scratch[0]), _chunks(v_scratch[0]), batch.page_table,
                batch.cu_seqlens_q, batch.kv_lens, self.owner, self.first_box, self.first_slots, batch.page_size,
                self.left, int(flat), min(self.boxes, 8 * _multiprocessors(batch.device)),
            )  # fmt: skip
        if flat:
            k, v = _slots(k), _slots(v)
        inner = 0.0
        if softcap > 0:
            inner, scale = 2.0 * LOG2E * scale / softcap, softcap
        logs = self.nothing.view(1, 1) if lse is None else lse
        sinks = self.nothing if sinks is None else sinks.float()
        has_sinks = int(self.spec.sinks)
        function_of(config)(
            q, k, v, where, logs, sinks, batch.cu_seqlens_q, batch.kv_lens, batch.page_table, self.work, self.control,
            self.first_slots, self.first_box, *self.scratch, self.part_o, self.part_lse, scale * LOG2E, inner,
            self.left, self.right, batch.page_size, int(flat), int(self.gathered), int(lse is not None), has_sinks,
            self.blocks,
        )  # fmt: skip
        if self.split_tiles:
            function_of(f"combine_{config.dtype}_{config.d_v}")(
                self.part_o, self.part_lse, where, logs, sinks, batch.cu_seqlens_q, self.split, config.tile.m,
                self.spec.ratio, int(lse is not None), has_sinks, self.split_tiles,
            )  # fmt: skip
        if where is not out:
            out.copy_(where)


def _send(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, by one copy from pinned memory."""
    sizes = [-(-max(a.size, 1) // 8) * 8 for a in arrays]  # each starts at a multiple of 32 bytes
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat, at = host.numpy(), 0
    for a, size in zip(arrays, sizes):
        flat[at : at + a.size] = a.ravel()
        at += size
    sent = host.to(device, non_blocking=True)
    views, at = [], 0
    for a, size in zip(arrays, sizes):
        views.append(sent[at : at + max(a.size, 1 if a.ndim == 1 else ITEM_INTS)].view(-1, *a.shape[1:]))
        at += size
    return views


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


def _pool(name: str, pool: torch.Tensor) -> torch.Tensor:
    """The pool without strides that mean nothing; ValueError where rows do not start at multiples of 16 bytes."""
    shape, strides = pool.shape, pool.stride()
    if 1 in shape[:3] or 0 in shape:
        shape = tuple(max(n, 1) for n in shape)  # an empty pool is never read
        strides = (*(ALIGN if n == 1 else s for n, s in zip(shape[:3], strides)), 1)
        pool = pool.as_strided(shape, strides) if pool.numel() else pool.new_zeros(shape)
    if pool.data_ptr() % 16 or strides[0] % ALIGN or strides[1] % ALIGN or strides[2] % ALIGN:
        raise bad(name, f"of strides {strides} at {pool.data_ptr():#x}", "rows that start at multiples of 16 bytes")
    return pool


def _slots(pool: torch.Tensor) -> torch.Tensor:
    """A flat pool as one page of all slots."""
    pages, page_size, heads, d = pool.shape
    stride = pool.stride(0) if page_size == 1 else pool.stride(1)
    return pool.as_strided((1, pages * page_size, heads, d), (ALIGN, stride, pool.stride(2), 1))


def _chunks(rows: torch.Tensor) -> torch.Tensor:
    """[..., d] of a 16-bit type as [..., d / 8, 4] of int32."""
    words = rows.view(torch.int32)
    return words.view(*words.shape[:-1], -1, 4)
