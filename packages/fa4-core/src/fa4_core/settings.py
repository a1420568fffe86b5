"""The environment variables that fa4_core reads. The adapters have their own; docs/reference/settings.md lists all."""

from __future__ import annotations

import os

KERNEL = "FA4_KERNEL"
STATS_DIR = "FA4_STATS_DIR"

VARIABLES = {
    KERNEL: "run this kernel and no other; unset picks the best one",
    STATS_DIR: "where servers publish their counters; unset is fa4-UID in the temporary directory",
}


def kernel() -> str | None:
    """FA4_KERNEL, or None where unset or empty."""
    return os.environ.get(KERNEL) or None


def stats_dir() -> str | None:
    """FA4_STATS_DIR, or None where unset or empty."""
    return os.environ.get(STATS_DIR) or None
