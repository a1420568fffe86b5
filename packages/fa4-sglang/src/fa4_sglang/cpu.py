"""What SGLang's own engine needs to run on a CPU from the wheels that PyPI has: off unless FA4_SGLANG_CPU=1.

SGLang's CPU engine proper (SGLANG_USE_CPU_ENGINE=1) needs kernels that must be built from source. Without it, and
with device="cpu", all that the engine needs from elsewhere is in plain torch, save what is mended here.

`python -m fa4_sglang.cpu` prepares an environment: it leaves a line that Python runs at its start, since SGLang
imports torchvision before it loads any plugin, in every process. The line does nothing unless the variable is set.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

VARIABLE = "FA4_SGLANG_CPU"
STARTER = "fa4_sglang_cpu.pth"


def wanted() -> bool:
    """Whether FA4_SGLANG_CPU=1."""
    return os.environ.get(VARIABLE) == "1"


def adapt() -> None:
    """Mend what keeps a model from running; called at registration, in each of SGLang's processes."""
    if wanted():
        _rotate_in_torch()


def _rotate_in_torch() -> None:
    """Rotary embedding in plain torch.

    All versions, 0.5.23 included: on a device it does not know, SGLang takes a kernel from vLLM unless it believes
    to be on its CPU engine. Goes when RotaryEmbedding asks for the device that it runs on.
    """
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True


class _TorchvisionSchemas(MetaPathFinder):
    """Declares two operators at the first import of torchvision, then steps aside.

    All versions: PyPI's torchvision for Linux is built for CUDA; beside a CPU torch its operators do not load, and
    its import fails for want of their schemas. Nothing calls them. Not needed with torchvision from PyTorch's index
    of CPU builds; goes when torchvision's import survives a missing extension.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(self.library)


_kept: list[Any] = []  # a library's definitions live as long as it does


def at_start() -> None:
    """Called by the line that `python -m fa4_sglang.cpu` leaves, in every Python process of the environment."""
    # Python may read one environment's folder twice.
    if wanted() and not any(isinstance(finder, _TorchvisionSchemas) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionSchemas())


def prepare() -> Path:
    """Leave that line in the environment that runs this.

    Returns:
        The file; removing it undoes the preparation.
    """
    file = Path(sysconfig.get_path("purelib")) / STARTER
    file.write_text(f"import os; os.environ.get('{VARIABLE}') == '1' and __import__('fa4_sglang.cpu').cpu.at_start()\n")
    return file


if __name__ == "__main__":
    print(f"{prepare()}: SGLang runs on a CPU here wherever {VARIABLE}=1")
