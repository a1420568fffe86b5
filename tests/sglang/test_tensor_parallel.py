"""Two ranks with half of the heads each: the same answers as one, and both through prefill()."""

from __future__ import annotations

import os

import pytest
from one_rank import REASON, broken_but_one
from test_engine import LAYERS, WAVES, check_answers, expected, serve

from fa4_core.counters import read_published
from fa4_sglang import compat

__all__ = ["expected"]  # a fixture
RANKS = 2
pytestmark = pytest.mark.skipif(
    compat.version() in compat.TESTED[:-1], reason="tried with the latest version: no other differs here"
)


@pytest.fixture(autouse=True)
def _any_core_for_any_rank(monkeypatch):
    """SGLang wants a memory node a rank unless it is told where each may run."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")


def served_by(backend, llama, tmp_path):
    return serve(llama, tmp_path, [True] * len(WAVES), page_size=1, attention_backend=backend, tp_size=RANKS)


def test_two_ranks_answer_as_one(llama, expected, tmp_path):
    served = served_by("fa-cute", llama, tmp_path)
    check_answers(served, expected, page_size=1)
    ranks = [p.counters for p in read_published(tmp_path / "counters")]
    assert len(ranks) == RANKS
    for counted in ranks:
        assert counted["prefill.query_tokens.reference"] == LAYERS * counted["sglang.scheduled_tokens"]
        assert counted["sglang.scheduled_tokens"] > served.new_prompt_tokens


def test_two_ranks_of_the_engines_own_backend_say_the_same(llama, expected, tmp_path):
    served = served_by("torch_native", llama, tmp_path)
    check_answers(served, expected, page_size=1)
    assert not any(name.startswith("prefill.") for name in served.counters)


def test_a_rank_that_cannot_load_us_stops_the_server(llama, monkeypatch, tmp_path):
    paths = [str(broken_but_one(tmp_path / "broken", "fa4_sglang.backend")), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with pytest.raises(AssertionError, match=REASON):
        served_by("fa-cute", llama, tmp_path)
