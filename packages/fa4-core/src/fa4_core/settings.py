"""The environment variables that fa4_core reads; docs/reference/settings.md lists each of them."""

from __future__ import annotations

import os

KERNEL = "FA4_KERNEL"
STATS_DIR = "FA4_STATS_DIR"


def kernel() -> str | None:
    """FA4_KERNEL: run this kernel and no other; unset picks the best one."""
    return os.environ.get(KERNEL) or None


def stats_dir() -> str | None:
    """FA4_STATS_DIR: where processes publish their counters; unset is the user's runtime directory."""
    return os.environ.get(STATS_DIR) or None
