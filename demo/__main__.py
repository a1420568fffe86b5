"""python -m demo: serve SmolLM2 with both engines, ours beside their own, and print one table."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
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
        workers.Run("vllm, ours", "vllm", True, cpu, vllm | (OUR_VLLM_CPU if cpu else {})),
        sglang_run("sglang, its own", False, False, attention_backend=own),
        sglang_run("sglang, our prefill", True, False, prefill_attention_backend=OURS, decode_attention_backend=own),
        sglang_run("sglang, ours", True, True, attention_backend=OURS),
    ]


@click.command()
@click.option("--vllm-python", type=click.Path(exists=True, path_type=Path), help="Of an environment with fa4-vllm.")
@click.option("--sglang-python", type=click.Path(exists=True, path_type=Path), help="Of one with fa4-sglang.")
@click.option("--full", is_flag=True, help="More and longer prompts.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write every number here, too.")
def main(vllm_python: Path | None, sglang_python: Path | None, full: bool, out: Path | None) -> None:
    """Serve SmolLM2-135M-Instruct with the real engines and hold every backend against transformers in fp32."""
    import torch

    pythons = {k: p.absolute() for k, p in (("vllm", vllm_python), ("sglang", sglang_python)) if p}
    if not pythons:
        raise click.UsageError("name the environment of at least one engine")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    planned = [run for run in runs(device) if run.engine in pythons]
    folder = Path(tempfile.mkdtemp(prefix="fa4-demo-"))
    console = Console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the model", total=2 + len(planned))
        began = time.perf_counter()

        def say(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:  # a log shows no bar
                print(f"{time.perf_counter() - began:6.0f} s  {what}", flush=True)

        say("the model")
        path = model.prepare()
        asked = prompts.make(path, prompts.FULL if full else prompts.DEFAULT)
        progress.advance(task)
        say("the reference: transformers in fp32")
        everyone = [p for wave in asked["waves"] for p in wave]
        inner = progress.add_task("greedy tokens", total=len(everyone))
        reference = Reference(path)
        reference_began = time.perf_counter()
        answers = reference.greedy(
            [p["tokens"] for p in everyone], asked["new_tokens"], lambda: progress.advance(inner)
        )
        took = time.perf_counter() - reference_began
        greedy = {p["name"]: tokens for p, tokens in zip(everyone, answers)}
        progress.remove_task(inner)
        progress.advance(task)
        rows: list[checks.Row] = []
        for run in planned:
            job = asked | {"model": str(path), "device": device, "dtype": dtype, "ours": run.ours}
            job |= run.options
            say(run.name)
            try:
                result = workers.work(
                    run, pythons[run.engine], job, folder / run.name.replace(", ", "-").replace(" ", "-"),
                    lambda line, name=run.name: say(f"{name}: {line}"),
                )  # fmt: skip
            except workers.WorkerError as error:
                progress.stop()
                console.print(str(error), markup=False, highlight=False)
                sys.exit(1)
            tokens = {p["name"]: p["tokens"] for p in everyone}
            logs = {o["name"]: reference.logprobs(tokens[o["name"]], o["tokens"]) for o in result["outputs"]}
            row = checks.measure(result, job, greedy, logs)
            own = next((r for r in rows if r.result["engine"] == result["engine"] and not r.ours), row)
            checks.judge(row, own, job)
            rows.append(row)
            progress.advance(task)
    show(console, rows, device, dtype, took, asked)
    if out:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    failures = [f"{r.result['engine']} {r.result['backend']}: {f}" for r in rows for f in r.failures]
    for failure in failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)
    console.print(f"Logs, prompts and results: {folder}", markup=False, highlight=False)
    sys.exit(bool(failures))


def show(console: Console, rows: list[checks.Row], device: str, dtype: str, took: float, asked: dict) -> None:
    """The table."""
    count, new = sum(map(len, asked["waves"])), asked["new_tokens"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("engine", "backend", "kernel", "greedy\nequal", "mean, max\n|dlogprob|", "seconds",
                 "layers", "tokens through\nprefill()", "holds"):  # fmt: skip
        table.add_column(name)
    table.add_row("transformers", "eager, fp32", "-", f"{count}/{count}", "0, 0", f"{took:.1f}", "", "-", "")
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
    console.print(f"SmolLM2-135M-Instruct on {device} in {dtype}, {count} prompts, {new} new tokens each", style="bold")
    console.print(table)


if __name__ == "__main__":
    main()
