"""Compile a variant with the CuTe DSL. Needs no GPU: lengths, batch size and strides are symbols."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .combine import Combine
from .config import Config
from .forward import DTYPES, Forward
from .gather import FindRuns, Gather

OPTIONS = "--enable-tvm-ffi"
n = cute.sym_int


def wide() -> Any:
    """A stride whose rows start at multiples of 16 bytes."""
    return cute.sym_int64(divisibility=8)


def fake(dtype: Any, shape: tuple, stride: tuple, align: int) -> Any:
    """A tensor of symbols."""
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)


def ints(dims: int = 1) -> Any:
    """Contiguous rows of Int32."""
    return fake(Int32, tuple(n() for _ in range(dims)), (cute.sym_int64(),) * (dims - 1) + (1,), 4)


def compile_variant(config: Config) -> Any:
    """Compile for the DSL's current target (CUTE_DSL_ARCH=sm_90a where there is no GPU)."""
    half = DTYPES[config.dtype]

    def pool(d: int) -> Any:
        return fake(half, (n(), n(), n(), d), (wide(), wide(), wide(), 1), 16)

    def rows(d: int) -> Any:
        return fake(half, (n(), n(), d), (wide(), wide(), 1), 16)

    floats = fake(Float32, (n(),), (1,), 4)
    arguments = (
        rows(config.d), pool(config.d), pool(config.d_v), rows(config.d_v),
        fake(Float32, (n(), n()), (cute.sym_int64(), cute.sym_int64()), 4), fake(Float32, (n(),), (1,), 4),
        ints(), ints(), ints(2), fake(Int32, (n(), 8), (8, 1), 16), fake(Int32, (4,), (1,), 16),
        ints(), ints(), pool(config.d), pool(config.d_v),
        fake(Float32, (n(), config.d_v), (config.d_v, 1), 16), floats,
    )  # fmt: skip
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = (Float32(1.0), Float32(1.0), *[Int32(1)] * 8)
    return cute.compile(Forward(config), *arguments, *numbers, stream, options=OPTIONS)


def compile_helper(name: str) -> Any:
    """Compile one of the small kernels: "find_runs", "gather" or "combine_<dtype>_<d_v>"."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if name == "find_runs":
        lists = [ints() for _ in range(5)]
        control = fake(Int32, (4,), (1,), 16)
        return cute.compile(FindRuns(), ints(2), *lists, control, *[Int32(1)] * 3, stream, options=OPTIONS)
    if name == "gather":

        def chunks(dims: int) -> Any:
            shape = (*(n() for _ in range(dims)), 4)
            return fake(Int32, shape, (*(cute.sym_int64(divisibility=4) for _ in range(dims - 1)), 4, 1), 16)

        return cute.compile(Gather(), chunks(4), chunks(4), chunks(3), chunks(3), ints(2), *(ints() for _ in range(5)),
                            fake(Int32, (4,), (1,), 16), *[Int32(1)] * 5, stream, options=OPTIONS)  # fmt: skip
    _, dtype, d_v = name.split("_")
    half, width = DTYPES[dtype], int(d_v)
    return cute.compile(
        Combine(width, half), fake(Float32, (n(), width), (width, 1), 16), fake(Float32, (n(),), (1,), 4),
        fake(half, (n(), n(), width), (wide(), wide(), 1), 16),
        fake(Float32, (n(), n()), (cute.sym_int64(), cute.sym_int64()), 4), fake(Float32, (n(),), (1,), 4),
        ints(), fake(Int32, (n(), 8), (8, 1), 16), fake(Int32, (4,), (1,), 16), *[Int32(1)] * 5, stream,
        options=OPTIONS,
    )  # fmt: skip
