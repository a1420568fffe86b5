"""Plans: made once a step and spec, never carried to another page table, held to their capacity."""

import pytest
import torch

from fa4_core import Capacity, LayerSpec, PrefillBatch, counters, plan
from fa4_core.kernels.reference import ReferenceKernel
from fa4_core.testing import make_step

SPEC = LayerSpec(4, 2, 16, dtype=torch.float32)


@pytest.fixture
def plans_made(monkeypatch):
    made = []
    original = ReferenceKernel.plan

    def counting(self, batch, spec, *, invariant):
        made.append((spec, invariant))
        return original(self, batch, spec, invariant=invariant)

    monkeypatch.setattr(ReferenceKernel, "plan", counting)
    return made


def test_layers_share_a_plan_by_spec_and_setting(plans_made):
    step = make_step(SPEC, [5], [9])
    for _ in range(3):
        step.prefill()
    assert len(plans_made) == 1
    step.prefill(invariant=True)
    step.prefill(invariant=True)
    assert plans_made == [(SPEC, False), (SPEC, True)]


def test_a_new_page_table_is_a_new_batch_without_plans(plans_made):
    step = make_step(SPEC, [5], [9])
    step.prefill()
    moved = step.batch.with_pages(step.batch.page_table.clone())
    assert moved._plans == {}
    assert moved.page_size == 16
    assert step.batch.with_pages(step.batch.page_table.repeat(1, 16), page_size=1).page_size == 1


def test_host_lengths_are_copied_so_that_an_engine_may_reuse_its_buffer():
    lens = torch.tensor([5, 3])
    step = make_step(SPEC, [5, 3], [20, 3])
    batch = PrefillBatch(
        step.batch.cu_seqlens_q, step.batch.kv_lens, step.batch.page_table, 16, host_q_lens=lens, max_kv_len=20
    )
    lens.zero_()
    assert batch.host_q_lens.tolist() == [5, 3]
    assert (batch.max_q_len, batch.max_kv_len) == (5, 20)


def test_refresh_runs_another_step_and_raises_beyond_capacity():
    small, large = make_step(SPEC, [5, 3], [20, 3]), make_step(SPEC, [5, 4], [20, 4], seed=1)
    ready = plan(small.batch, SPEC, capacity=Capacity(requests=2, query_tokens=8, keys=64))
    out = ready.run(small.q, small.k_pages, small.v_pages)
    assert torch.equal(out, small.prefill()[0])
    with pytest.raises(ValueError, match="batch was of 9 query tokens; allowed: at most the 8 of the plan's capacity"):
        ready.refresh(large.batch)
    assert torch.equal(ready.run(small.q, small.k_pages, small.v_pages), out)
    other = make_step(SPEC, [2, 6], [30, 64], seed=2)
    ready.refresh(other.batch)
    assert torch.equal(ready.run(other.q, other.k_pages, other.v_pages), other.prefill()[0])
    for q, kv in (([1] * 3, [1] * 3), ([1], [65])):
        with pytest.raises(ValueError, match="of the plan's capacity"):
            ready.refresh(make_step(SPEC, q, kv).batch)


def test_calls_are_counted():
    step = make_step(SPEC, [5, 3], [20, 3], spare_rows=4)
    counters.reset()
    step.prefill()
    step.prefill()
    got = counters.stats()
    assert got["prefill.calls.reference"] == 2
    assert got["prefill.query_tokens.reference"] == 16
    assert got["prefill.query_tokens.reference.gather"] == 16


def test_refresh_keeps_to_the_page_size():
    step, other = make_step(SPEC, [5], [9]), make_step(SPEC, [5], [9], page_size=8)
    ready = plan(step.batch, SPEC)
    with pytest.raises(ValueError, match="batch was of page size 8 on cpu; allowed: page size 16 on cpu"):
        ready.refresh(other.batch)


def test_a_bound_taken_from_the_old_tables_width_does_not_outlive_it():
    step = make_step(SPEC, [5], [9])
    bare = PrefillBatch(step.batch.cu_seqlens_q, step.batch.kv_lens, step.batch.page_table, 16)
    assert bare.with_pages(bare.page_table[:, :1]).max_kv_len == 16
    assert step.batch.with_pages(step.batch.page_table[:, :1]).max_kv_len == 9
