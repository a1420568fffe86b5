"""How the commands print: tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def print_json(value: Any) -> None:
    """To standard output, for programs."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on standard output, as wide as the terminal; cells are plain text, a header row only where named."""
    columns = list(columns)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 40)  # narrower than that, nothing can be read
    console.print(title, style="bold")
    console.print(table)
    console.print()
