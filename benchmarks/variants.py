"""The table of what each Hopper kernel takes, from a run of `python -m fa4_core.kernels.hopper.objects`.

    python benchmarks/variants.py DIR            compare with benchmarks/results/hopper-variants.json and the page
    python benchmarks/variants.py DIR --write    write both

`nox -s kernels` does the first, so that the table is never of other code than the kernels; `nox -s kernels -- --write`
the second.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "hopper-variants.json"
PAGE = ROOT / "docs" / "kernels" / "hopper-variants.md"

HEAD = """# The Hopper kernels, one by one

What each of the {count} kernels takes when compiled for {arch} by nvidia-cutlass-dsl {cutlass_dsl} (CUDA {cuda}), from
sources {source}. Written by `nox -s kernels -- --write`; `nox -s kernels` fails where it differs from what is compiled.
Registers are a thread's at launch, before the groups of a block share them out anew. Spills are instructions that load
or store local memory.

| kernel | threads | registers | shared memory, bytes | local memory a thread, bytes | spills |
|---|---|---|---|---|---|
"""


def as_table(report: dict[str, Any]) -> dict[str, Any]:
    """Of a run's summary, what the code and the compiler decide; no time and no place."""
    made_by = {key: report[key] for key in ("arch", "cutlass_dsl", "cuda", "source")}
    return made_by | {"kernels": {k["name"]: k["usage"] for k in report["kernels"]}}


def as_page(table: dict[str, Any]) -> str:
    """The table for people."""
    kernels = table["kernels"]
    rows = [
        f"| `{name.removeprefix('fa4_hopper_')}` | {u['threads']} | {u['registers']} | {u['shared']} | {u['local']} "
        f"| {u['spills']} |\n"
        for name, u in kernels.items()
    ]
    return HEAD.format(count=len(kernels), **table) + "".join(rows)


def difference(table: dict[str, Any], page: str, kept: dict[str, Any], kept_page: str) -> list[str]:
    """What of the kept table and page is not as it was measured."""
    found = [f"{key} is {value}, kept {kept.get(key)}" for key, value in table.items()
             if key != "kernels" and kept.get(key) != value]  # fmt: skip
    old, new = kept.get("kernels", {}), table["kernels"]
    found += [f"{name} is {new.get(name)}, kept {old.get(name)}"
              for name in {**old, **new} if old.get(name) != new.get(name)]  # fmt: skip
    return found or (["the page is not the table's"] if kept_page != page else [])


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", type=Path, metavar="DIR")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    table = as_table(json.loads((args.objects / "objects.json").read_text()))
    page = as_page(table)
    if args.write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        PAGE.write_text(page)
        return
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found = difference(table, page, kept, PAGE.read_text() if PAGE.exists() else "")
    for line in found:
        print(f"problem: {line}")
    if found:
        raise SystemExit(f"{TABLE.name} or {PAGE.name} is not of these kernels: nox -s kernels -- --write")


if __name__ == "__main__":
    main()
