"""Whether a layer's kernels can be had here: from a folder of compiled ones, or by a DSL version that compiles them."""

from __future__ import annotations

import re

from ... import settings
from .config import Config, all_kernels
from .objects.load import folder
from .objects.versions import DSL, installed

OLDEST, NEWEST = (4, 5, 2), (5,)  # compiled with 4.5.2, 4.6.0, 4.6.2 and 4.8.0; pyproject.toml bounds it the same


def refusal(d: int, d_v: int, dtype: str, softcap: bool) -> str | None:
    """Why a layer's kernels can be neither loaded nor compiled; None where they can.

    Args:
        d: Elements of a query or key head.
        d_v: Elements of a value head.
        dtype: "bf16" or "fp16".
        softcap: The layer caps its scores.
    """
    try:
        where = folder()
    except ValueError as error:  # said now, not at the first call that needs a kernel
        return str(error)
    version = installed(DSL)
    if version is not None and OLDEST <= _numbers(version) < NEWEST:
        return None
    have = f"{DSL} {version}" if version else f"no {DSL}"
    missing = [name for name in _needed(d, d_v, dtype, softcap) if where is None or not (where / f"{name}.so").exists()]
    if not missing:
        return None
    held = f"and {settings.HOPPER_OBJECTS} names no folder" if where is None else f"and {where} has no {missing[0]}"
    return f"cannot be compiled with {have}, only with {_words(OLDEST)} to below {_words(NEWEST)}, {held}"


def _needed(d: int, d_v: int, dtype: str, softcap: bool) -> list[str]:
    """Names of all kernels that a layer may ask for, whatever its window and its pages are."""
    helpers = ("find_runs", "gather", f"combine_{dtype}_{d_v}")
    wanted = (d, d_v, dtype, softcap)
    return [
        name
        for name, key in all_kernels().items()
        if key in helpers or (isinstance(key, Config) and (key.d, key.d_v, key.dtype, key.softcap) == wanted)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """4.6.0.dev1 as (4, 6, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _words(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
