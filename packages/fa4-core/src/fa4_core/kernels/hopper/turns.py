"""Streams take turns at memory that plans share: a launch on another stream than the last one's waits for that one."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int:
    """A number for the current stream; cheaper than torch's object, and asked for in every call."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class Turns:
    """The order of launches that use one block of memory.

    A plan's counter and the workspace hold one launch's state. On one stream launches follow each other; this keeps
    it so where a plan, or two plans with one workspace, are run on several. Nothing is waited for under capture: a
    graph cannot wait for a stream outside of it, and torch synchronises before one is recorded. Replays are launched
    without us, so their order among streams is the caller's to keep.

    Args:
        device: Whose streams.
        memory: What the launches use; the allocator is told of each stream that does.
    """

    def __init__(self, device: torch.device, *memory: torch.Tensor) -> None:
        self._device, self.memory = device, memory
        self._handle: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def enter(self) -> int:
        """Before launches on the current stream, whose number is returned."""
        handle = current_stream(self._device)
        if handle == self._handle or self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return handle
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
            for t in self.memory:
                t.record_stream(stream)
        self._handle, self._stream = handle, stream
        return handle


_of_blocks: dict[tuple[torch.device, int], Turns] = {}


def turns_of(block: torch.Tensor) -> Turns:
    """Those of a block of the workspace, shared by all plans that have it."""
    key = block.device, block.data_ptr()
    found = _of_blocks.get(key)
    if found is None or found.memory[0] is not block:
        found = _of_blocks[key] = Turns(block.device, block)
    return found
