"""The specification in code: plain torch, on any device, tiled and exact about bits.

Every matrix product has one shape whatever the batch, since BLAS may add in another order for another shape:
queries come in tiles of `TILE_Q` positions with all q heads of a kv head side by side, keys in tiles of `TILE_K`,
short ones padded with zeros. Both kinds of tile start at multiples of their size counted from key 0, so a row
also stands at the same place of its tile however its request is cut into chunks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..batch import PrefillBatch
from ..errors import bad
from ..spec import LayerSpec

if TYPE_CHECKING:
    from . import Question

TILE_Q = 16  # small, so that a decode row pads to little
TILE_K = 256
PANEL = 32  # query tiles that share one read of a key tile
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Request:
    """One request's part of a step, lengths read from the device tensors."""

    index: int
    row: int  # its first row of q
    q_len: int
    kv_len: int
    window: tuple[int | None, int | None]

    @property
    def first(self) -> int:
        """Position of the first query; below 0 where there are more queries than keys."""
        return self.kv_len - self.q_len

    def keys(self, first: int, last: int) -> tuple[int, int]:
        """The keys [start, stop) that the queries at positions first..last see, taken together."""
        left, right = self.window
        start = 0 if left is None else max(0, first - left)
        stop = self.kv_len if right is None else min(self.kv_len, last + right + 1)
        return start, max(start, stop)

    def panels(self) -> Iterator[tuple[int, int]]:
        """Positions [start, stop) of the queries, cut at multiples of PANEL * TILE_Q."""
        yield from cuts(self.first, self.kv_len, PANEL * TILE_Q)


