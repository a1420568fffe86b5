"""The one call on a GPU: kernels by name, held against the float64 oracle with poison where they must not look."""

import pytest
import torch

from fa4_core import LayerSpec, Question, Target, UnsupportedError, explain, prefill
from fa4_core.testing import LAYOUTS, make_step

Q, KV = [300, 1, 40, 0, 17], [700, 150, 40, 9, 16]
ROUNDING = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 4e-6}


def check(step, kernel):
    out, lse = step.prefill(kernel=kernel)
    want, want_lse = step.oracle()
    allowed = ROUNDING[step.spec.dtype]
    torch.testing.assert_close(out.double(), want, atol=allowed, rtol=allowed)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "odd-singletons"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_hopper_by_name(layout, page_size):
    spec = LayerSpec(32, 8, 128, dtype=torch.bfloat16)
    check(make_step(spec, Q, KV, page_size=page_size, layout=layout, device="cuda"), "hopper")


@pytest.mark.parametrize("change", [{"window": (99, None)}, {"sinks": True}, {"causal": False}], ids=str)
def test_hopper_masks_and_sinks(change):
    spec = LayerSpec(8, 2, 64, dtype=torch.float16, **change)
    check(make_step(spec, Q, KV, device="cuda"), "hopper")


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_reference_runs_on_a_gpu_too_by_name(dtype):
    spec = LayerSpec(9, 3, 64, dtype=dtype, sinks=True, window=(200, None))
    check(make_step(spec, Q, KV, page_size=5, device="cuda"), "reference")


def test_hopper_is_selected_and_the_reference_never_unless_asked_for():
    step = make_step(LayerSpec(8, 2, 64), Q, KV, device="cuda")
    assert torch.equal(step.prefill()[0], step.prefill(kernel="hopper")[0])
    assert [v.kernel for v in explain(Question(step.spec, 16, Target.of(step.q.device))) if v.selected] == ["hopper"]
    step = make_step(LayerSpec(8, 2, 72), Q, KV, device="cuda")
    with pytest.raises(UnsupportedError, match="only when asked for by name"):
        prefill(step.q, step.k_pages, step.v_pages, step.batch, step.spec)


def test_a_request_without_queries_has_no_page_that_may_be_read():
    """Its table entries may be anything; page size 1 is where they are looked up ahead of the kernel."""
    spec = LayerSpec(8, 2, 128, dtype=torch.bfloat16)
    check(make_step(spec, [0, 20, 0], [100, 300, 7], page_size=1, device="cuda"), "hopper")
