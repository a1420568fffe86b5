"""What both engines' workers share: the form of what they write, and what fa4_core counted in all processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path


def counted() -> dict[str, int]:
    """Counters that the engine's processes published, added up; their folder is this run's own."""
    try:
        from fa4_core.counters import read_published
    except ImportError:
        return {}
    total: dict[str, int] = {}
    for process in read_published():
        for name, value in process.counters.items():
            total[name] = total.get(name, 0) + value
    return total


def worker(main: Callable[[dict], dict]) -> None:
    """Run a worker's main over JOB.json and keep what it returns in RESULT.json, the two arguments."""
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
