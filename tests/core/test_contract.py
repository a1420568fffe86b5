"""The contract of prefill(), held against the float64 oracle, with poison wherever a kernel must not look."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4_core import LayerSpec, prefill
from fa4_core.testing import LAYOUTS, make_step

F32 = torch.float32
ROUNDING = {F32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # about two units in the last place of out


def tolerance(step):
    """Rounding of out, and of a score: an error of e in a score is a relative error of e in its weight."""
    keys = step.k_pages[step.k_pages.isfinite().all(-1)]
    largest = (
        abs(step.values["scale"] or step.spec.head_dim**-0.5)
        * step.q.nan_to_num().norm(dim=-1).amax()
        * keys.norm(dim=-1).amax()
        if len(keys) and len(step.q)
        else 0.0
    )
    return ROUNDING[step.spec.dtype] + 2**-23 * float(largest)


def spec(q_heads=4, kv_heads=2, d=32, **kw):
    kw.setdefault("dtype", F32)
    return LayerSpec(q_heads, kv_heads, d, **kw)


def check(step):
    out, lse = step.prefill()
    want, want_lse = step.oracle()
    used = int(step.batch.cu_seqlens_q[-1])
    assert torch.isnan(out[used:]).all(), "rows of no request were written"
    out, want, lse, want_lse = out[:used].double(), want[:used], lse[:, :used].double(), want_lse[:, :used]
    assert not torch.isnan(out).any()
    allowed = tolerance(step)
    torch.testing.assert_close(out, want, atol=allowed, rtol=allowed)
    finite = want_lse.isfinite()
    assert torch.equal(lse[~finite], want_lse[~finite])
    torch.testing.assert_close(lse[finite], want_lse[finite], atol=allowed, rtol=allowed)
    return out, lse


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_every_page_size(layout, page_size):
    check(make_step(spec(d=16), [7, 1, 40], [7, 290, 61], page_size=page_size, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_head_one_page_one_row(layout):
    """Every dimension of size 1, where strides mean nothing."""
    check(make_step(spec(5, 1, 8), [1], [1], page_size=1, layout=layout))
    check(make_step(spec(5, 1, 8), [3], [4], page_size=4, layout=layout))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3), (12, 1), (7, 7), (40, 4), (96, 8)], ids=str)
def test_any_ratio_of_heads(heads):
    check(make_step(spec(*heads, d=16), [33, 1], [50, 513]))


WINDOWS = [(None, None), (0, None), (17, None), (None, 3), (5, 9), (0, 0), (300, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "extras", list(itertools.product([False, True], repeat=2)), ids=["plain", "sinks", "softcap", "both"]
)
def test_masks_with_softcap_and_sinks(window, extras):
    softcap, sinks = extras
    layer = spec(causal=False, window=window, softcap=softcap, sinks=sinks)
    check(make_step(layer, [20, 1, 70, 300], [20, 400, 600, 310], page_size=7))


@pytest.mark.parametrize("left", [None, 0, 63, 64, 255, 256])
def test_causal_window_at_the_tiles_edges(left):
    check(make_step(spec(window=(left, None)), [15, 16, 17, 257, 512], [256, 257, 17, 257, 513]))


def test_left_of_a_whole_request_is_no_window():
    """A window as long as the request, or unbounded, and none at all are one thing."""
    results = [make_step(spec(window=(left, None)), [512], [512]).prefill() for left in (None, 511, 512)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_more_queries_than_keys(causal, sinks):
    step = make_step(spec(causal=causal, sinks=sinks), [9, 300, 4], [3, 270, 0])
    out, lse = check(step)
    blind = torch.tensor([i < 6 for i in range(9)]) if causal else torch.zeros(9, dtype=torch.bool)
    rows = torch.cat([blind, torch.zeros(300, dtype=torch.bool), torch.ones(4, dtype=torch.bool)])
    if causal:
        rows[9:39] = True
    assert (out[rows] == 0).all()
    empty = step.values["sinks"].double() if sinks else torch.full((4,), -torch.inf, dtype=torch.float64)
    assert torch.equal(lse[:, rows], empty[:, None].expand(-1, int(rows.sum())))


@pytest.mark.parametrize(
    "lens", [([], []), ([0], [0]), ([0, 0], [5, 0]), ([8, 8], [0, 64]), ([0, 1, 0, 1], [0, 3, 0, 5])], ids=str
)
def test_empty_requests(lens):
    check(make_step(spec(9, 3, 64), *lens))


def test_rows_past_the_last_request_are_left_alone():
    check(make_step(spec(), [5, 6], [5, 20], spare_rows=13))


@pytest.mark.parametrize("dims", [(8, 8), (192, 128), (24, 40), (64, 64)], ids=str)
def test_head_dims(dims):
    check(make_step(spec(d=dims[0], head_dim_v=dims[1]), [33], [99], layout="interleaved"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, F32])
def test_half_precision(dtype, kv_dtype):
    check(make_step(spec(dtype=dtype, kv_dtype=kv_dtype), [100], [300], layout="interleaved"))


def test_scale_and_large_scores():
    check(make_step(spec(), [40], [400], scale=4.0))
    check(make_step(spec(sinks=True), [40], [400], scale=-2.0))


def test_strided_q_and_out():
    """q as a slice of a fused projection, out as a slice of a wider buffer."""
    step = make_step(spec(), [20], [30])
    fused = torch.full((20, 9, 32), torch.nan)
    fused[:, :4] = step.q
    wide = torch.full((20, 4, 50), torch.nan)
    prefill(fused[:, :4], step.k_pages, step.v_pages, step.batch, step.spec, out=wide[..., 3:35])
    assert torch.equal(wide[..., 3:35], step.prefill()[0])
    assert torch.isnan(wide[..., :3]).all()
    assert torch.isnan(wide[..., 35:]).all()


@st.composite
def steps(draw):
    kv_heads = draw(st.integers(1, 3))
    side = st.one_of(st.none(), st.integers(0, 40))
    causal = draw(st.booleans())
    layer = spec(
        kv_heads * draw(st.integers(1, 5)),
        kv_heads,
        draw(st.sampled_from([8, 24])),
        head_dim_v=draw(st.sampled_from([8, 16])),
        causal=causal,
        window=(draw(side), None if causal else draw(side)),
        softcap=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )
    requests = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 600)), max_size=5))
    return make_step(
        layer,
        [q for q, _ in requests],
        [k for _, k in requests],
        page_size=draw(st.sampled_from([1, 2, 5, 16, 64])),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        seed=draw(st.integers(0, 99)),
        spare_rows=draw(st.integers(0, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(steps())
def test_any_step(step):
    check(step)
