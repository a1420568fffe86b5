"""Counters of what prefill() did, in this process and, once published, readable from any other.

A count is one addition into an array. `publish()` lays the array in a memory-mapped file, so that `fa4 stats` can
read a running server's counters at any time without asking the server, even one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import settings
from .errors import bad

_RECORD = np.dtype([("name", "S56"), ("value", "<i8")])
_ROOM = 256  # names; a kernel has four or five
_SUFFIX = ".counters"


class _Counts:
    """One process's counts, and the file they lie in once published."""

    def __init__(self) -> None:
        self.table: np.ndarray = np.zeros(_ROOM, _RECORD)
        self.rows: dict[str, int] = {}
        self.file: Path | None = None

    def row(self, name: str) -> int:
        at = self.rows.get(name)
        if at is None:
            if len(name.encode()) > _RECORD["name"].itemsize or len(self.rows) == _ROOM:
                raise bad("counter name", repr(name), f"56 bytes at most, {_ROOM} names at most")
            at = self.rows[name] = len(self.rows)
            self.table["name"][at] = name.encode()
        return at


_counts = _Counts()


def _begin_anew() -> None:
    """In a forked child, which would otherwise go on counting in its parent's file."""
    global _counts
    _counts = _Counts()


os.register_at_fork(after_in_child=_begin_anew)


def add(name: str, n: int = 1) -> None:
    """Add n to a counter, made at its first use.

    Raises:
        ValueError: A name over 56 bytes, or more names than there is room for.
    """
    _counts.table["value"][_counts.row(name)] += n


def count_call(kernel: str, load_path: str, query_tokens: int, num_splits: int) -> None:
    """Count one layer's prefill() call: query_tokens are query rows of one layer, summed over layers."""
    add(f"prefill.calls.{kernel}")
    add(f"prefill.query_tokens.{kernel}", query_tokens)
    add(f"prefill.query_tokens.{kernel}.{load_path}", query_tokens)
    if num_splits > 1:
        add(f"prefill.splits.{kernel}", num_splits)


def stats() -> dict[str, int]:
    """All counters of this process, by name."""
    return _read(_counts.table)


def reset() -> None:
    """Set all counters of this process to zero."""
    _counts.table["value"][:] = 0


def _read(table: np.ndarray) -> dict[str, int]:
    return {r["name"].decode(errors="replace"): int(r["value"]) for r in table if r["name"]}


def directory() -> Path:
    """Where processes publish: FA4_STATS_DIR, else a folder of the user's own under the machine's temporary one."""
    # Not the home directory: that may be shared by machines, whose process numbers mean nothing to each other.
    named = settings.stats_dir()
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fa4-{os.getuid()}"


def publish(engine: str) -> Path | None:
    """Make this process's counters readable from outside; called by the adapters when a server starts.

    Args:
        engine: A word for the reader, such as "vllm".

    Returns:
        The file, or None where it cannot be written: counting goes on in memory.

    Raises:
        ValueError: engine is no word of letters, digits, "_", "." and "-".
    """
    if not isinstance(engine, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", engine):
        raise bad("engine", repr(engine), "a word of letters, digits, _ . and -")
    if _counts.file is not None:
        return _counts.file  # again, as for a second model in one server: its counts are this process's, too
    path = directory() / f"{engine}-{os.getpid()}{_SUFFIX}"
    scratch = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings.stats_dir() is None and path.parent.stat().st_uid != os.getuid():
            return None  # its name can be guessed, and somebody else was there first
        _remove_old(path.parent)
        with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _counts.table.nbytes)  # a full disk fails here, not at a later count
            mapped = np.memmap(file, _RECORD, mode="r+", shape=(_ROOM,))
        mapped[:] = _counts.table
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        return None
    _counts.table, _counts.file = mapped, path
    return path


@dataclass(frozen=True)
class Published:
    """One process's counters as read from outside."""

    engine: str
    pid: int
    alive: bool
    counters: dict[str, int]


def read_published(folder: Path | None = None) -> list[Published]:
    """The counters of every process that published, also of those that have ended since.

    Args:
        folder: Where to look; None is `directory()`. Whatever else lies there is passed over.

    Raises:
        OSError: The folder is there and cannot be listed.
    """
    found = []
    for path, engine, pid in _files(folder or directory()):
        try:
            table = np.fromfile(path, _RECORD)
        except OSError:  # gone since, or another's
            continue
        found.append(Published(engine, pid, _alive(pid), _read(table)))
    return found


def _files(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Regular files of the right name and size, with the engine and the process that they name."""
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()):
        named = re.fullmatch(rf"(.+)-([1-9]\d{{0,8}}){re.escape(_SUFFIX)}", path.name)
        if named and not path.is_symlink() and path.is_file() and path.stat().st_size == _ROOM * _RECORD.itemsize:
            yield path, named[1], int(named[2])


def _remove_old(folder: Path) -> None:
    """Files of processes that ended over a day ago; later than that nobody asks for them."""
    for path, _, pid in list(_files(folder)):
        if time.time() - path.stat().st_mtime > 86400 and not _alive(pid):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
