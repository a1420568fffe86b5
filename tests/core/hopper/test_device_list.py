"""The lists made on the device, against those made on the host."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_core.kernels.hopper.config import BOX, Tile
from fa4_core.kernels.hopper.device_list import boxes_on_device, items_on_device, most_tiles
from fa4_core.kernels.hopper.plan import Layer, Step, box_table, query_tiles, work_list
from fa4_core.kernels.hopper.ranges import UNBOUNDED, key_tiles, query_span

SHAPE = Tile(groups=3, n=80, k_stages=3, v_stages=3, q_stages=2)
lengths = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=12)
sides = st.one_of(st.just(UNBOUNDED), st.integers(0, 300))


def tensors(q_lens, kv_lens):
    cu = torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32)
    return cu, torch.tensor(kv_lens, dtype=torch.int32)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 9), sides, sides, st.integers(0, 500))
def test_the_same_items_in_an_order_as_good(lens, kv_heads, ratio, left, right, spare):
    q_lens, kv_lens = [q for q, _ in lens], [k for _, k in lens]
    layer = Layer(kv_heads, ratio, left, right, 512)
    items, count = items_on_device(*tensors(q_lens, kv_lens), layer, SHAPE, sum(q_lens) + spare)
    step = Step(np.asarray(q_lens), np.asarray(kv_lens), kv_heads, ratio, left, right, 512)
    want = work_list(step, SHAPE).items
    assert int(count) == len(want) <= len(items)
    got = items[: len(want)].numpy()
    assert sorted(map(tuple, got)) == sorted(map(tuple, want))

    def costs(rows):
        request, tile = rows[:, 0], rows[:, 2]
        q_len, kv_len = np.asarray(q_lens)[request], np.asarray(kv_lens)[request]
        first, last = query_span(tile, ratio, q_len, SHAPE.granules, np.minimum)
        n_min, n_max, _, _ = key_tiles(
            first, last, q_len, kv_len, left, right, SHAPE.n, np.minimum, np.maximum
        )  # fmt: skip
        return np.maximum(n_max - n_min, 0).tolist()

    assert costs(got) == costs(want)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12), st.integers(1, 9), st.integers(0, 50))
def test_no_step_has_more_tiles(q_lens, ratio, spare):
    tiles = int(query_tiles(np.asarray(q_lens, np.int64), ratio, SHAPE).sum())
    assert tiles <= most_tiles(sum(q_lens) + spare, len(q_lens), ratio, SHAPE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=9), st.integers(0, 40))
def test_the_same_boxes(kv_lens, more):
    owner, first_box, boxes = boxes_on_device(tensors(kv_lens, kv_lens)[1], max(kv_lens) + more)
    want_owner, want_first = box_table(np.asarray(kv_lens, np.int64), BOX)
    assert int(boxes) == want_owner.size
    assert owner[: want_owner.size].tolist() == want_owner.tolist()
    assert first_box.tolist() == want_first.tolist()
