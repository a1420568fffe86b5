"""Servers and the client as processes that end when the benchmark does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


class Process:
    """A command in a process group of its own, its output in a file.

    Args:
        name: In messages.
        command: The command.
        log: The file.
        settings: Environment variables beside this process's.
        talks: Standard input and output are for lines of JSON.
    """

    def __init__(
        self, name: str, command: list[str], log: Path, settings: dict[str, str], *, talks: bool = False
    ) -> None:
        self.name, self.log = name, log
        pipe = subprocess.PIPE if talks else None
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdin=pipe or subprocess.DEVNULL, stdout=pipe or file, stderr=file, text=True,
                env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip

    def alive(self) -> None:
        """RuntimeError with the end of the log where the process has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"{self.name} ended with status {self._process.returncode}; {self.log} ends:\n{tail}")

    def hear(self) -> dict:
        """The next line."""
        line = self._process.stdout.readline()
        if not line:
            time.sleep(1)
            self.alive()
        return json.loads(line)

    def say(self, what: object) -> None:
        """Send a line."""
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def stop(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def all_of(processes: list[Process]) -> Iterator[None]:
    """Stop every process in the end, also where this one is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        for process in processes:
            process.stop()


def healthy(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def post(port: int, path: str) -> None:
    """An empty request; HTTPError where the server refuses it."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=60):
        pass
