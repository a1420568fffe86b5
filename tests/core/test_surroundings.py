"""Whatever surrounds a call - training, autocast, threads, buffers of odd kinds - does not reach into it."""

import sys
import threading

import pytest
import torch

from fa4_core import LayerSpec, prefill
from fa4_core.testing import make_step

SPEC = LayerSpec(4, 2, 16, dtype=torch.float32)


@pytest.fixture
def step():
    return make_step(SPEC, [5, 3], [20, 3])


def call(step, **change):
    tensors = {"q": step.q, "k_pages": step.k_pages, "v_pages": step.v_pages}
    return prefill(**{**tensors, "batch": step.batch, "spec": SPEC, **change})


def test_training_does_not_reach_in(step):
    want = step.prefill()[0]
    weight = torch.ones(16, requires_grad=True)
    for q in (torch.nn.Parameter(step.q.clone()), weight * step.q):
        out = call(step, q=q)
        assert torch.equal(out, want)
        assert not out.requires_grad


def test_autocast_does_not_reach_in(step):
    want = step.prefill()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(step), want)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_buffers_that_may_not_be_written_are_refused_before_anything_is(step, name):
    shapes = {"out": (8, 4, 16), "lse": (4, 8)}
    buffers = {n: torch.full(shape, torch.nan) for n, shape in shapes.items()}
    with torch.inference_mode():
        inference = torch.full(shapes[name], torch.nan)
    for bad, message in (
        (torch.nn.Parameter(buffers[name].clone()), "was a leaf that requires grad"),
        (inference, "was made in inference mode"),
    ):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            call(step, **{**buffers, name: bad})
    assert all(b.isnan().all() for b in buffers.values())


def test_results_share_no_memory_with_themselves_or_anything_else(step):
    room = torch.zeros(4096)
    cases = [
        ({"out": room.as_strided((8, 4, 16), (16, 4, 1))}, "out was of shape .*; allowed: elements that share"),
        ({"lse": room.as_strided((4, 8), (1, 1))}, "lse was of shape .*; allowed: elements that share"),
        ({"out": step.k_pages.view(-1)[:512].view(8, 4, 16)}, "out was in the memory of k_pages"),
        ({"out": step.q}, "out was in the memory of q"),
        ({"out": room[:512].view(8, 4, 16), "lse": room[500:532].view(4, 8)}, "lse was in the memory of out"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            call(step, **change)
    apart = {"out": room[:512].view(8, 4, 16), "lse": room[512:544].view(8, 4).t()}
    assert torch.equal(call(step, **apart), step.prefill()[0])


def test_concurrent_calls_give_back_all_threads(step):
    torch.set_num_threads(2)
    workers = [threading.Thread(target=lambda: [step.prefill() for _ in range(30)]) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert torch.get_num_threads() == 2
    seen = []
    late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert seen == [2]


@pytest.mark.parametrize("side", [2**31 - 1, sys.maxsize, 2**70])
def test_a_side_longer_than_any_request_is_no_window(side):
    assert LayerSpec(4, 2, 16, causal=False, window=(side, side)) == LayerSpec(4, 2, 16, causal=False)
    assert LayerSpec(4, 2, 16, causal=False, window=(None, 2**31 - 2)).window == (None, 2**31 - 2)


@pytest.mark.parametrize("scale", [float("inf"), 10**400, 1e39, "1", True])
def test_scales_that_float32_does_not_hold(step, scale):
    with pytest.raises(ValueError, match="scale was"):
        call(step, scale=scale)
