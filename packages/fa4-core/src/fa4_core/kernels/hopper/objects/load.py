"""Kernels from the folder that FA4_HOPPER_OBJECTS names, so that a server compiles nothing and needs no DSL."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from .... import settings
from ....errors import bad
from ..config import all_kernels
from . import versions

SUMMARY = "objects.json"


def find(name: str) -> Callable[..., None] | None:
    """The kernel of that name, None where there is no folder or it does not hold it.

    Raises:
        ValueError: As for `folder`.
    """
    where = folder()
    if where is None or not (where / f"{name}.so").exists():
        return None
    from tvm_ffi import load_module

    function: Any = load_module(str(where / f"{name}.so"))[name]
    return function  # type: ignore[no-any-return]


def folder() -> Path | None:
    """The folder, None where none is named.

    Raises:
        ValueError: It was not made from this version's sources: its kernels may expect other arguments.
    """
    named = settings.hopper_objects()
    return _checked(named) if named else None


def about() -> dict[str, str | None]:
    """What compiled kernels there are and what they must be made from, for fa4 doctor.

    Raises:
        ValueError: As for `folder`.
    """
    where = folder()
    held = None
    if where is not None:
        made = json.loads((where / SUMMARY).read_text())
        count = sum((where / f"{name}.so").exists() for name in all_kernels())
        held = f"{where}: {count} of {len(all_kernels())}, by {versions.DSL} {made.get('cutlass_dsl')}"
    return {"sources": versions.source(), "compiled": held}


@cache
def _checked(named: str) -> Path:
    summary = Path(named) / SUMMARY
    try:
        made_from = json.loads(summary.read_text())["source"]
    except (OSError, ValueError, KeyError, TypeError):
        made_from = None
    if made_from != versions.source():
        was = f"{named!r}, " + (f"made from sources {made_from}" if made_from else f"without a readable {SUMMARY}")
        command = "python -m fa4_core.kernels.hopper.objects --out DIR"
        raise bad(settings.HOPPER_OBJECTS, was, f"a folder made from sources {versions.source()} by `{command}`")
    return Path(named)
