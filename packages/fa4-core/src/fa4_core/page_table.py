"""Page tables as the engines keep them, made into the one that PrefillBatch wants: int32 [B, P], pages in order.

And slots, which name a row of a page.
"""

from __future__ import annotations

import torch

from .errors import bad, require

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def from_block_table(block_table: torch.Tensor) -> torch.Tensor:
    """A table of block ids (vLLM), as it is where it already fits.

    Args:
        block_table: Integers [B, P]; entries past a request's length may hold anything.

    Returns:
        int32 [B, P] with contiguous rows; a view where no copy is needed.

    Raises:
        ValueError: Not two dimensions of integers.
    """
    require("block_table", block_table, torch.Tensor)
    if block_table.dim() != 2 or block_table.dtype not in INTEGERS:
        raise bad("block_table", f"{block_table.dtype} of shape {list(block_table.shape)}", "integers [B, P]")
    table = block_table.to(torch.int32)
    if block_table.dtype == torch.int64:
        # Whatever int32 does not hold is no page; it must not turn into one.
        table = table.masked_fill_(table != block_table, -1)
    return table if table.shape[1] <= 1 or table.stride(1) == 1 else table.contiguous()


def from_token_slots(
    slots: torch.Tensor,
    requests: torch.Tensor,
    *,
    page_size: int,
    max_kv_len: int,
    twins: torch.Tensor | None = None,
) -> torch.Tensor:
    """A table of token slots (SGLang), where the keys of a page stand at consecutive slots.

    Args:
        slots: Integers [rows, max_tokens]: the slot of each token of each request, slot = page * page_size + row.
        requests: Integers [B], which row of `slots` is whose.
        page_size: Rows of a page, at least 1.
        max_kv_len: Upper bound of any request's keys; the table is made this wide and no wider.
        twins: Integers [n] or None: each slot's twin in a second pool, whose pages the table then names. Pages of
            both pools hold the same tokens in the same order; a slot that is not in 0..n-1 has no twin.

    Returns:
        int32 [B, ceil(max_kv_len / page_size)].

    Raises:
        ValueError: A wrong shape, or max_kv_len beyond the width of `slots`.
    """
    for name, t in (("slots", slots), ("requests", requests), ("twins", requests if twins is None else twins)):
        require(name, t, torch.Tensor)
        if t.dtype not in (torch.int32, torch.int64):
            raise bad(name, t.dtype, "torch.int32 or torch.int64")
    require("page_size", page_size, int)
    require("max_kv_len", max_kv_len, int)
    if slots.dim() != 2 or requests.dim() != 1:
        shapes = f"of shapes {list(slots.shape)} and {list(requests.shape)}"
        raise bad("slots and requests", shapes, "[rows, n] and [B]")
    if twins is not None and (twins.dim() != 1 or not twins.shape[0]):
        raise bad("twins", f"of shape {list(twins.shape)}", "[n], n at least 1")
    if page_size < 1:
        raise bad("page_size", page_size, "an int of at least 1")
    if not 0 <= max_kv_len <= slots.shape[1]:
        raise bad("max_kv_len", max_kv_len, f"0 to {slots.shape[1]}, the width of slots")
    # The first token of each page names it; the slots past a request's end are undefined, and so are their pages.
    first = slots[:, :max_kv_len:page_size].index_select(0, requests)
    if twins is not None:
        # Undefined slots may be any number: they are looked up nowhere, and name no page.
        inside = (first >= 0) & (first < twins.shape[0])
        first = twins[first.clamp_(0, twins.shape[0] - 1)].masked_fill_(~inside, -1)
    pages = first.div_(page_size, rounding_mode="floor")
    table = pages.to(torch.int32)
    # As above: whatever int32 does not hold is no page.
    return table if pages.dtype == torch.int32 else table.masked_fill_(table != pages, -1)


def write_slots(pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write new keys, or values, where their slots say; for devices on which an engine has no kernel that does.

    Args:
        pages: [pages, page_size, kv_heads, d] of any strides; written.
        slots: Integers [tokens], page * page_size + row; a negative one writes nothing.
        rows: [tokens and more, kv_heads, d]; those past `slots` are padding.

    Raises:
        ValueError: Fewer rows than slots, or rows of another shape than a page's.
    """
    n = len(slots)
    if rows.shape[0] < n or rows.shape[1:] != pages.shape[2:]:
        raise bad("rows", f"of shape {list(rows.shape)}", f"[{n} or more, {pages.shape[2]}, {pages.shape[3]}]")
    written = slots >= 0
    at = slots[written].long()
    pages[at // pages.shape[1], at % pages.shape[1]] = rows[:n][written].to(pages.dtype)
