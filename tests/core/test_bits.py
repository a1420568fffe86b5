"""Bits: a row depends on its own request alone, and, in this kernel, not even on how the request is cut."""

import pytest
import torch

from fa4_core import LayerSpec
from fa4_core.testing import make_step

SPEC = LayerSpec(9, 3, 64, dtype=torch.float32, sinks=True)
Q, KV = [300, 1, 40, 0, 17], [700, 150, 40, 9, 16]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", ["pools", "interleaved-hnd"])
def test_pages_and_layout_do_not_show(page_size, layout):
    out, lse = make_step(SPEC, Q, KV).prefill()
    other, other_lse = make_step(SPEC, Q, KV, page_size=page_size, layout=layout).prefill()
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


def test_company_does_not_show():
    """The first requests of a longer step: same numbers in, same bits out."""
    out, lse = make_step(SPEC, Q, KV).prefill()
    for n in range(1, len(Q)):
        some, some_lse = make_step(SPEC, Q[:n], KV[:n]).prefill()
        assert torch.equal(some, out[: len(some)])
        assert torch.equal(some_lse, lse[:, : len(some)])


@pytest.mark.parametrize("window", [(None, None), (100, None)])
def test_chunks_do_not_show(window):
    """Cold, cached and chunked agree bitwise, in every chunking tried."""
    spec = LayerSpec(9, 3, 64, dtype=torch.float32, window=window)
    whole = make_step(spec, [600], [600])
    out, lse = whole.prefill()
    for cuts in ([600], [1, 600], [512, 600], [17, 300, 301, 599, 600], list(range(37, 600, 37))):
        start = 0
        for stop in cuts:
            part = make_step(spec, [stop - start], [stop])
            step = type(part)(
                whole.q[start:stop],
                whole.k_pages,
                whole.v_pages,
                part.batch.with_pages(whole.batch.page_table),
                spec,
                whole.values,
            )
            some, some_lse = step.prefill(invariant=True)
            assert torch.equal(some, out[start:stop])
            assert torch.equal(some_lse, lse[:, start:stop])
            start = stop


def test_threads_do_not_show_and_are_given_back():
    torch.set_num_threads(1)
    out, lse = make_step(SPEC, Q, KV).prefill()
    torch.set_num_threads(2)
    other, other_lse = make_step(SPEC, Q, KV).prefill()
    assert torch.get_num_threads() == 2
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_request_spoils_itself_alone(broken):
    step = make_step(SPEC, [20, 30, 5], [300, 90, 5])
    out, lse = step.prefill()
    page = int(step.batch.page_table[0, 10])  # where the next request, shorter, has no keys
    step.k_pages[page], step.v_pages[page] = broken, broken
    spoilt, spoilt_lse = step.prefill()
    assert spoilt[:20].isnan().any()
    assert torch.equal(spoilt[20:], out[20:])
    assert torch.equal(spoilt_lse[:, 20:], lse[:, 20:])
