"""merge_states(): parts over disjoint keys give what one pass over all of them gives."""

import dataclasses

import pytest
import torch

from fa4_core import LayerSpec, merge_states
from fa4_core.testing import make_step

SPEC = LayerSpec(4, 2, 16, dtype=torch.float32, causal=False)


def parts(step, cuts):
    """The same queries over [0, cut), [cut, next), ... of the keys, one request."""
    k = step.k_pages[step.batch.page_table[0].clamp(0, len(step.k_pages) - 1).long()].flatten(0, 1)
    v = step.v_pages[step.batch.page_table[0].clamp(0, len(step.v_pages) - 1).long()].flatten(0, 1)
    for start, stop in zip([0, *cuts], [*cuts, int(step.batch.kv_lens[0])]):
        part = make_step(SPEC, [step.q.shape[0]], [stop - start], page_size=1)
        for pool, rows in ((part.k_pages, k), (part.v_pages, v)):
            pool[part.batch.page_table[0, : stop - start].long(), 0] = rows[start:stop]
        yield dataclasses.replace(part, q=step.q).prefill()


@pytest.mark.parametrize("cuts", [[40], [1, 2, 99], [0, 50, 50], [100]], ids=str)
def test_parts_give_the_whole(cuts):
    step = make_step(SPEC, [30], [100])
    out, lse = merge_states(*zip(*parts(step, cuts)))
    want, want_lse = step.oracle()
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)


def test_a_part_without_keys_is_neutral_whatever_it_holds():
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    nothing, blind = torch.full((3, 2, 4), torch.nan), torch.full((2, 3), -torch.inf)
    for order in ([0, 1], [1, 0]):
        merged, merged_lse = merge_states([(out, nothing)[i] for i in order], [(lse, blind)[i] for i in order])
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse)


def test_nothing_at_all_is_zero_and_minus_infinity():
    nothing, blind = torch.full((3, 2, 4), torch.nan), torch.full((2, 3), -torch.inf)
    out, lse = merge_states([nothing, nothing], [blind, blind])
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
