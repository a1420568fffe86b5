"""Compiled kernels load and check their arguments without a GPU and without the DSL, up to the launch.

FA4_HOPPER_OBJECTS names them; `nox -s kernels` runs this with each tvm-ffi that an engine pins.
"""

import os
import re
import sys

import pytest
import torch

from fa4_core.kernels.hopper.config import all_kernels
from fa4_core.kernels.hopper.objects.load import find

if not os.environ.get("FA4_HOPPER_OBJECTS"):
    pytest.skip("FA4_HOPPER_OBJECTS names no folder", allow_module_level=True)

TENSOR = r"Tensor\(\[(?P<shape>[^]]*)\], (?P<dtype>\w+)\)"
PARAMETER = re.compile(rf"\w+: (?:{TENSOR}|(?P<number>int32|float32))")


def arguments(signature):
    """CPU tensors and numbers as a kernel's own description of itself asks for them; a size that is free is 8."""
    found = []
    for m in PARAMETER.finditer(signature):
        if m["number"]:
            found.append(1 if m["number"] == "int32" else 1.0)
        else:
            shape = [int(n) if n.isdigit() else 8 for n in m["shape"].split(", ")]
            found.append(torch.zeros(shape, dtype=getattr(torch, m["dtype"])))
    return found


@pytest.mark.parametrize("name", all_kernels())
def test_a_kernel_loads_and_takes_tensors_of_a_gpu_alone(name):
    kernel = find(name)
    assert kernel is not None
    with pytest.raises(TypeError, match=r"Expects \d+ parameters") as error:
        kernel()
    wanted = arguments(str(error.value))
    assert len(wanted) == int(re.search(r"Expects (\d+) parameters", str(error.value))[1])
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        kernel(*wanted)
    assert "cutlass" not in sys.modules
