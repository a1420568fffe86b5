"""Bad input: a ValueError that names the argument, what it was and what is allowed, with nothing written."""

import dataclasses

import pytest
import torch

from fa4_core import (
    Capacity,
    LayerSpec,
    PrefillBatch,
    Question,
    Target,
    UnsupportedError,
    explain,
    merge_states,
    plan,
    prefill,
)  # fmt: skip
from fa4_core.page_table import from_block_table, from_token_slots
from fa4_core.testing import make_step

SPEC = LayerSpec(4, 2, 16, dtype=torch.float32)


@pytest.fixture
def step():
    return make_step(SPEC, [5, 3], [20, 3])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("q_heads", 0, "q_heads was 0; allowed: an int of at least 1"),
        ("q_heads", 3, r"q_heads was 3; allowed: a multiple of kv_heads \(2\)"),
        ("kv_heads", 2.0, "kv_heads was 2.0; allowed: an int"),
        ("head_dim", True, "head_dim was True; allowed: an int"),
        ("head_dim_v", -1, "head_dim_v was -1; allowed"),
        ("dtype", torch.int8, "dtype was torch.int8; allowed: torch.bfloat16"),
        ("kv_dtype", torch.float8_e4m3fn, "kv_dtype was torch.float8_e4m3fn; allowed"),
        ("causal", None, "causal was None; allowed: True or False"),
        ("softcap", 30.0, "softcap was 30.0; allowed: True or False"),
        ("window", (-1, 0), "window left was -1; allowed: None"),
        ("window", (3, 4), "window right was 4; allowed: None or 0 in a causal layer"),
        ("window", 128, r"window was 128; allowed: a pair"),
    ],
)
def test_spec(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **{field: value})


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


GOOD = {"cu_seqlens_q": i32(0, 5, 8), "kv_lens": i32(20, 3), "page_table": i32([1, 2], [3, 0]), "page_size": 16}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 0, "page_size was 0; allowed"),
        ("kv_lens", i32(20, 3).long(), "kv_lens was torch.int64 of shape .2.; allowed: int32 with 1 dimension"),
        ("kv_lens", [20, 3], "kv_lens was list; allowed: a torch.Tensor"),
        ("kv_lens", i32(20, 3, 4), "cu_seqlens_q was of shape .3.; allowed: .4."),
        ("kv_lens", i32(20, 33), r"kv_lens\[1\] was 33; allowed: at most 32"),
        ("kv_lens", i32(20, -1), r"kv_lens\[1\] was -1; allowed: at least 0"),
        ("cu_seqlens_q", i32(0, 2**31 - 1, -(2**31) + 1), "cu_seqlens_q was decreasing after request 1"),
        ("host_q_lens", [5.9, 3.0], "host_q_lens was a list of float64; allowed: integers"),
        ("host_q_lens", [None, 3], "host_q_lens was a list of object; allowed: integers"),
        ("cu_seqlens_q", i32(1, 5, 8), r"cu_seqlens_q\[0\] was 1; allowed: 0"),
        ("cu_seqlens_q", i32(0, 5, 4), "cu_seqlens_q was decreasing after request 1; allowed"),
        ("page_table", i32(1, 2), "page_table was torch.int32 of shape .2.; allowed: int32 with 2 dimensions"),
        ("page_table", i32([1, 2]), "page_table was of shape .1, 2.; allowed: 2 rows"),
        ("page_table", i32([1, 3], [2, 0]).t(), "page_table was of strides"),
        ("host_q_lens", [5, 2], r"host_q_lens\[1\] was 2; allowed: an upper bound"),
        ("host_q_lens", [5], "host_q_lens was of shape .1.; allowed: .2."),
        ("host_kv_lens", [20, -4], "host_kv_lens was -4 for request 1; allowed: at least 0"),
        ("host_kv_lens", torch.zeros(2, device="meta"), "host_kv_lens was on meta; allowed: a CPU tensor"),
        ("max_q_len", 4, "max_q_len was 4; allowed: an upper bound of every request, the longest has 5"),
        ("max_kv_len", 1.5, "max_kv_len was 1.5; allowed: None or an int"),
    ],
)
def test_batch(field, value, message):
    PrefillBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        PrefillBatch(**{**GOOD, field: value})


