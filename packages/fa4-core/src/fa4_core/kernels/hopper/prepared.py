"""A step made ready: its lists on the device, the workspace, and the call of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import settings, workspace
from ...batch import PrefillBatch
from ...spec import LayerSpec
from .buffers import Lists, Room
from .config import BOX, NARROW, NARROW_KEYS, Config
from .device_list import boxes_on_device, items_on_device, most_tiles
from .plan import Layer, Step, Work, box_table, work_list
from .pools import aligned, as_chunks, as_pool, as_slots, is_flat
from .ranges import window_sides
from .turns import Turns, current_stream, turns_of

if TYPE_CHECKING:
    from ...prefill import Capacity

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG2E = math.log2(math.e)
ROUND = 1024  # bytes at whose multiples parts of the workspace start
PARTIALS = 8  # for each multiprocessor, the results of parts that a plan of fixed size has room for
COMBINE_ROWS = 48  # of the combine's grid: with the granules of a tile enough blocks for the chip


class HopperPlan:
    """A step on the device: the work list, and by slots where each box of keys lies.

    With the host's lengths the lists are made on the host, else at the first run on the device; either way nothing is
    copied back. With a capacity the plan has copies of the step's tensors, and everything has a fixed place: `refresh`
    writes another step there, for a graph that was captured before.

    Args:
        batch: The step.
        spec: The layer.
        function_of: Gives a compiled variant, or a helper kernel by its name.
        split: Keys may be split where a step has too few tiles.
        capacity: Of the steps that `refresh` may bring; None for this one alone.
    """

    def __init__(
        self,
        batch: PrefillBatch,
        spec: LayerSpec,
        function_of: Callable[[Config | str], Callable[..., None]],
        *,
        split: bool,
        capacity: Capacity | None = None,
    ) -> None:
        load = "boxes" if batch.page_size % BOX == 0 else "slots"
        left, right = window_sides(spec.window)
        d, d_v = spec.head_dim, spec.head_dim_v
        narrow = left + right < NARROW_KEYS and (d, d_v) in NARROW
        self.config = config = Config(d, d_v, DTYPES[spec.dtype], load, spec.softcap, narrow)
        self.load_path = "tma-pages" if load == "boxes" else "tma-slots"
        self.spec, self.num_splits = spec, 1
        self._tile, self._slots = config.tile, load == "slots"
        self._layer = Layer(spec.kv_heads, spec.ratio, left, right, 2 * (d + d_v))
        self._units = _multiprocessors(batch.device)
        self._limit = settings.workspace_bytes()
        self._partial_bytes = 4 * self._tile.m * (d_v + 1)
        self._box_bytes = BOX * spec.kv_heads * self._layer.row_bytes
        self._most_partials = self._limit // 2 // self._partial_bytes if split else 0
        self._functions = [function_of(config)]
        self._functions += [function_of(name) for name in ("find_runs", "gather") if self._slots]
        self._combine = function_of(f"combine_{config.dtype}_{d_v}") if split else None
        self.batch, self._rows = batch, 0  # rows of q that lists made on the device are for
        self._items, self._turns = 0, Turns(batch.device)
        self._cu, self._kv, self._table = batch.cu_seqlens_q, batch.kv_lens, batch.page_table
        self._fixed = capacity is not None
        lengths = _host_lengths(batch, self._fixed)
        self._on_device = lengths is None and capacity is None
        if capacity is not None:
            self._take_room(self._room_of(capacity), min(self._most_partials, PARTIALS * self._units))
            self._own_tensors(batch, capacity)
            self.refresh(batch)
        elif lengths is not None:
            work, owner, first_box = self._lists_of(*lengths)
            room = Room(batch.num_requests, len(work.items), len(work.split), owner.size)
            self._take_room(room, work.partials)
            self._turns.enter()
            self._write(work, owner, first_box)

    # ------------------------------------------------------------ the step

    def _room_of(self, capacity: Capacity) -> Room:
        partials = min(self._most_partials, PARTIALS * self._units)
        tiles = most_tiles(capacity.query_tokens, capacity.requests, self.spec.ratio, self._tile)
        boxes = capacity.requests * -(-capacity.keys // BOX) if self._slots else 0
        return Room(capacity.requests, tiles * self.spec.kv_heads + partials, partials // 2, boxes)

    def _own_tensors(self, batch: PrefillBatch, capacity: Capacity) -> None:
        """Tensors of the capacity's size in the place of the batch's."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=batch.device)

        self._cu, self._kv = ints(capacity.requests + 1), ints(max(capacity.requests, 1))
        self._table = ints(max(capacity.requests, 1), max(-(-capacity.keys // batch.page_size), 1))

    def refresh(self, batch: PrefillBatch) -> None:
        """Write another step in place, on the current stream; it fits the capacity, and the page size is the same."""
        self._turns.enter()
        n, width = batch.num_requests, min(batch.page_table.shape[1], self._table.shape[1])
        self._cu[: n + 1].copy_(batch.cu_seqlens_q)
        self._kv[:n].copy_(batch.kv_lens)
        self._table[:n, :width].copy_(batch.page_table[:, :width])
        lengths = _host_lengths(batch, True)
        assert lengths is not None  # a capacity is held against them
        self.batch = batch
        self._write(*self._lists_of(*lengths))

    def _lists_of(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[Work, np.ndarray, np.ndarray]:
        """(work, owner, first_box) from the host's lengths."""
        layer = self._layer
        step = Step(q_lens, kv_lens, layer.kv_heads, layer.ratio, layer.left, layer.right, layer.row_bytes)
        most = min(self._most_partials, PARTIALS * self._units) if self._fixed else self._most_partials
        work = work_list(step, self._tile, self._units if most else 0)
        owner = first_box = np.zeros(0, np.int32)
        if self._slots:
            owner, first_box = box_table(kv_lens, BOX)
        scratch = owner.size * self._box_bytes
        # What a split wins is less than what a box costs that is read row by row.
        crowded = not self._fixed and scratch <= self._limit < scratch + work.partials * self._partial_bytes + 4 * ROUND
        if work.partials > most or (work.partials and crowded):
            work = work_list(step, self._tile)
        return work, owner, first_box

    def _write(self, work: Work, owner: np.ndarray, first_box: np.ndarray) -> None:
        control = np.array([0, len(work.items), owner.size, len(work.split)], np.int32)
        self._lists.write(control=control, items=work.items, split=work.split, owner=owner, first_box=first_box)
        self.num_splits = work.num_splits
        self._find_runs(owner.size)

    def _find_runs(self, most: int) -> None:
        if most:
            lists, blocks = self._lists, min(-(-most // 256), 8 * self._units)
            self._functions[1](
                self._table, self._cu, self._kv, lists.owner, lists.first_box, lists.first_slots, lists.control,
                self.batch.page_size, self._layer.left, blocks,
            )  # fmt: skip

    def _make_on_device(self, rows: int) -> None:
        """The lists for up to so many rows of q, where the host does not know the lengths."""
        batch = self.batch
        items, count = items_on_device(batch.cu_seqlens_q, batch.kv_lens, self._layer, self._tile, rows)
        boxes = count.new_zeros(())
        owner = first_box = torch.zeros(1, dtype=torch.int32, device=batch.device)
        if self._slots:
            assert batch.max_kv_len is not None  # at most the table's width
            owner, first_box, boxes = boxes_on_device(batch.kv_lens, batch.max_kv_len)
        room = Room(batch.num_requests, len(items), 0, owner.numel() if self._slots else 0)
        self._take_room(room, 0)
        self._turns.enter()
        lists = self._lists
        lists.control[1:3] = torch.stack([count, boxes])
        lists.items[: len(items)], lists.first_box[: first_box.numel()] = items, first_box
        lists.owner[: owner.numel()] = owner
        self._rows = rows
        self._find_runs(room.boxes)

    # ------------------------------------------------------------- memory

    def _take_room(self, room: Room, partials: int) -> None:
        """Lists, and views of the current stream's workspace: scratch for K and V, partial results."""
        device, config, heads = self.batch.device, self.config, self.spec.kv_heads
        self._lists, self._items = Lists(room, device), room.items
        self._home = current_stream(device)
        spare = self._lists.spare  # stands where nothing is read or written
        self._nothing, self._no_lse = spare.view(torch.float32)[:1], spare.view(torch.float32)[:1].view(1, 1)
        self._blocks = self._units if self._fixed else min(room.items, self._units)
        self._split_rows = min(room.split, COMBINE_ROWS)
        # Boxes beyond the bound are read row by row: slow, and right.
        free = self._limit - (partials * self._partial_bytes + 4 * ROUND if partials else 0)
        self._gathered = min(room.boxes, free // self._box_bytes)
        keys, rows = BOX * self._gathered, partials * self._tile.m
        shapes = [(1, keys, heads, config.d), (1, keys, heads, config.d_v), (rows, config.d_v), (rows,)]
        kinds = [self.spec.dtype, self.spec.dtype, torch.float32, torch.float32]
        sizes = [-(-math.prod(shape) * kind.itemsize // ROUND) * ROUND for shape, kind in zip(shapes, kinds)]
        self._turns = Turns(device)
        if sum(sizes):
            block = workspace.take(device, sum(sizes))
            self._turns = turns_of(block) if device.type == "cuda" else self._turns
        views, at = [], 0
        for shape, kind, size in zip(shapes, kinds, sizes):
            if size:
                views.append(block[at : at + size].view(kind)[: math.prod(shape)].view(shape))
            else:
                least = (*(1 for _ in shape[:-1]), shape[-1] or 1)
                views.append(spare.view(kind)[: least[-1]].view(least))
            at += size
        self._scratch, self._parts = views[:2], views[2:]
        self._scratch_chunks = [as_chunks(t[0]) for t in self._scratch] if self._gathered else []

    # ---------------------------------------------------------------- run

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
        if self._on_device and q.shape[0] > self._rows and self.batch.num_requests:
            self._make_on_device(q.shape[0])
        if not self._items:
            return
        if self._turns.enter() != self._home and not torch.cuda.is_current_stream_capturing():
            self._lists.memory.record_stream(torch.cuda.current_stream(q.device))
            self._lists.first_slots.record_stream(torch.cuda.current_stream(q.device))
        if scale <= 0:  # the largest score is the largest product only where the scale is positive
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        if not aligned(q):
            q = torch.empty(q.shape, dtype=q.dtype, device=q.device).copy_(q)  # contiguous() may give it back as it is
        where = out
        if not aligned(out):  # a copy of what it holds: rows past the batch's stay as they are
            where = torch.empty(out.shape, dtype=out.dtype, device=out.device).copy_(out)
        lists, layer, page_size = self._lists, self._layer, self.batch.page_size
        k, v = as_pool("k_pages", k_pages), as_pool("v_pages", v_pages)
        flat = self._slots and is_flat(k_pages) and is_flat(v_pages)
        if self._gathered:
            self._functions[2](
                as_chunks(k), as_chunks(v), *self._scratch_chunks, self._table, self._cu, self._kv, lists.owner,
                lists.first_box, lists.first_slots, lists.control, page_size, layer.left, int(flat), self._gathered,
                min(self._gathered, 8 * self._units),
            )  # fmt: skip
        if flat:
            k, v = as_slots(k), as_slots(v)
        inner = 0.0
        if softcap > 0:
            inner, scale = 2.0 * LOG2E * scale / softcap, softcap
        logs = self._no_lse if lse is None else lse
        sinks = self._nothing if sinks is None else sinks.float()
        want_lse, has_sinks = int(lse is not None), int(self.spec.sinks)
        self._functions[0](
            q, k, v, where, logs, sinks, self._cu, self._kv, self._table, lists.items, lists.control,
            lists.first_slots, lists.first_box, *self._scratch, *self._parts, scale * LOG2E, inner, layer.left,
            layer.right, page_size, int(flat), self._gathered, want_lse, has_sinks, self._blocks,
        )  # fmt: skip
        if self._split_rows:
            assert self._combine is not None  # nothing was split without it
            self._combine(
                *self._parts, where, logs, sinks, self._cu, lists.split, lists.control, self._tile.m, layer.ratio,
                want_lse, has_sinks, self._split_rows,
            )  # fmt: skip
        if where is not out:
            out.copy_(where)


def _host_lengths(batch: PrefillBatch, bounds: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Upper bounds of the lengths of each request; None where the host does not know them.

    Args:
        batch: The step.
        bounds: The longest key length may stand for each request's. For one request it does in any case.
    """
    n, q_lens, kv_lens = batch.num_requests, batch.host_q_lens, batch.host_kv_lens
    if n == 1 and q_lens is None and batch.max_q_len is not None:
        q_lens = np.full(1, batch.max_q_len, np.int64)
    if kv_lens is None and (bounds or n == 1):
        kv_lens = np.full(n, batch.max_kv_len, np.int64)
    if q_lens is None or kv_lens is None:
        return None
    return np.asarray(q_lens), np.asarray(kv_lens)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
