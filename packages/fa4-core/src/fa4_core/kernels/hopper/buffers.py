"""What a plan keeps on the device: lists of ints, each with room for the largest step that the plan may hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .plan import ITEM_INTS

SPARE_INTS = 256  # a row of the widest head: an argument for kernels that will not look at it
CONTROL_INTS = 4  # the next item's counter; items, boxes, split tiles


@dataclass(frozen=True)
class Room:
    """The most that a plan holds, a count each."""

    requests: int
    items: int
    split: int
    boxes: int


class Lists:
    """The lists, at fixed addresses: a graph that was captured with them sees what `write` puts there later.

    Args:
        room: The most of each.
        device: Where.
    """

    def __init__(self, room: Room, device: torch.device) -> None:
        shapes = {
            "control": (CONTROL_INTS,),
            "spare": (SPARE_INTS,),
            "first_box": (max(room.requests, 1),),
            "split": (max(room.split, 1), ITEM_INTS),
            "items": (max(room.items, 1), ITEM_INTS),
            "owner": (max(room.boxes, 1),),
        }
        self._at, end = {}, 0
        for name, shape in shapes.items():
            self._at[name] = end
            end += -(-int(np.prod(shape)) // 8) * 8  # each starts at a multiple of 32 bytes
        self.memory = torch.zeros(end, dtype=torch.int32, device=device)

        def view(name: str) -> torch.Tensor:
            shape = shapes[name]
            return self.memory[self._at[name] :][: int(np.prod(shape))].view(shape)

        self.control, self.first_box, self.split = view("control"), view("first_box"), view("split")
        self.items, self.owner, self.spare = view("items"), view("owner"), view("spare")
        # Written on the device alone: the slot of each box's first key.
        self.first_slots = torch.empty(room.boxes, dtype=torch.int32, device=device) if room.boxes else self.owner

    def write(self, **arrays: np.ndarray) -> None:
        """Copy lists from the host, each to its place, from pinned memory that the allocator keeps until it is read."""
        used = {name: a.ravel() for name, a in arrays.items() if a.size}
        last = max(self._at[name] + a.size for name, a in used.items())
        total = sum(a.size for a in used.values())
        at_once = last <= 2 * total + 4096  # little between them: one copy of all
        host = torch.zeros(last if at_once else total, dtype=torch.int32, pin_memory=self.memory.is_cuda)
        flat, at = host.numpy(), 0
        for name, a in used.items():
            at = self._at[name] if at_once else at
            flat[at : at + a.size] = a
            if not at_once:
                self.memory[self._at[name] :][: a.size].copy_(host[at : at + a.size], non_blocking=True)
            at += a.size
        if at_once:
            self.memory[:last].copy_(host, non_blocking=True)
