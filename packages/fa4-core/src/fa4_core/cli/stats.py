"""fa4 stats: the counters of running servers, read without asking them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..counters import directory, read_published
from .show import as_json, print_json, print_table


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to look.  [default: FA4_STATS_DIR]")
@click.option("--all", "ended", is_flag=True, help="Processes that have ended, too.")
@as_json
def stats(folder: Path | None, ended: bool, as_json: bool) -> None:
    """Counters of the servers that run our kernels: calls and query tokens by kernel and load path, splits.

    Query tokens count a query row once in every layer.
    """
    try:
        found = [p for p in read_published(folder) if p.alive or ended]
    except OSError as error:
        raise click.ClickException(f"the counters' directory cannot be listed: {error}") from None
    if as_json:
        print_json([asdict(p) for p in found])
    elif not found:
        click.echo(f"No {'' if ended else 'running '}process has published counters in {folder or directory()}.")
    else:
        for p in found:
            state = "" if p.alive else ", ended"
            print_table(f"{p.engine}, process {p.pid}{state}", ("counter", "value"), sorted(p.counters.items()))
