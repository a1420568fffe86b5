"""Counters that another process can read, even after this one was killed."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from fa4_core import counters


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(counters, "_table", np.zeros(counters._ROOM, counters._RECORD))
    monkeypatch.setattr(counters, "_index", {})


def test_add_and_reset():
    counters.add("a")
    counters.add("a", 4)
    counters.add("b", 2**40)
    assert counters.stats() == {"a": 5, "b": 2**40}
    counters.reset()
    assert counters.stats() == {"a": 0, "b": 0}


def test_names_have_a_length():
    with pytest.raises(ValueError, match="counter name was"):
        counters.add("x" * 57)


def test_a_killed_process_leaves_its_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path))
    child = (
        "import os, signal; from fa4_core import counters; counters.add('before', 3); counters.publish('some-engine');"
        "counters.add('after', 4); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", child])
    assert process.wait() == -signal.SIGKILL
    [found] = counters.read_published()
    assert (found.engine, found.pid, found.alive) == ("some-engine", process.pid, False)
    assert found.counters == {"before": 3, "after": 4}


def test_a_directory_that_cannot_be_written_is_survived(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FA4_STATS_DIR", str(blocked))
    assert counters.publish("engine") is None
    counters.add("a")
    assert counters.stats() == {"a": 1}
