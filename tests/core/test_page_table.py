"""Page tables from what the engines keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4_core.page_table import from_block_table, from_token_slots, write_slots


@given(st.integers(1, 70), st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(0, 9))
def test_slots_name_the_pages_they_lie_in(page_size, lens, seed):
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lens]
    pages = torch.randperm(sum(counts) + 1, generator=random)
    slots = torch.full((len(lens) + 2, 300), -1, dtype=torch.int32)  # what is past a request's end means nothing
    want, at = [], 0
    for i, (n, count) in enumerate(zip(lens, counts)):
        own = pages[at : at + count]
        at += count
        slots[i + 1, :n] = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:n].int()
        want.append(own.tolist())
    before = slots.clone()
    table = from_token_slots(slots, torch.arange(len(lens)) + 1, page_size=page_size, max_kv_len=max(lens))
    assert table.dtype == torch.int32
    assert table.shape == (len(lens), -(-max(lens) // page_size))
    assert [row[:count].tolist() for row, count in zip(table, counts)] == want
    assert torch.equal(slots, before), "the engine's own table was written"


@given(st.integers(1, 70), st.integers(0, 200), st.sampled_from([torch.int32, torch.int64]), st.integers(0, 9))
def test_slots_name_the_pages_their_twins_lie_in(page_size, kv_len, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    count = -(-kv_len // page_size)
    first, second = torch.randperm(2 * count + 1, generator=random), torch.randperm(count + 1, generator=random)
    twins = torch.zeros(((2 * count + 1) * page_size), dtype=dtype)
    rows = torch.arange(page_size)
    for mine, theirs in zip(first, second[:count]):
        twins[mine * page_size + rows] = (theirs * page_size + rows).to(dtype)
    slots = torch.full((2, 300), 2**31 - 1, dtype=torch.int32)
    slots[1, :kv_len] = (first[:count, None] * page_size + rows).flatten()[:kv_len].int()
    slots[0, :3] = torch.tensor([-7, -1, twins.shape[0]])
    before = slots.clone(), twins.clone()
    table = from_token_slots(slots, torch.tensor([1, 0]), page_size=page_size, max_kv_len=300, twins=twins)
    assert table.dtype == torch.int32
    assert table[0, :count].tolist() == second[:count].tolist()
    assert (table[0, count:] == -1).all(), "a slot that is none names no page"
    assert (table[1] == -1).all()
    assert torch.equal(slots, before[0]), "the engine's own table was written"
    assert torch.equal(twins, before[1]), "the engine's own table was written"


def test_a_fitting_block_table_is_not_copied():
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert from_block_table(table).data_ptr() == table.data_ptr()
    assert from_block_table(table[:, :2]).data_ptr() == table.data_ptr()


def test_others_are_made_to_fit():
    table = torch.arange(12).view(4, 3).t()
    made = from_block_table(table)
    assert made.dtype == torch.int32
    assert made.stride(1) == 1
    assert made.tolist() == table.tolist()


def test_rows_are_written_where_their_slots_say():
    memory = torch.full((5, 2, 16, 8), torch.nan)
    pages = memory.transpose(1, 2)[..., :4]  # heads before rows, keys beside values
    rows = torch.randn(6, 2, 4)  # two of padding
    write_slots(pages, torch.tensor([17, -1, 70, 0], dtype=torch.int32), rows)
    for (page, row), token in {(1, 1): 0, (4, 6): 2, (0, 0): 3}.items():
        assert torch.equal(pages[page, row], rows[token])
    assert int((~memory.isnan()).sum()) == 3 * 2 * 4
    for wrong in (rows[:3], rows[:, :1], rows[..., :3]):
        with pytest.raises(ValueError, match="rows was of shape .*; allowed:"):
            write_slots(pages, torch.arange(4), wrong)
