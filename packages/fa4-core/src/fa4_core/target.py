"""Target: the device that a kernel is asked about; explain() may ask about one that is not here."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

from .errors import bad, require


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Args:
        type: "cpu" or "cuda".
        capability: Compute capability of a CUDA device, such as (9, 0); None elsewhere.
    """

    type: str
    capability: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """From a name: "cpu", "sm_90", "sm90" or "9.0".

        Raises:
            ValueError: Any other spelling.
        """
        if text == "cpu":
            return cls("cpu")
        found = re.fullmatch(r"(?:sm_?)?([0-9]+?)\.?([0-9])a?", text) if isinstance(text, str) else None
        if not found:
            raise bad("target", repr(text), "cpu, or a compute capability such as sm_90 or 9.0")
        return cls("cuda", (int(found[1]), int(found[2])))

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """Of a torch device; asks CUDA for its capability once a device."""
        require("device", device, torch.device)
        if device.type != "cuda":
            return cls(device.type)
        return _of_cuda(device.index if device.index is not None else torch.cuda.current_device())

    def __str__(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.type


@functools.cache
def _of_cuda(index: int) -> Target:
    return Target("cuda", torch.cuda.get_device_capability(index))
