"""Runs a worker in an engine's environment, shows what it says, and returns what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PREFILL_LINE = re.compile(r"Prefill batch.*#new-seq: (\d+).*?#new-token: (\d+)")


class WorkerError(RuntimeError):
    """A worker ended without a result; the message holds the end of its log."""


@dataclass(frozen=True)
class Run:
    """One backend of one engine.

    Args:
        name: For the log's file name and the progress bar.
        engine: "vllm" or "sglang".
        ours: Prefill goes through us.
        decode_ours: Decode does, too.
        settings: Environment variables on top of the caller's.
        options: Put into the job.
    """

    name: str
    engine: str
    ours: bool
    decode_ours: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    options: dict = field(default_factory=dict)


def work(run: Run, python: Path, job: dict, folder: Path, say: Callable[[str], None]) -> dict:
    """Run a worker to its end.

    Args:
        run: What to run.
        python: The interpreter of the engine's environment.
        job: The prompts and how to serve them.
        folder: For the job, the result, the log and the counters; made anew.
        say: Called with each line that the worker means for people.

    Raises:
        WorkerError: It failed.
    """
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "counters").mkdir()
    settings = {**os.environ, **run.settings, "FA4_STATS_DIR": str(folder / "counters"), "PYTHONUNBUFFERED": "1"}
    command = [str(python), str(HERE / f"run_{run.engine}.py"), "job.json", "result.json"]
    log = []
    with (
        (folder / "log").open("w") as file,
        subprocess.Popen(
            command, cwd=folder, env=settings, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None  # a pipe was asked for
        for line in process.stdout:
            file.write(line)
            log.append(line)
            if line.startswith("demo: "):
                say(line.removeprefix("demo: ").strip())
    if process.returncode or not (folder / "result.json").exists():
        raise WorkerError(
            f"{run.name} ended with status {process.returncode}; {folder / 'log'} ends:\n" + "".join(log[-25:])
        )
    result = json.loads((folder / "result.json").read_text())
    if run.engine == "sglang":
        result |= _sglang_steps(log)
    decoded = sum(len(o["tokens"]) - 1 for o in result["outputs"])
    if "scheduled" in result:  # vLLM's scheduler was watched; it counts both phases together
        result["scheduled_prefill"] = result["scheduled"] - decoded
    result["through_us"] = result["scheduled_prefill"] + decoded * run.decode_ours
    return result


def _sglang_steps(log: list[str]) -> dict:
    """The scheduler's own account of its prefills, from the lines that it logs."""
    found = [(int(m[1]), int(m[2])) for line in log if (m := PREFILL_LINE.search(line))]
    return {
        # A step that takes in part of one prompt and nothing else; the first and last part may share theirs.
        "prefill_chunks": [len(found)],
        "largest_step": max((tokens for _, tokens in found), default=0),
        "scheduled_prefill": sum(tokens for _, tokens in found),
    }
