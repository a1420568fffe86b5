"""Counters that another process can read, even after this one was killed."""

import os
import signal
import subprocess
import sys

import pytest

from fa4_core import counters


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


def test_publishing_again_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path))
    first = counters.publish("engine")
    counters.add("a")
    assert counters.publish("engine") == first
    counters.add("a")
    [found] = counters.read_published()
    assert found.counters == counters.stats() == {"a": 2}


def test_a_forked_child_counts_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path))
    counters.publish("parent")
    counters.add("a", 5)
    child = os.fork()
    if child == 0:
        counters.add("a", 100)
        counters.publish("child")
        os._exit(0)
    os.waitpid(child, 0)
    found = {p.engine: p.counters for p in counters.read_published()}
    assert found == {"parent": {"a": 5}, "child": {"a": 100}}


def test_a_directory_that_cannot_be_written_is_survived(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FA4_STATS_DIR", str(blocked))
    assert counters.publish("engine") is None
    counters.add("a")
    assert counters.stats() == {"a": 1}
