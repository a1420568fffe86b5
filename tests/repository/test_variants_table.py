"""The table of the Hopper kernels: kept whole, and every way to differ from what was compiled is named."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import variants

from fa4_core.kernels.hopper.config import all_kernels

USAGE = {"registers": 128, "threads": 512, "shared": 9, "local": 0, "spills": 0}
REPORT = {
    "arch": "sm_90a", "cutlass_dsl": "4.8.0", "cuda": "13.4", "source": "abc", "seconds": 3.0,
    "kernels": [{"name": name, "usage": dict(USAGE), "seconds": 1.0} for name in ("fa4_hopper_a", "fa4_hopper_b")],
}  # fmt: skip


def test_the_kept_table_is_of_all_kernels_and_the_page_is_its_own():
    table = json.loads(variants.TABLE.read_text())
    assert list(table["kernels"]) == list(all_kernels())
    assert variants.PAGE.read_text() == variants.as_page(table)


def test_what_does_not_differ():
    table = variants.as_table(REPORT)
    slower = variants.as_table(REPORT | {"seconds": 9.0})
    assert variants.difference(slower, variants.as_page(slower), table, variants.as_page(table)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(source="xyz"), "source is xyz, kept abc"),
        (lambda r: r["kernels"][1]["usage"].update(spills=6), "fa4_hopper_b is .*'spills': 6.*, kept "),
        (lambda r: r["kernels"].pop(), "fa4_hopper_b is None, kept "),
        (lambda r: r["kernels"].append({"name": "c", "usage": USAGE}), "c is .*, kept None"),
    ],
)
def test_what_differs_is_named(change, message):
    report = copy.deepcopy(REPORT)
    change(report)
    table, kept = variants.as_table(report), variants.as_table(REPORT)
    [found] = variants.difference(table, variants.as_page(table), kept, variants.as_page(kept))
    assert re.search(message, found)


def test_a_page_that_was_edited_is_named():
    table = variants.as_table(REPORT)
    assert variants.difference(table, variants.as_page(table), table, "") == ["the page is not the table's"]
