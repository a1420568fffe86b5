"""The tile arithmetic and the work list, against a count of pairs one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_core.kernels.hopper.config import BOX, COLUMNS, GRANULE, SMEM_LIMIT, Tile, all_configs, all_kernels
from fa4_core.kernels.hopper.plan import (
    FROM,
    HEAD,
    OF,
    PARTIAL,
    TILE,
    TO,
    Step,
    box_table,
    query_tiles,
    work_list,
)
from fa4_core.kernels.hopper.ranges import UNBOUNDED, key_tiles, query_span, window_sides

SHAPE = Tile(groups=2, n=128, k_stages=2, v_stages=2, q_stages=2)
sides = st.one_of(st.just(UNBOUNDED), st.integers(0, 300))


def queries_of(tile, ratio, q_len, granules):
    """Each granule's eight queries, clipped; the definition of a packed tile."""
    found = set()
    for g in range(tile * granules, (tile + 1) * granules):
        found |= {q for q in range(GRANULE * (g // ratio), GRANULE * (g // ratio) + GRANULE) if q < q_len}
    return found


def seen(query, q_len, kv_len, left, right):
    at = kv_len - q_len + query
    return range(max(0, at - left), max(0, min(kv_len, at + right + 1)))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 6), st.integers(1, 12), st.integers(1, 400), st.sampled_from([16, 24]))
def test_query_span_is_that_of_the_granules(tile, ratio, q_len, granules):
    first, last = query_span(tile, ratio, q_len, granules, min)
    mine = queries_of(tile, ratio, q_len, granules)
    assert (min(mine), max(mine)) == (first, last) if mine else last < first


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 300), st.integers(0, 700), sides, sides, st.sampled_from([80, 112, 128]), st.data())
def test_key_tiles_hold_what_is_seen(q_len, kv_len, left, right, n, data):
    first = data.draw(st.integers(0, q_len - 1))
    last = data.draw(st.integers(first, q_len - 1))
    n_min, n_max, clear_lo, clear_hi = key_tiles(first, last, q_len, kv_len, left, right, n, min, max)
    keys = [set(seen(q, q_len, kv_len, left, right)) for q in range(first, last + 1)]
    wanted = {k // n for s in keys for k in s}
    assert wanted <= set(range(n_min, n_max))
    if wanted:
        assert (n_min, n_max) == (min(wanted), max(wanted) + 1)
    else:
        assert n_max - n_min <= 1
    for tile in range(max(clear_lo, n_min), min(clear_hi, n_max)):
        assert all(set(range(tile * n, tile * n + n)) <= s for s in keys)


def step_of(q_lens, kv_lens, kv_heads=2, ratio=4, left=UNBOUNDED, right=0):
    return Step(np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64), kv_heads, ratio, left, right, 512)


