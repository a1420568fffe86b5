"""What a folder of compiled kernels was made by."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

DSL, FFI = "nvidia-cutlass-dsl", "apache-tvm-ffi"
HOST = frozenset(
    {"__init__.py", "dsl.py", "launch.py", "plan.py"}
)  # never compiled for a GPU; a new file counts as compiled


@cache  # select() asks in every step, and the answer is read from disk
def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed; it stays what it was at the first call."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def source() -> str:
    """A digest of everything that the kernels are compiled from."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].glob("*.py")):
        if path.name not in HOST:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