def cuts(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at multiples of step, negative ones too."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


_lock = threading.Lock()
_runs, _threads = 0, 1  # runs under way, and the threads that torch had before the first of them


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one CPU thread.

    A product of two tiles is too small to share: where other processes want the cores, waiting for a second thread
    takes twenty times longer than the product. And bits must not depend on how many threads an engine has.
    """
    global _runs, _threads
    # Not torch.set_num_threads: vLLM's CPU worker puts a warning in its place.
    with _lock:
        if _runs == 0:
            _threads = torch.get_num_threads()
        _runs += 1
        torch._C.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            # The last of several concurrent runs gives back what the first one found.
            torch._C.set_num_threads(_threads if _runs == 0 else 1)


class ReferenceKernel:
    """Serves every layer; the default on a CPU, by name on a GPU, which it stalls by reading lengths on the host."""

    name = "reference"
    by_name_on = frozenset({"cuda"})
    about = "plain torch, no workspace"

    def refuses(self, question: Question) -> str | None:
        """None: it serves everything."""
        return None

    def workspace_bytes(self, question: Question) -> int:
        """None: it takes what it needs from torch and gives it back."""
        return 0

    def plan(self, batch: PrefillBatch, spec: LayerSpec, *, invariant: bool) -> ReferencePlan:
        """Read the lengths and find the keys' places; `invariant` changes nothing, since it always is."""
        return ReferencePlan(batch, spec)


@dataclass
class ReferencePlan:
    """A step's requests, and where each key lies; the latter found once and shared by the layers."""

    batch: PrefillBatch
    spec: LayerSpec
    load_path: str = field(default="gather", init=False)
    num_splits: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        cu = self.batch.cu_seqlens_q.tolist()
        kv = self.batch.kv_lens.tolist()
        self._requests = [
            Request(i, cu[i], cu[i + 1] - cu[i], n, self.spec.window) for i, n in enumerate(kv) if cu[i + 1] > cu[i]
        ]
        self._slots = {r.index: self._find_slots(r) for r in self._requests}
        self._hidden = Masks(self.batch.device)
        # Both ends of what the kernel will dereference, to be held against the pool's size before anything is written.
        pages = [pages for pages, _ in self._slots.values() if pages.numel()]
        self._page_range = (min(int(p.min()) for p in pages), max(int(p.max()) for p in pages)) if pages else None

    def _find_slots(self, r: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and row of every key that the request's queries see, int64 [stop - start] each."""
        start, stop = r.keys(r.first, r.kv_len - 1)
        keys = torch.arange(start, stop, device=self.batch.device)
        row = self.batch.page_table[r.index].long()
        return row[keys // self.batch.page_size], keys % self.batch.page_size

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
        """See `KernelPlan.run`. Raises ValueError where the page table leaves the pool, before anything is written."""
        if self._page_range and not 0 <= self._page_range[0] <= self._page_range[1] < k_pages.shape[0]:
            pages = f"pages 0 to {k_pages.shape[0] - 1}, those of k_pages" if len(k_pages) else "none: k_pages is empty"
            raise bad("page_table", "{} to {}".format(*self._page_range), pages)
        # The caller may be training, or under autocast: neither may reach in here.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False), one_thread():
            load = KeyLoader(self.spec, k_pages, v_pages)
            for r in self._requests:
                for start, stop in r.panels():
                    self._run_panel(r, start, stop, q, load, scale, softcap, sinks, out, lse)

    def _run_panel(
        self,
        r: Request,
        start: int,
        stop: int,
        q: torch.Tensor,
        load: KeyLoader,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        tiles = [QueryTile(self.spec, r, a, b, q, scale) for a, b in cuts(start, stop, TILE_Q)]
        pages, rows = self._slots[r.index]
        base = r.keys(r.first, r.kv_len - 1)[0]
        first, last = r.keys(start, stop - 1)
        for a, b in cuts(first, last, TILE_K):
            load(a % TILE_K, pages[a - base : b - base], rows[a - base : b - base])
            for tile in tiles:
                tile.attend(load, a - a % TILE_K, softcap, self._hidden)
        for tile in tiles:
            tile.store(sinks, out, lse)


class KeyLoader:
    """One tile of keys and values, in contiguous fp32 of fixed shape; rows that hold no key are zero."""

    def __init__(self, spec: LayerSpec, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
        new = k_pages.new_zeros
        self._pools = ((k_pages, _flat(k_pages)), (v_pages, _flat(v_pages)))
        self.k = new((spec.kv_heads, TILE_K, spec.head_dim), dtype=torch.float32)
        self.v = new((spec.kv_heads, TILE_K, spec.head_dim_v), dtype=torch.float32)

    def __call__(self, at: int, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill rows at..at + n of the tile from the named pages and rows, [n] each."""
        end = at + pages.shape[0]
        for tile, (pool, flat) in zip((self.k, self.v), self._pools):
            if at > 0 or end < TILE_K:
                tile.zero_()  # it may hold another request's NaN still, and 0 * NaN would reach the sum
            # Rows of one dimension are found three times as fast as by page and row.
            found = pool[pages, rows] if flat is None else flat.index_select(0, pages * pool.shape[1] + rows)
            tile[:, at:end] = found.transpose(0, 1)


def _flat(pages: torch.Tensor) -> torch.Tensor | None:
    """Pages as rows [pages * page_size, kv_heads, d], a view; None where they do not stand one after the other."""
    count, size = pages.shape[:2]
    # A stride says something only where there is a next one.
    stride = pages.stride(1) if size > 1 else pages.stride(0)
    if count > 1 and pages.stride(0) != size * stride:
        return None
    return pages.as_strided((count * size, *pages.shape[2:]), (stride, *pages.stride()[2:]))


class Masks:
    """Which keys of a tile each position does not see; made once a step, since layers share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(self, request: Request, first: int, first_key: int) -> torch.Tensor | None:
        """Of the positions first..first + TILE_Q and keys first_key..first_key + TILE_K.

        Returns:
            bool [TILE_Q, 1, TILE_K], True where hidden; None when all see all.
        """
        left, right = request.window
        last_key = first_key + TILE_K - 1
        whole = (
            last_key < request.kv_len
            and (right is None or last_key <= first + right)
            and (left is None or first_key >= first + TILE_Q - 1 - left)
        )
        if whole:
            return None
        key = (request.index, first, first_key)
        if key not in self._known:
            positions = torch.arange(first, first + TILE_Q, device=self._device)[:, None, None]
            keys = torch.arange(first_key, first_key + TILE_K, device=self._device)
            hidden = (keys >= request.kv_len).expand(TILE_Q, 1, TILE_K)
            if right is not None:
                hidden = hidden | (keys > positions + right)
            if left is not None:
                hidden = hidden | (keys < positions - left)
            self._known[key] = hidden
        return self._known[key]


class QueryTile:
    """The running softmax of up to TILE_Q positions, all heads, in fp32.

    Products are of the whole tile, [kv_heads, TILE_Q * ratio, ...]; what goes row by row is done for its live rows
    alone, those that hold queries: one in 16 of a decode tile.
    """

    def __init__(self, spec: LayerSpec, request: Request, start: int, stop: int, q: torch.Tensor, scale: float) -> None:
        self._spec, self._request = spec, request
        self._start, self._stop = start, stop
        self._first = start - start % TILE_Q
        self._positions = slice(start - self._first, stop - self._first)
        self._live = slice(self._positions.start * spec.ratio, self._positions.stop * spec.ratio)
        shift = request.row - request.first
        self._rows = slice(start + shift, stop + shift)  # of q and out
        whole = (spec.kv_heads, TILE_Q * spec.ratio)
        self._q = q.new_zeros((*whole, spec.head_dim), dtype=torch.float32)
        mine = self._q[:, self._live]
        self._by_position(mine).copy_(self._by_kv_head(q[self._rows]))
        mine.mul_(scale)
        self._acc = self._q.new_zeros((*whole, spec.head_dim_v))
        self._top = self._q.new_full((*mine.shape[:2], 1), -math.inf)  # largest score so far, of live rows
        self._total = self._q.new_zeros((*mine.shape[:2], 1))  # sum of exp(score - top), likewise

    def _by_position(self, t: torch.Tensor) -> torch.Tensor:
        """Live rows [kv_heads, n * ratio, ...] as [kv_heads, n, ratio, ...]."""
        return t.view(t.shape[0], -1, self._spec.ratio, t.shape[-1])

    def _by_kv_head(self, t: torch.Tensor) -> torch.Tensor:
        """[n, q_heads, d] as [kv_heads, n, ratio, d]."""
        return t.view(t.shape[0], self._spec.kv_heads, self._spec.ratio, -1).transpose(0, 1)

    def attend(self, tile: KeyLoader, first_key: int, softcap: float, masks: Masks) -> None:
        """Take in the keys first_key..first_key + TILE_K."""
        low, high = self._request.keys(self._start, self._stop - 1)
        if high <= first_key or low >= first_key + TILE_K:
            return
        scores = torch.bmm(self._q, tile.k.transpose(1, 2))  # [kv_heads, TILE_Q * ratio, TILE_K]
        live = scores[:, self._live]
        if softcap > 0:
            live.div_(softcap).tanh_().mul_(softcap)
        hidden = masks(self._request, self._first, first_key)
        if hidden is not None:
            self._by_position(live).masked_fill_(hidden[self._positions], -math.inf)
        top = torch.maximum(self._top, live.amax(-1, keepdim=True))
        base = top.clamp_min(LOWEST)  # a row that sees nothing yet: exp(-inf), not exp(-inf + inf)
        decay = torch.exp(self._top - base)
        live.sub_(base).exp_()
        self._total.mul_(decay).add_(live.sum(-1, keepdim=True))
        self._acc[:, self._live].mul_(decay)
        self._acc.baddbmm_(scores, tile.v)
        self._top = top

    def store(self, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Divide, and write the rows of out and lse."""
        top, total, acc = self._top, self._total, self._acc[:, self._live]
        if sinks is not None:
            n = self._stop - self._start
            sink = sinks.float().view(self._spec.kv_heads, 1, self._spec.ratio).expand(-1, n, -1).reshape(top.shape)
            with_sink = torch.maximum(top, sink)
            base = with_sink.clamp_min(LOWEST)
            decay = torch.exp(top - base)
            acc, total, top = acc * decay, total * decay + torch.exp(sink - base), with_sink
        empty = total == 0
        result = acc / total.masked_fill(empty, 1.0)
        self._by_kv_head(out[self._rows]).copy_(self._by_position(result))
        if lse is not None:
            logs = torch.where(empty, -math.inf, top + torch.log(total))
            per_head = lse.view(self._spec.kv_heads, self._spec.ratio, -1)[:, :, self._rows]
            per_head.copy_(self._by_position(logs).squeeze(-1).transpose(1, 2))
