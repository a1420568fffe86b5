"""A plan's memory and places, on a CPU and with kernels that only note what they are called with."""

import numpy as np
import torch

from fa4_core import Capacity, LayerSpec, PrefillBatch, workspace
from fa4_core.kernels.hopper.config import BOX
from fa4_core.kernels.hopper.prepared import HopperPlan

SPEC = LayerSpec(8, 2, 64)
BOX_BYTES = BOX * 2 * 256


def batch_of(q_lens, kv_lens, page_size=1):
    cu = torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32)
    table = torch.zeros((len(q_lens), -(-max(kv_lens) // page_size)), dtype=torch.int32)
    kv = torch.tensor(kv_lens, dtype=torch.int32)
    return PrefillBatch(cu, kv, table, page_size, host_q_lens=q_lens, host_kv_lens=kv_lens)


class Calls(list):
    """Gives kernels that note the addresses of their tensors and their numbers."""

    def __call__(self, key):
        name = key if isinstance(key, str) else "forward"
        return lambda *args: self.append((name, [a.data_ptr() if torch.is_tensor(a) else a for a in args]))


def run(plan, rows, page_size):
    q = torch.zeros(rows, 8, 64, dtype=torch.bfloat16)
    k = torch.zeros(64, page_size, 2, 64, dtype=torch.bfloat16)
    plan.run(q, k, k, scale=1.0, softcap=0.0, sinks=None, out=torch.empty_like(q), lse=None)


def test_scratch_fills_the_workspace_to_the_last_byte(monkeypatch):
    monkeypatch.setenv("FA4_WORKSPACE_MIB", "1")
    monkeypatch.setattr(workspace, "_blocks", {})
    fit = (1 << 20) // BOX_BYTES
    for boxes in (fit, fit + 3):
        plan = HopperPlan(batch_of([100], [boxes * BOX]), SPEC, Calls(), split=True)
        assert plan._gathered == fit


def test_nothing_is_taken_where_nothing_is_gathered_or_split(monkeypatch):
    monkeypatch.setattr(workspace, "_blocks", {})
    HopperPlan(batch_of([100], [200], 16), SPEC, Calls(), split=False)
    assert not workspace._blocks


def test_a_refreshed_plan_launches_the_same():
    for page_size in (1, 16):
        calls, launches = Calls(), []
        capacity = Capacity(requests=3, query_tokens=300, keys=4000)
        plan = HopperPlan(batch_of([100, 7], [3000, 9], page_size), SPEC, calls, split=True, capacity=capacity)
        for step in (None, ([1, 2, 297], [4000, 4000, 4000]), ([300], [300])):
            if step is not None:
                plan.refresh(batch_of(*step, page_size))
            calls.clear()
            run(plan, 300, page_size)
            launches.append([(name, args[4:]) for name, args in calls])  # all but the caller's tensors
            live = plan._lists.items[: int(plan._lists.control[1])]
            assert set(live[:, 0].tolist()) == set(range(len(plan.batch.host_q_lens)))
        assert launches[0] == launches[1] == launches[2]
        assert len({name for name, _ in launches[0]}) == len(launches[0]) == (3 if page_size == 1 else 2)
