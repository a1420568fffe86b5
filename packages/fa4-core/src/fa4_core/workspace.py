"""Scratch memory of a device: one block a stream, shared by the plans that run on it one after the other."""

from __future__ import annotations

import torch

from . import settings
from .errors import bad

_blocks: dict[tuple[torch.device, int], torch.Tensor] = {}


def take(device: torch.device, size: int) -> torch.Tensor:
    """Bytes that the current stream's plans share; grown where a plan needs more, never shrunk.

    Args:
        device: Whose memory.
        size: Bytes, at most `settings.workspace_bytes()`.

    Returns:
        uint8 [size and more]; what it holds is undefined.

    Raises:
        ValueError: More than the limit: a kernel asks for less, or goes a way that needs none.
    """
    limit = settings.workspace_bytes()
    if not 0 <= size <= limit:
        raise bad("size", str(size), f"0 to the {limit} bytes of {settings.WORKSPACE_MIB}")
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    have = _blocks.get((device, stream))
    if have is None or have.numel() < size:
        have = _blocks[device, stream] = torch.empty(size, dtype=torch.uint8, device=device)
    return have
