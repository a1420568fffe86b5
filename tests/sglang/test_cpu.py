"""What lets the engine run on a CPU, and that it does nothing unless asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fa4_sglang import cpu


def python(code: str, **settings: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != cpu.VARIABLE} | settings
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    return done.stdout + done.stderr


FINDERS = "import sys; print([type(f).__name__ for f in sys.meta_path], 'fa4_sglang' in sys.modules)"


@pytest.mark.parametrize("settings", [{}, {cpu.VARIABLE: "0"}, {cpu.VARIABLE: ""}])
def test_the_line_at_pythons_start_does_nothing_unless_asked(settings):
    said = python(FINDERS, **settings)
    assert "_TorchvisionSchemas" not in said
    assert "False" in said


def test_the_environment_is_prepared():
    said = python(FINDERS, **{cpu.VARIABLE: "1"})
    assert said.count("_TorchvisionSchemas") == 1, "run `python -m fa4_sglang.cpu` once in this environment"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA, so torchvision's operators load")
def test_torchvision_can_be_imported_beside_a_cpu_torch():
    code = "import torchvision; print('imported', torchvision.__version__)"
    assert "torchvision::nms does not exist" in python(code), "not needed any more: take it out"
    assert "imported" in python(code, **{cpu.VARIABLE: "1"})


def test_rotary_embedding_takes_no_kernel_from_vllm(monkeypatch):
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", False)
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.adapt()
    assert not base._is_cpu
    monkeypatch.setenv(cpu.VARIABLE, "1")
    cpu.adapt()
    assert base._is_cpu
