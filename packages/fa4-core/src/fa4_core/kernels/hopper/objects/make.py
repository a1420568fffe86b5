"""Compile kernels in processes of their own, and say what each takes."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..config import SMEM_LIMIT, Config
from .usage import Usage, read

ARCH = "sm_90a"
REGISTER_FILE = 65536  # of an SM; a block gets them in units of 8 a thread
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # in the DSL's messages
BARRIERS = 2048  # bytes: what a kernel may take beside Config.smem_bytes, for barriers and work items


@dataclass(frozen=True)
class Made:
    """One kernel that was compiled.

    Args:
        name: Of its function and, with .so, of its file.
        usage: What it takes.
        seconds: To compile and link.
        bytes: Of the file.
        problems: What is out of bounds.
    """

    name: str
    usage: Usage
    seconds: float
    bytes: int
    problems: tuple[str, ...]


def problems(key: Config | str, usage: Usage) -> tuple[str, ...]:
    """What of a kernel is out of bounds, in words."""
    found = []
    if usage.spills or usage.local:
        found.append(f"spills: {usage.spills} loads and stores, {usage.local} bytes of local memory a thread")
    if -(-usage.registers // 8) * 8 * usage.threads > REGISTER_FILE:
        found.append(f"{usage.threads} threads of {usage.registers} registers exceed {REGISTER_FILE}")
    least, most = (0, SMEM_LIMIT)
    if isinstance(key, Config):
        least, most = key.smem_bytes, min(SMEM_LIMIT, key.smem_bytes + BARRIERS)
    if not least <= usage.shared <= most:
        found.append(f"{usage.shared} bytes of shared memory, expected {least} to {most}")
    return tuple(found)


def make(name: str, key: Config | str, out: str) -> Made:
    """Compile and link one kernel; runs in a worker, where the target is set."""
    from ..build import compile_helper, compile_variant
    from .link import link

    start = time.perf_counter()
    compiled = compile_helper(key) if isinstance(key, str) else compile_variant(key)
    into = Path(out) / f"{name}.so"
    with TemporaryDirectory() as folder:
        kernel = Path(folder) / "kernel.o"
        compiled.export_to_c(object_file_path=str(kernel), function_name=name)
        usage = read(kernel.read_bytes(), str(compiled.ir_module))
        link(kernel, into)
    seconds = time.perf_counter() - start
    return Made(name, usage, round(seconds, 1), into.stat().st_size, problems(key, usage))


def _prepare() -> None:
    os.environ["CUTE_DSL_ARCH"] = ARCH  # else the DSL asks the GPU of this machine, which need not have one


def make_all(kernels: Mapping[str, Config | str], out: Path, jobs: int) -> Iterator[Made | tuple[str, str]]:
    """Compile kernels, in the order in which they become ready.

    Args:
        kernels: Keys by name.
        out: The folder of the libraries; it exists.
        jobs: Processes.

    Yields:
        What was made, or a name and why it was not.
    """
    # Spawned, not forked: the parent holds torch's threads, and the DSL must first be imported with the target set.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(kernels)), context, initializer=_prepare) as pool:
        names = {pool.submit(make, name, key, str(out)): name for name, key in kernels.items()}
        for future in as_completed(names):
            try:
                yield future.result()
            except BrokenProcessPool:
                yield names[future], "its process, or one beside it, died"
            except Exception as error:  # of any kind: the DSL's errors share no base class
                yield names[future], f"{type(error).__name__}: {COLOUR.sub('', str(error)).strip()}"