CALLS = {
    "q type": ({"q": None}, "q was NoneType; allowed: a torch.Tensor"),
    "q heads": ({"q": torch.zeros(8, 2, 16)}, r"q was of shape \[8, 2, 16\]; allowed: .* = \[8, 4, 16\]"),
    "q dtype": ({"q": torch.zeros(8, 4, 16).half()}, "q was torch.float16; allowed: torch.float32"),
    "q rows": ({"q": torch.zeros(7, 4, 16)}, "q was of 7 rows; allowed: at least the 8"),
    "q strides": ({"q": torch.zeros(8, 16, 4).transpose(1, 2)}, "q was of strides"),
    "q device": ({"q": torch.zeros(8, 4, 16, device="meta")}, "q was on meta; allowed: cpu"),
    "k page size": ({"k_pages": torch.zeros(9, 8, 2, 16)}, "k_pages was of shape"),
    "k dims": ({"k_pages": torch.zeros(144, 2, 16)}, "k_pages was of shape"),
    "k dtype": ({"k_pages": torch.zeros(9, 16, 2, 16).bfloat16()}, "k_pages was torch.bfloat16; allowed"),
    "v pages": ({"v_pages": torch.zeros(8, 16, 2, 16)}, "v_pages was of shape"),
    "pool size": (dict.fromkeys(("k_pages", "v_pages"), torch.zeros(2, 16, 2, 16)), "page_table was 1 to 3; allowed"),
    "scale": ({"scale": float("nan")}, "scale was nan; allowed: a number that float32 holds"),
    "softcap": ({"softcap": 30.0}, "softcap was 30.0; allowed: 0, since spec.softcap is off"),
    "softcap sign": ({"softcap": -1.0}, "softcap was -1.0; allowed"),
    "sinks": ({"sinks": torch.zeros(4)}, "sinks was a tensor; allowed: what spec.sinks"),
    "out shape": ({"out": torch.full((8, 4, 8), torch.nan)}, "out was of shape"),
    "out dtype": ({"out": torch.full((8, 4, 16), torch.nan).half()}, "out was torch.float16"),
    "out overlap": ({"out": torch.full((1, 4, 16), torch.nan).expand(8, 4, 16)}, "out was of shape .* and strides"),
    "lse": ({"lse": torch.full((8, 4), torch.nan)}, r"lse was of shape \[8, 4\]; allowed: \[q_heads, total_q\]"),
    "kernel": ({"kernel": "fast"}, "kernel was 'fast'; allowed: .*reference"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_call(step, case):
    change, message = CALLS[case]
    out, lse = torch.full((8, 4, 16), torch.nan), torch.full((4, 8), torch.nan)
    arguments = {
        "q": step.q,
        "k_pages": step.k_pages,
        "v_pages": step.v_pages,
        "batch": step.batch,
        "spec": SPEC,
        "out": out,
        "lse": lse,
    }
    with pytest.raises(ValueError, match=message):
        prefill(**{**arguments, **change})
    for buffer in (out, lse, change.get("out", out), change.get("lse", lse)):
        assert buffer.isnan().all(), "written before the error"


def test_what_the_spec_announces_must_come(step):
    sinks, softcap = dataclasses.replace(SPEC, sinks=True), dataclasses.replace(SPEC, softcap=True)
    tensors = (step.q, step.k_pages, step.v_pages, step.batch)
    with pytest.raises(ValueError, match="sinks was None; allowed: what spec.sinks"):
        prefill(*tensors, sinks)
    with pytest.raises(ValueError, match=r"sinks was of shape \[2\]; allowed: \[q_heads\] = \[4\]"):
        prefill(*tensors, sinks, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="sinks was torch.float16; allowed: torch.bfloat16 or torch.float32"):
        prefill(*tensors, sinks, sinks=torch.zeros(4).half())
    with pytest.raises(ValueError, match="softcap was 0.0; allowed: above 0"):
        prefill(*tensors, softcap)


def test_page_tables():
    with pytest.raises(ValueError, match="block_table was torch.float32"):
        from_block_table(torch.zeros(2, 2))
    slots = torch.zeros(4, 10, dtype=torch.int32)
    with pytest.raises(ValueError, match="max_kv_len was 11; allowed: 0 to 10"):
        from_token_slots(slots, torch.tensor([1]), page_size=1, max_kv_len=11)
    with pytest.raises(ValueError, match="page_size was 0"):
        from_token_slots(slots, torch.tensor([1]), page_size=0, max_kv_len=1)
    with pytest.raises(ValueError, match="slots and requests was of shapes"):
        from_token_slots(slots, torch.tensor(1), page_size=1, max_kv_len=1)
    for twins, said in ((torch.zeros(0).int(), r"of shape \[0\]"), (torch.zeros(3), "torch.float32"), ([1], "a list")):
        with pytest.raises(ValueError, match=f"twins was {said}"):
            from_token_slots(slots, torch.tensor([1]), page_size=1, max_kv_len=1, twins=twins)


def test_merge():
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="outs and lses was 0 and 0 parts"):
        merge_states([], [])
    with pytest.raises(ValueError, match=r"outs\[1\] was torch.float16"):
        merge_states([out, out.half()], [lse, lse])
    with pytest.raises(ValueError, match=r"lses\[0\] was torch.float32 \[3, 2\]"):
        merge_states([out], [lse.t()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: prefill(step.q, step.k_pages, step.v_pages, SPEC, step.batch), "batch was a LayerSpec; allowed"),
        (lambda step: plan(step.batch, None), "spec was a NoneType; allowed: a LayerSpec"),
        (lambda step: plan(step.batch, SPEC, invariant="no"), "invariant was a str; allowed: a bool"),
        (lambda step: plan(step.batch, SPEC, capacity=(1, 2, 3)), "capacity was a tuple; allowed: a Capacity"),
        (lambda step: plan(step.batch, SPEC).refresh(None), "batch was a NoneType"),
        (lambda step: Capacity(float("nan"), 1, 1), "requests was nan; allowed: an int"),
        (lambda step: explain(None), "question was a NoneType; allowed: a Question"),
        (lambda step: Question(SPEC, 0, Target("cpu")), "page_size was 0; allowed: None"),
        (lambda step: Target.of("cpu"), "device was a str; allowed: a device"),
        (lambda step: merge_states(torch.zeros(1), []), "outs was a Tensor; allowed: a list or tuple"),
        (lambda step: merge_states([torch.zeros(1, 1, 1).int()], [torch.zeros(1, 1)]), "outs.0. was torch.int32"),
        (lambda step: from_block_table([[1]]), "block_table was a list; allowed: a Tensor"),
        (lambda step: from_token_slots(torch.zeros(2, 2), torch.tensor([1]), page_size=1, max_kv_len=1), "slots was"),
        (lambda step: step.batch.with_pages(step.batch.page_table, page_size=0), "page_size was 0"),
    ],
)
def test_the_wrong_kind_of_thing(step, call, message):
    with pytest.raises(ValueError, match=message):
        call(step)


def test_block_ids_that_int32_does_not_hold_turn_into_no_page():
    assert from_block_table(torch.tensor([[2**32 + 5, 7]])).tolist() == [[-1, 7]]


def test_errors_survive_the_way_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(UnsupportedError("a layer", {"fast": "too slow"})))
    assert str(error) == "no kernel serves a layer\n  fast: too slow"
    assert error.reasons == {"fast": "too slow"}
