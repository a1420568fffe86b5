"""python -m demo: serve SmolLM2 with both engines, ours beside their own, and print one table."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import checks, model, prompts, workers
from .reference import Reference

OURS = "fa-cute"
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the scheduler in the worker's process, so that it can be watched
VLLM_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
OUR_VLLM_CPU = {"FA4_VLLM_CPU": "1"}
SGLANG_CPU = {"FA4_SGLANG_CPU": "1"}


def runs(device: str) -> list[workers.Run]:
    """What is served, each engine's own backend before ours."""
    cpu = device == "cpu"
    vllm = VLLM | (VLLM_CPU if cpu else {})
    sglang = SGLANG_CPU if cpu else {}
    own = "torch_native" if cpu else "triton"

    def sglang_run(name: str, ours: bool, decode_ours: bool, **backends: str) -> workers.Run:
        return workers.Run(name, "sglang", ours, decode_ours, sglang, {"backends": backends})

    return [
        workers.Run("vllm, its own", "vllm", False, False, vllm),
        workers.Run("vllm, ours", "vllm", True, True, vllm | (OUR_VLLM_CPU if cpu else {})),
        sglang_run("sglang, its own", False, False, attention_backend=own),
        sglang_run("sglang, our prefill", True, False, prefill_attention_backend=OURS, decode_attention_backend=own),
        sglang_run("sglang, ours", True, True, attention_backend=OURS),
    ]


@click.command()
@click.option("--vllm-python", type=click.Path(exists=True, path_type=Path), help="Of an environment with fa4-vllm.")
@click.option("--sglang-python", type=click.Path(exists=True, path_type=Path), help="Of one with fa4-sglang.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="That the environments are for.  [default: torch's]")
@click.option("--full", is_flag=True, help="More and longer prompts.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write every number here, too.")
def main(
    vllm_python: Path | None, sglang_python: Path | None, device: str | None, full: bool, out: Path | None
) -> None:
    """Serve SmolLM2-135M-Instruct with the real engines and hold every backend against transformers in fp32."""
    pythons = {k: p.absolute() for k, p in (("vllm", vllm_python), ("sglang", sglang_python)) if p}
    if not pythons:
        raise click.UsageError("name the environment of at least one engine")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    served = {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}
    planned = [run for run in runs(device) if run.engine in pythons]
    folder = Path(tempfile.mkdtemp(prefix="fa4-demo-"))
    console = Console()
    with Steps(console, 2 + len(planned)) as steps:
        steps.say("the model")
        path = model.prepare()
        job = prompts.make(path, prompts.FULL if full else prompts.DEFAULT) | served | {"model": str(path)}
        steps.done()
        steps.say("the reference: transformers in fp32")
        reference = Reference(path, [p for wave in job["waves"] for p in wave], job["new_tokens"], steps.say)
        steps.done()
        rows: list[checks.Row] = []
        for run in planned:
            steps.say(run.name)
            task = job | {"ours": run.ours} | run.options
            where = folder / re.sub(r"\W+", "-", run.name)

            def say(line: str, name: str = run.name) -> None:
                steps.say(f"{name}: {line}")

            try:
                result = workers.work(run, pythons[run.engine], task, where, say)
            except workers.WorkerError as error:
                steps.stop()
                console.print(str(error), markup=False, highlight=False)
                sys.exit(1)
            row = checks.measure(result, task, reference.answers, reference.logprobs(result["outputs"]))
            checks.judge(row, next((r for r in rows if r.result["engine"] == result["engine"]), row), task)
            rows.append(row)
            steps.done()
    show(console, rows, job, reference.seconds)
    if out:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    failures = [f"{r.result['engine']} {r.result['backend']}: {f}" for r in rows for f in r.failures]
    for failure in failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)
    console.print(f"Logs, prompts and results: {folder}", markup=False, highlight=False)
    sys.exit(bool(failures))


class Steps(Progress):
    """A progress bar over the demo's steps; in a log, which shows no bar, a line for each thing that begins."""

    def __init__(self, console: Console, total: int) -> None:
        bar = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        super().__init__(*bar, console=console, disable=not console.is_terminal)
        self._task, self._began = self.add_task("", total=total), time.perf_counter()

    def say(self, what: str) -> None:
        """What is going on now."""
        self.update(self._task, description=what)
        if self.disable:
            print(f"{time.perf_counter() - self._began:6.0f} s  {what}", flush=True)

    def done(self) -> None:
        """One step is over."""
        self.advance(self._task)


def show(console: Console, rows: list[checks.Row], job: dict, reference_seconds: float) -> None:
    """The table."""
    count = sum(map(len, job["waves"]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("engine", "backend", "kernel", "greedy\nequal", "mean, max\n|dlogprob|", "seconds",
                 "layers", "tokens through\nprefill()", "holds"):  # fmt: skip
        table.add_column(name)
    table.add_row(
        "transformers", "eager, fp32", "-", f"{count}/{count}", "0, 0", f"{reference_seconds:.1f}", "", "-", ""
    )
    for row in rows:
        r = row.result
        table.add_row(
            f"{r['engine']} {r['version']}",
            r["backend"],
            ", ".join(row.by_kernel) or "-",
            f"{row.equal}/{len(r['outputs'])}",
            f"{row.mean:.1e}, {row.largest:.1e}",
            f"{r['seconds']:.1f}",
            str(r["layers"]),
            f"{sum(row.by_kernel.values()):,}" if row.ours else "-",
            "no" if row.failures else "yes",
        )
    if not console.is_terminal:
        console = Console(width=140)  # a log has no width of its own
    title = (
        f"SmolLM2-135M-Instruct on {job['device']} in {job['dtype']}, {count} prompts, {job['new_tokens']} new tokens"
    )
    console.print(f"{title} each", style="bold")
    console.print(table)


if __name__ == "__main__":
    main()
