"""What an adapter does once when its server starts: refuse early, reserve memory, publish counters, say what runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from . import counters, workspace
from .kernels import Question, select
from .spec import LayerSpec
from .target import Target

logger = logging.getLogger("fa4")


def start(
    engine: str,
    engine_version: str,
    specs: Iterable[LayerSpec],
    *,
    page_size: int,
    device: torch.device,
    kernel: str | None = None,
    invariant: bool = False,
) -> str:
    """Check that every layer is served, publish this process's counters, and log one line that says by what.

    Args:
        engine: The engine's name, such as "vllm".
        engine_version: Its version.
        specs: A spec for each layer; repeated ones count once.
        page_size: Rows of a page.
        device: Where the server runs.
        kernel: As for `plan()`.
        invariant: As for `plan()`.

    Returns:
        The line that was logged, at level INFO, by the logger "fa4".

    Raises:
        UnsupportedError: A layer is served by no kernel; each kernel's reason is listed.
    """
    target = Target.of(device)
    served: dict[str, list[LayerSpec]] = {}
    for spec in dict.fromkeys(specs):
        chosen = select(Question(spec, page_size, target, invariant), kernel)
        served.setdefault(f"{chosen.name} for [{{}}] ({chosen.about})", []).append(spec)
    file = counters.publish(engine)
    kernels = "; ".join(words.format(" | ".join(map(str, specs))) for words, specs in served.items()) or "no layer"
    from . import __version__

    line = (
        f"fa4-core {__version__} in {engine} {engine_version}, torch {torch.__version__}, {target}: {kernels}; "
        f"page size {page_size}, {'invariant' if invariant else 'not invariant'}, counters {file or 'in memory only'}"
    )
    logger.info(line)
    return line


def reserve(
    specs: Iterable[LayerSpec],
    *,
    page_size: int | None,
    device: torch.device,
    kernel: str | None = None,
    invariant: bool = False,
) -> int:
    """Take the workspace that the layers may ever need, before an engine gives the device's free memory to its pool.

    Args:
        specs: A spec for each layer; repeated ones count once.
        page_size: Rows of a page; None where it is not known yet.
        device: Where the server runs; its current stream is the one that will run the layers.
        kernel: As for `plan()`.
        invariant: As for `plan()`.

    Returns:
        The bytes that are held now, at most FA4_WORKSPACE_MIB.

    Raises:
        UnsupportedError: A layer is served by no kernel; each kernel's reason is listed.
    """
    target, most = Target.of(device), 0
    for spec in dict.fromkeys(specs):
        question = Question(spec, page_size, target, invariant)
        most = max(most, select(question, kernel).workspace_bytes(question))
    if most:
        workspace.take(device, most)
    return most
