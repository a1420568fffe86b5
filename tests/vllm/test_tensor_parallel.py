"""Two ranks with half of the heads each, in processes of their own: the same answers, and both through prefill()."""

from __future__ import annotations

import os

import pytest
import stub_ops
from one_rank import REASON, broken_but_one
from test_engine import LAYERS, NEW_TOKENS, PROMPTS, assert_close, serve

from fa4_core.counters import read_published

pytestmark = pytest.mark.skipif(stub_ops.NEEDED, reason="a CUDA wheel's CPU worker has no collectives")
RANKS = 2


@pytest.fixture
def ranks(monkeypatch):
    """Two workers, on whichever cores there are."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}


def test_two_ranks_answer_as_one_and_as_the_engines_own_backend(llama, greedy, ranks):
    theirs, _, _ = serve(llama, None, 32, **ranks)
    assert not any(name.startswith("prefill.") for p in read_published() for name in p.counters)
    ours, cached, steps = serve(llama, "CUSTOM", 32, **ranks)
    scheduled = sum(sum(step.values()) for step in steps)
    through_us = [p.counters["prefill.query_tokens.reference"] for p in read_published()]
    assert through_us == [LAYERS * scheduled] * RANKS
    alone, cached_alone, _ = serve(llama, "CUSTOM", 32)
    assert cached == cached_alone
    for other in (theirs, alone, greedy(PROMPTS, NEW_TOKENS)):
        assert_close(ours, other)


def test_a_rank_that_cannot_load_us_stops_the_server(llama, ranks, monkeypatch, tmp_path, capfd):
    paths = [str(broken_but_one(tmp_path / "broken", "fa4_vllm.backend")), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with pytest.raises(Exception, match="initialization failed"):
        serve(llama, "CUSTOM", 32, **ranks)
    assert REASON in "".join(capfd.readouterr())
