"""The fa4 command: what is here, what would serve which layer, and what a running server has done."""

from __future__ import annotations

import click

from .doctor import doctor
from .explain import explain
from .stats import stats


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fa4-core", prog_name="fa4")
def main() -> None:
    """Prefill attention for vLLM and SGLang."""


for command in (doctor, explain, stats):
    main.add_command(command)
