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


@pytest.mark.parametrize("engine", ["", "../x", "a/b", "a\0b", None])
def test_an_engine_is_a_word(engine):
    with pytest.raises(ValueError, match="engine was"):
        counters.publish(engine)


def test_whatever_else_lies_in_the_directory_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path))
    size = counters._ROOM * counters._RECORD.itemsize
    (tmp_path / "foo.counters").write_bytes(bytes(size))
    (tmp_path / "vllm-99999999999999999999.counters").write_bytes(bytes(size))
    (tmp_path / "vllm-1.counters").write_text("hello")
    (tmp_path / "vllm-2.counters").mkdir()
    (tmp_path / "vllm-3.counters").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "vllm-4.counters")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"engine-{os.getpid()}.counters").symlink_to(victim)
    assert counters.publish("engine") is not None
    assert victim.read_text() == "mine"
    assert [(p.engine, p.alive) for p in counters.read_published()] == [("engine", True)]
