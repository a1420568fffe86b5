"""Hold the engines' answers against each other, bit for bit: `python -m parity FOLDER vllm-0.32.0 sglang-0.5.23`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from . import compare, record


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("engines", nargs=-1, required=True)
@click.option("--device", type=click.Choice(list(record.ON)), default="cpu", show_default=True, help="Where they ran.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def main(folder: Path, engines: tuple[str, ...], device: str, as_json: bool) -> None:
    """Compare the records in FOLDER of ENGINES, such as vllm-0.32.0; exits with 1 where anything stands against parity.

    Each engine must be there on each of its page sizes and, on a CPU, with each number of threads.
    """
    expect = []
    for engine in engines:
        known, _, version = engine.partition("-")
        if known not in record.PAGE_SIZES or not version:
            raise click.BadParameter(f"was {engine!r}; allowed: {' or '.join(record.PAGE_SIZES)}, - and a version")
        expect += record.expected(known, version, device)
    found = {file.name.removesuffix(record.SUFFIX): file for file in sorted(folder.glob("*" + record.SUFFIX))}
    missing = [f"{name}: no record; run that engine's session first" for name in expect if name not in found]
    records = [record.read(found[name]) for name in expect if name in found]
    pairs = compare.compare(records, record.core_digest())
    problems = missing + [f"{pair}: {problem}" for pair in pairs for problem in pair.problems]
    if not pairs:
        problems.append("nothing was compared")
    if as_json:
        about = [{"left": p.left, "right": p.right, "scenarios": p.scenarios, "problems": p.problems} for p in pairs]
        click.echo(json.dumps({"pairs": about, "problems": problems}, indent=1))
        sys.exit(bool(problems))
    table = Table("one", "the other", "scenarios", "bits")
    for pair in pairs:
        table.add_row(pair.left, pair.right, str(pair.scenarios), "differ" if pair.problems else "equal")
    console = Console(width=120)
    console.print(table)
    for problem in problems:
        console.print(f"[red]{problem}[/red]", highlight=False)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
