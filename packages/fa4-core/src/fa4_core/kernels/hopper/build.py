"""Compile a variant with the CuTe DSL. Needs no GPU: lengths, batch size and strides are symbols."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import Config
from .forward import DTYPES, Forward

OPTIONS = "--enable-tvm-ffi"


def compile_variant(config: Config) -> Any:
    """Compile for the DSL's current target (CUTE_DSL_ARCH=sm_90a where there is no GPU)."""
    n = cute.sym_int

    def wide() -> Any:
        return cute.sym_int64(divisibility=8)  # a stride whose rows start at multiples of 16 bytes

    half = DTYPES[config.dtype]

    def fake(dtype: Any, shape: tuple, stride: tuple, align: int) -> Any:
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=align)

    pages, page_size, kv_heads = n(), n(), n()
    q = fake(half, (n(), n(), config.d), (wide(), wide(), 1), 16)
    k = fake(half, (pages, page_size, kv_heads, config.d), (wide(), wide(), wide(), 1), 16)
    v = fake(half, (n(), n(), kv_heads, config.d_v), (wide(), wide(), wide(), 1), 16)
    out = fake(half, (n(), n(), config.d_v), (wide(), wide(), 1), 16)
    lse = fake(Float32, (n(), n()), (cute.sym_int64(), cute.sym_int64()), 4)
    sinks = fake(Float32, (n(),), (1,), 4)
    cu, kv = fake(Int32, (n(),), (1,), 4), fake(Int32, (n(),), (1,), 4)
    table = fake(Int32, (n(), n()), (cute.sym_int64(), 1), 4)
    work, control = fake(Int32, (n(), 4), (4, 1), 16), fake(Int32, (2,), (1,), 4)
    numbers = (Float32(1.0), Float32(1.0), *[Int32(1)] * 7)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Forward(config), q, k, v, out, lse, sinks, cu, kv, table, work, control, *numbers, stream, options=OPTIONS
    )
