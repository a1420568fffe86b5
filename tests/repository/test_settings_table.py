"""Every environment variable that the packages name stands in the one table, and the table names no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\bFA4_[A-Z_]+\b")


def test_the_table_lists_what_the_code_reads():
    table = (ROOT / "docs" / "reference" / "settings.md").read_text()
    named = {v for path in (ROOT / "packages").rglob("src/**/*.py") for v in VARIABLE.findall(path.read_text())}
    assert named == set(VARIABLE.findall(table))
