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


def test_an_adapter_claims_the_versions_that_ci_runs():
    noxfile = (ROOT / "noxfile.py").read_text()
    for name in ("sglang",):
        [run] = re.findall(rf'"{name}": (\([^)]*\))', noxfile)
        compat = (ROOT / "packages" / f"fa4-{name}" / "src" / f"fa4_{name}" / "compat.py").read_text()
        [claimed] = re.findall(r"^TESTED = (\(.*\))$", compat, re.MULTILINE)
        assert claimed == run
        versions = re.findall(r"[\d.]+\d", claimed)
        extra = (ROOT / "packages" / f"fa4-{name}" / "pyproject.toml").read_text()
        assert f'"{name}>={versions[0]},<={versions[-1]}"' in extra
