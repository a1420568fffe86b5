"""The environment variables that fa4_core reads. The adapters have their own; docs/reference/settings.md lists all."""

from __future__ import annotations

import os

from .errors import bad

KERNEL = "FA4_KERNEL"
STATS_DIR = "FA4_STATS_DIR"
WORKSPACE_MIB = "FA4_WORKSPACE_MIB"
HOPPER_OBJECTS = "FA4_HOPPER_OBJECTS"

MOST_WORKSPACE_MIB = 512

VARIABLES = {
    KERNEL: "run this kernel and no other; unset picks the best one",
    STATS_DIR: "where servers publish their counters; unset is fa4-UID in the temporary directory",
    WORKSPACE_MIB: f"scratch memory of a device at most, 1 to {MOST_WORKSPACE_MIB}; unset is {MOST_WORKSPACE_MIB}",
    HOPPER_OBJECTS: "a folder of compiled Hopper kernels, taken before any is compiled; unset compiles at first use",
}


def kernel() -> str | None:
    """FA4_KERNEL, or None where unset or empty."""
    return os.environ.get(KERNEL) or None


def stats_dir() -> str | None:
    """FA4_STATS_DIR, or None where unset or empty."""
    return os.environ.get(STATS_DIR) or None


def hopper_objects() -> str | None:
    """FA4_HOPPER_OBJECTS, or None where unset or empty."""
    return os.environ.get(HOPPER_OBJECTS) or None


def workspace_bytes() -> int:
    """FA4_WORKSPACE_MIB in bytes.

    Raises:
        ValueError: It is no whole number, or more than a kernel may take.
    """
    value = os.environ.get(WORKSPACE_MIB) or str(MOST_WORKSPACE_MIB)
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MOST_WORKSPACE_MIB:
        raise bad(WORKSPACE_MIB, repr(value), f"a whole number of 1 to {MOST_WORKSPACE_MIB}")
    return int(value) << 20
