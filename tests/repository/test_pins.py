"""Versions that stand in two places agree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pre_commit_runs_the_ruff_of_the_lint_session():
    pin = re.compile(r"ruff==[\d.]+")
    session = set(pin.findall((ROOT / "noxfile.py").read_text()))
    assert len(session) == 1
    assert set(pin.findall((ROOT / ".pre-commit-config.yaml").read_text())) == session


def test_ci_runs_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert f"    {command}\n" in (ROOT / "README.md").read_text()
