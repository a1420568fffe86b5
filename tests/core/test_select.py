"""Who serves what: select(), explain(), and kernels of one's own."""

import pytest
import torch

from fa4_core import LayerSpec, Question, Target, UnsupportedError, explain, prefill, register, select
from fa4_core import kernels as registry
from fa4_core.testing import make_step

SPEC = LayerSpec(4, 2, 16, dtype=torch.float32)
CPU, HOPPER = Target("cpu"), Target("cuda", (9, 0))


@pytest.fixture(autouse=True)
def own_list(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", list(registry._KERNELS))
    monkeypatch.delenv("FA4_KERNEL", raising=False)


class Zeros:
    """Serves causal layers with zeros."""

    name = "zeros"
    by_name_on = frozenset()
    about = "zeros"
    load_path, num_splits = "none", 3

    def refuses(self, question):
        return None if question.spec.causal else "only causal layers"

    def workspace_bytes(self, question):
        return 0

    def plan(self, batch, spec, *, invariant):
        return self

    def run(self, q, k_pages, v_pages, *, scale, softcap, sinks, out, lse):
        out.zero_()


def test_the_reference_is_the_cpus_default():
    assert select(Question(SPEC, 16, CPU)).name == "reference"


def test_on_a_gpu_the_reference_runs_only_when_asked_for(monkeypatch):
    question = Question(SPEC, 16, HOPPER)
    with pytest.raises(UnsupportedError, match="only when asked for by name") as error:
        select(question)
    assert set(error.value.reasons) == {k.name for k in registry.all_kernels()}
    assert select(question, "reference").name == "reference"
    monkeypatch.setenv("FA4_KERNEL", "reference")
    assert select(question).name == "reference"


def test_a_kernel_of_ones_own_comes_first_and_its_refusal_is_heard():
    register(Zeros())
    full = LayerSpec(4, 2, 16, dtype=torch.float32, causal=False)
    assert select(Question(SPEC, 16, CPU)).name == "zeros"
    assert select(Question(full, 16, CPU)).name == "reference"
    with pytest.raises(UnsupportedError, match="zeros: only causal layers"):
        select(Question(full, 16, CPU), "zeros")
    step = make_step(SPEC, [3], [5])
    assert (step.prefill()[0] == 0).all()
    assert (prefill(step.q, step.k_pages, step.v_pages, step.batch, SPEC, kernel="reference") != 0).any()


def test_a_kernel_of_the_same_name_takes_the_place():
    register(Zeros())
    register(Zeros())
    assert [k.name for k in registry.all_kernels()].count("zeros") == 1


def test_what_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel was <object object"):
        register(object())


def test_explain_gives_every_kernel_a_reason_but_the_selected():
    register(Zeros())
    verdicts = explain(Question(SPEC, 16, CPU), "reference")
    assert [(v.kernel, v.selected) for v in verdicts if v.kernel in ("zeros", "reference")] == [
        ("zeros", False),
        ("reference", True),
    ]
    assert verdicts[0].reason == "reference was asked for by name"


def test_unknown_names(monkeypatch):
    monkeypatch.setenv("FA4_KERNEL", "fast")
    with pytest.raises(ValueError, match="FA4_KERNEL was 'fast'; allowed: .*reference"):
        select(Question(SPEC, 16, CPU))


@pytest.mark.parametrize(
    ("text", "capability"), [("sm_90", (9, 0)), ("sm90a", (9, 0)), ("10.3", (10, 3)), ("sm_120", (12, 0))]
)
def test_targets(text, capability):
    assert Target.parse(text) == Target("cuda", capability)


@pytest.mark.parametrize("text", ["", "hopper", "sm_9", "9"])
def test_targets_misspelt(text):
    with pytest.raises(ValueError, match="target was"):
        Target.parse(text)


def test_specs_that_mean_the_same_are_equal():
    causal = LayerSpec(4, 2, 16)
    assert causal == LayerSpec(4, 2, 16, 16, kv_dtype=torch.bfloat16, causal=False, window=(None, 0))
    assert hash(causal) == hash(LayerSpec(4, 2, 16, window=(None, 0)))
    assert LayerSpec(4, 2, 16, window=(5, None)).window == (5, 0)
    assert str(LayerSpec(9, 3, 192, 128, window=(127, None), sinks=True)) == (
        "9/3 heads, d 192/128, bfloat16, causal, window 127, sinks"
    )


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("name", None, "kernel.name was None"),
        ("name", "a name with spaces", "kernel.name was"),
        ("name", "x" * 25, "kernel.name was"),
        ("by_name_on", None, "kernel.by_name_on was a NoneType"),
    ],
)
def test_a_kernel_with_a_wrong_member_is_refused(monkeypatch, member, value, message):
    monkeypatch.setattr(Zeros, member, value)
    with pytest.raises(ValueError, match=message):
        register(Zeros())
    with pytest.raises(ValueError, match="kernel was"):
        register(Zeros)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("load_path", "a path with spaces", "load_path of kernel zeros was"),
        ("num_splits", None, "the plan of kernel zeros was"),
        ("refuses", lambda self, question: False, r"what zeros.refuses\(\) returned was False"),
        ("plan", lambda self, batch, spec, *, invariant: None, "the plan of kernel zeros was None"),
    ],
)
def test_what_a_kernel_answers_is_checked_before_anything_is_written(monkeypatch, member, value, message):
    register(Zeros())
    monkeypatch.setattr(Zeros, member, value)
    step = make_step(SPEC, [3], [5])
    out = torch.full((3, 4, 16), torch.nan)
    with pytest.raises(ValueError, match=message):
        prefill(step.q, step.k_pages, step.v_pages, step.batch, SPEC, out=out)
    assert out.isnan().all()


def test_a_batch_does_not_keep_the_plan_of_a_kernel_that_is_no_longer_selected(monkeypatch):
    step = make_step(SPEC, [3], [5])
    want = step.prefill()[0]
    register(Zeros())
    assert (step.prefill()[0] == 0).all()
    monkeypatch.setenv("FA4_KERNEL", "reference")
    assert torch.equal(step.prefill()[0], want)
