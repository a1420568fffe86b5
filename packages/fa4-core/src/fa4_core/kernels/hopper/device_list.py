"""The work list where the host does not know the step's lengths: made on the device, and nothing is copied back.

Plain torch, some fifty small launches; the same arithmetic as plan.py, without splits. What the host fixes is how many
rows the lists have, from the rows of q and the page table's width.
"""

from __future__ import annotations

import torch

from .config import BOX, GRANULE, Tile
from .plan import ITEM_INTS, OF, PARTIAL, SECTION_BYTES, TO, Layer
from .ranges import key_tiles, query_span


def most_tiles(rows: int, requests: int, ratio: int, tile: Tile) -> int:
    """Query tiles of any step of so many query rows and requests.

    A request of n rows has at most (n + 7) / 8 granules a head, and a tile beyond the full ones.
    """
    requests = min(requests, rows)
    granules = (rows + (GRANULE - 1) * requests) // GRANULE * ratio
    return (granules + (tile.granules - 1) * requests) // tile.granules


def _minimum(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    return a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b)


def _maximum(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    return a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b)


def items_on_device(
    cu_seqlens_q: torch.Tensor, kv_lens: torch.Tensor, layer: Layer, tile: Tile, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(items, their number): int32 [most_tiles * kv_heads, ITEM_INTS], the live ones first, and int64 []."""
    device, heads = kv_lens.device, layer.kv_heads
    cu, kv = cu_seqlens_q.long(), kv_lens.long()
    q = cu[1:] - cu[:-1]
    tiles = ((q + GRANULE - 1) // GRANULE * layer.ratio + tile.granules - 1) // tile.granules
    ends = tiles.cumsum(0)
    position = torch.arange(most_tiles(rows, kv.shape[0], layer.ratio, tile), device=device)
    request = torch.searchsorted(ends, position, right=True).clamp_(max=kv.shape[0] - 1)
    index = position - (ends - tiles)[request]
    live = position < ends[-1]
    q_len, kv_len = q[request], kv[request]
    first, last = query_span(index, layer.ratio, q_len, tile.granules, _minimum)
    n_min, n_max, _, _ = key_tiles(first, last, q_len, kv_len, layer.left, layer.right, tile.n, _minimum, _maximum)
    cost = torch.where(live, (n_max - n_min).clamp_(min=0), -1)
    order = torch.argsort(cost, descending=True, stable=True)
    # Every (tile, head), longest first; then by section.
    of = order.repeat_interleave(heads)
    head = torch.arange(of.shape[0], device=device) % heads
    section = torch.where(live[of], _sections(q, kv, layer)[request[of], head], 1 << 40)
    by_section = torch.argsort(section, stable=True)
    of, head = of[by_section], head[by_section]
    items = torch.zeros((of.shape[0], ITEM_INTS), dtype=torch.int32, device=device)
    items[:, 0], items[:, 1], items[:, 2] = request[of], head, index[of]
    items[:, OF], items[:, TO], items[:, PARTIAL] = 1, 1, -1
    return items, ends[-1] * heads


def _sections(q: torch.Tensor, kv: torch.Tensor, layer: Layer) -> torch.Tensor:
    """As plan.sections: int64 [requests, kv_heads]."""
    each = torch.minimum(kv, q + layer.left) * layer.row_bytes
    order = torch.argsort(each, descending=True, stable=True)
    each = each[order]
    start = (each.cumsum(0) - each) * layer.kv_heads
    heads = torch.arange(layer.kv_heads, device=q.device)
    found = torch.empty((q.shape[0], layer.kv_heads), dtype=torch.int64, device=q.device)
    found[order] = (start[:, None] + heads * each[:, None]) // SECTION_BYTES
    return found


def boxes_on_device(kv_lens: torch.Tensor, most_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(owner of each box, first box of each request, boxes): as plan.box_table, int32, and int64 []."""
    boxes = (kv_lens.long() + BOX - 1) // BOX
    ends = boxes.cumsum(0)
    most = kv_lens.shape[0] * -(-most_keys // BOX)
    position = torch.arange(most, device=kv_lens.device)
    owner = torch.searchsorted(ends, position, right=True).clamp_(max=kv_lens.shape[0] - 1)
    return owner.int(), (ends - boxes).int(), ends[-1]