lengths = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=0, max_size=12)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 9), sides)
def test_every_tile_once(lens, kv_heads, ratio, left):
    q_lens = [q for q, _ in lens]
    items = work_list(step_of(q_lens, [q + k for q, k in lens], kv_heads, ratio, left), SHAPE).items
    tiles = query_tiles(np.asarray(q_lens, np.int64), ratio, SHAPE)
    want = {(i, h, t) for i, n in enumerate(tiles) for h in range(kv_heads) for t in range(n)}
    assert items.dtype == np.int32
    assert len(items) == len(want)
    assert {tuple(r[:3]) for r in items.tolist()} == want


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(1, 12))
def test_tiles_cover_every_query_of_every_head(q_len, ratio):
    tiles = int(query_tiles(np.asarray([q_len]), ratio, SHAPE)[0])
    rows = set()
    for g in range(tiles * SHAPE.granules):
        rows |= {(g % ratio, q) for q in range(GRANULE * (g // ratio), GRANULE * (g // ratio + 1))}
    assert {(h, q) for h in range(ratio) for q in range(q_len)} <= rows
    assert (tiles - 1) * SHAPE.granules < -(-q_len // GRANULE) * ratio


def test_longest_first_within_a_section():
    items = work_list(step_of([1000], [1000], kv_heads=1), SHAPE).items
    assert (np.diff(items[:, TILE] // 4) <= 0).all()  # four tiles of 32 queries end in the same key tile


def test_keys_that_fit_the_cache_form_a_section():
    heads = 8
    items = work_list(step_of([200_000], [200_000], heads, 4), SHAPE).items  # 98 MB a head
    assert list(dict.fromkeys(items[:, 1].tolist())) == list(range(heads))
    change = np.count_nonzero(np.diff(items[:, 1]))
    assert change == heads - 1


def test_nothing_to_do():
    assert work_list(step_of([], []), SHAPE, 132).items.shape == (0, 8)
    assert work_list(step_of([0, 0], [5, 0]), SHAPE, 132).items.shape == (0, 8)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 3), st.integers(1, 9), st.sampled_from([4, 132]))
def test_parts_of_split_tiles(lens, kv_heads, ratio, blocks):
    q_lens = [q % 300 for q, _ in lens]
    kv_lens = [30 * k for _, k in lens]
    work = work_list(step_of(q_lens, kv_lens, kv_heads, ratio), SHAPE, blocks)
    found = {}
    for row in work.items.tolist():
        found.setdefault((row[0], row[HEAD], row[TILE]), []).append((row[FROM], row[TO], row[OF], row[PARTIAL]))
    partials, split = [], {}
    for key, parts in found.items():
        parts.sort()
        ends = [0, *(to for _, to, _, _ in parts)]
        assert [(a, b) for a, b, _, _ in parts] == list(itertools.pairwise(ends))  # each piece once
        assert {of for _, _, of, _ in parts} == {ends[-1]}
        at = [x for _, _, _, x in parts]
        assert len(parts) > 1 or (parts[0], ends[-1]) == ((0, 1, 1, -1), 1)
        if len(parts) > 1:
            assert at == list(range(at[0], at[0] + len(parts)))
            partials += at
            split[key] = (len(parts), at[0])
    assert sorted(partials) == list(range(work.partials))
    assert split == {tuple(r[:3]): (r[3], r[4]) for r in work.split.tolist()}


def test_few_long_tiles_are_split():
    work = work_list(step_of([512], [33280], kv_heads=1, ratio=8), SHAPE, 132)
    assert work.num_splits == 4  # 32 tiles of 260 key tiles on 132 blocks


def test_many_tiles_are_not_split():
    assert work_list(step_of([16384], [16384], kv_heads=8), SHAPE, 132).num_splits == 1


def test_the_last_round_of_equal_items_is_split():
    work = work_list(step_of([2048] * 4, [32768] * 4, kv_heads=8), SHAPE, 132)  # 2048 items, 15.5 rounds
    assert len(work.split) == 2048 % 132
    assert (work.items[-work.partials :, OF] > 1).all()


@given(st.lists(st.integers(0, 100), max_size=8))
def test_boxes_in_one_row(kv_lens):
    owner, first = box_table(np.asarray(kv_lens, np.int64), BOX)
    want = [(i, b) for i, n in enumerate(kv_lens) for b in range(-(-n // BOX))]
    assert [(o, at - first[o]) for at, o in enumerate(owner.tolist())] == want


def test_windows_as_numbers():
    assert window_sides((None, 0)) == (UNBOUNDED, 0)
    assert window_sides((5, None)) == (5, UNBOUNDED)


@pytest.mark.parametrize("config", all_configs(), ids=lambda c: c.name)
def test_variants_fit(config):
    tile = config.tile
    assert config.smem_bytes + 1024 <= SMEM_LIMIT
    assert tile.n % BOX == 0
    assert 0 <= config.width - config.d < COLUMNS > config.width_v - config.d_v
    assert tile.n // BOX * config.width // COLUMNS <= 32
    many, few = tile.registers
    assert 128 * (many * tile.groups + few) <= 65536
    assert many % 8 == few % 8 == 0


def test_at_most_sixty_kernels_with_their_own_names():
    configs = all_configs()
    assert len({c.name for c in configs}) == len(configs)
    assert set(configs) < set(all_kernels().values())
    assert len(all_kernels()) <= 60


def test_rows_of_a_block():
    assert Tile(groups=3, n=128, k_stages=2, v_stages=2, q_stages=1).m == 192


def test_a_cut_that_leaves_no_block_idle():
    """88 tiles of 416 key tiles on 132 blocks: one item of two thirds for each of 88, two of a third for the others."""
    work = work_list(step_of([512], [33280], kv_heads=8, ratio=4), Tile(3, 80, 3, 3, 2), 132)
    assert (len(work.items), work.num_splits) == (176, 2)
    length = work.items[:, TO] - work.items[:, FROM]
    assert (np.diff(length) <= 0).all()
    assert length[87] > 2 * length[88] - 12
