"""The command: compile kernels into a folder, show what each takes, fail where one spills or is out of bounds."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ....cli.show import as_json, print_json, print_table
from ....errors import bad
from ..config import Config, all_kernels
from . import versions
from .link import compiler
from .load import SUMMARY
from .make import ARCH, Made, make_all


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder; made.")
@click.option(
    "--variants", multiple=True, metavar="PATTERN", help="Only names that match, such as '*_d128_*'; may be repeated."
)
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count(), show_default="one for each core")
@click.option("--expect-spill", multiple=True, metavar="NAME", help="A kernel known to spill; wrong where it does not.")
@as_json
def main(out: Path, variants: tuple[str, ...], jobs: int, expect_spill: tuple[str, ...], as_json: bool) -> None:
    """Compile the Hopper kernels for sm_90a, one shared library each. Needs no GPU.

    What each kernel takes is printed, and written to objects.json in the folder. The exit status is 1 where one does
    not compile, spills registers, or takes more than an SM has.
    """
    try:
        kernels = chosen(variants)
        compiler()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for module, package in (("cutlass", f"{versions.DSL}[cu13]"), ("tvm_ffi", versions.FFI)):
        if importlib.util.find_spec(module) is None:
            raise click.ClickException(f"{package} is not installed: pip install '{package}'")
    unknown = sorted(set(expect_spill) - set(all_kernels()))
    if unknown:
        raise click.UsageError(f"--expect-spill was {', '.join(unknown)}; allowed: names of kernels")
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    made, failed = _run(kernels, out, jobs)
    report = {
        "arch": ARCH,
        **provenance(),
        "jobs": jobs,
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": [asdict(m) for m in made],
        "failed": failed,
    }
    (out / SUMMARY).write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
    else:
        _show(made, report)
    wrong = judge(made, failed, [name for name in expect_spill if name in kernels])
    for line in wrong:
        click.echo(f"problem: {line}", err=True)
    if wrong:
        raise SystemExit(1)


def chosen(patterns: tuple[str, ...]) -> dict[str, Config | str]:
    """The kernels whose names match one of the patterns; all without one.

    Raises:
        ValueError: A pattern matches nothing.
    """
    everything = all_kernels()
    for pattern in patterns:
        if not fnmatch.filter(everything, pattern):
            raise bad("--variants", repr(pattern), f"a pattern that matches one of {', '.join(everything)}")
    wanted = {name for pattern in patterns for name in fnmatch.filter(everything, pattern)}
    return {name: key for name, key in everything.items() if not patterns or name in wanted}


def provenance() -> dict[str, str | None]:
    """What the kernels are made by and of."""
    from cutlass.base_dsl.version_info import CUDA_VERSION

    return {
        "cutlass_dsl": versions.installed(versions.DSL),
        "cuda": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        "tvm_ffi": versions.installed(versions.FFI),
        "python": platform.python_version(),
        "source": versions.source(),
    }


def judge(made: list[Made], failed: dict[str, str], expected: list[str]) -> list[str]:
    """What is wrong with a run, a line each."""
    wrong = [f"{name} was not made: {reason}" for name, reason in failed.items()]
    for m in made:
        for problem in m.problems:
            if m.name not in expected or not problem.startswith("spills"):
                wrong.append(f"{m.name}: {problem}")
        if m.name in expected and not m.usage.spills:
            wrong.append(f"{m.name} spills no longer: take it off the list of those that are expected to")
    return wrong


def _run(kernels: dict[str, Config | str], out: Path, jobs: int) -> tuple[list[Made], dict[str, str]]:
    made: list[Made] = []
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(kernels))
        for result in make_all(kernels, out, jobs):
            if isinstance(result, Made):
                made.append(result)
            else:
                failed[result[0]] = result[1]
            progress.advance(task)
    order = list(kernels)
    return sorted(made, key=lambda m: order.index(m.name)), failed


def _show(made: list[Made], report: dict[str, Any]) -> None:
    columns = ("kernel", "registers", "threads", "shared", "local", "spills", "s", "KB")
    rows = [
        (m.name, m.usage.registers, m.usage.threads, m.usage.shared, m.usage.local, m.usage.spills, m.seconds,
         m.bytes // 1000)
        for m in made
    ]  # fmt: skip
    by = f"{versions.DSL} {report['cutlass_dsl']}, CUDA {report['cuda']}"
    print_table(f"{len(made)} kernels for {ARCH} in {report['seconds']} s, {by}", columns, rows)


if __name__ == "__main__":
    main()
