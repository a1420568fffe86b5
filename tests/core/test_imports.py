"""Importing fa4_core: quick, no CUDA, no engine."""

import subprocess
import sys
from pathlib import Path

import pytest

import fa4_core

IMPORT = """
import sys, time, torch
def touched(*args, **kwargs):
    raise AssertionError("CUDA was asked for something")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "_lazy_init", "init"):
    setattr(torch.cuda, name, touched)
start = time.perf_counter()
import fa4_core, fa4_core.cli, fa4_core.testing
took = time.perf_counter() - start
assert not torch.cuda.is_initialized(), "CUDA was initialised"
named = {m.split(".")[0] for m in sys.modules}
assert not named & {"vllm", "sglang", "flash_attn", "cutlass", "transformers", "pytest", "hypothesis"}, sorted(named)
print(took)
"""


def test_import_touches_no_cuda_and_no_engine_and_is_quick():
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 2


def test_no_module_of_the_core_names_an_engine():
    for path in Path(fa4_core.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in ("vllm", "sglang", "fa4_vllm", "fa4_sglang"), f"{path}: {line}"


@pytest.mark.parametrize("name", fa4_core.__all__)
def test_public_names_exist_and_say_what_they_are(name):
    assert getattr(fa4_core, name).__doc__
