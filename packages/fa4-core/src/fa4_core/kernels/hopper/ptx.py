"""The few instructions that the DSL has no word for, or has one that elects a single lane."""

from __future__ import annotations

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as nvgpu_ir
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, side_effects, loc, ip):
    return llvm.inline_asm(
        result, operands, text, constraints, has_side_effects=side_effects, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def descriptor_address(atom: cute.CopyAtom, *, loc=None, ip=None) -> Int64:
    """The address of the tensor map inside a TMA copy atom, so that any lane can issue a copy of its own."""
    executable = nvgpu_ir.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    pointer = nvgpu_ir.get_tma_desc_addr(kind, executable, loc=loc, ip=ip)
    return Int64(pointer.toint(loc=loc, ip=ip))


@dsl_user_op
def tma_load_4d(dst: Int32, descriptor: Int64, c0, c1, c2, c3, barrier: Int32, *, loc=None, ip=None) -> None:
    """Issue one box from the calling lane; coordinates innermost first. Rows out of bounds arrive as zeros."""
    args = [Int32(x).ir_value(loc=loc, ip=ip) for x in (dst, c0, c1, c2, c3, barrier)]
    args.insert(1, Int64(descriptor).ir_value(loc=loc, ip=ip))
    _asm(None, args,
         "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
         " [$0], [$1, {$2, $3, $4, $5}], [$6];", "r,l,r,r,r,r,r", True, loc, ip)  # fmt: skip


@dsl_user_op
def tma_load_3d(dst: Int32, descriptor: Int64, c0, c1, c2, barrier: Int32, *, loc=None, ip=None) -> None:
    """As tma_load_4d, for a tensor of three dimensions."""
    args = [Int32(x).ir_value(loc=loc, ip=ip) for x in (dst, c0, c1, c2, barrier)]
    args.insert(1, Int64(descriptor).ir_value(loc=loc, ip=ip))
    _asm(None, args,
         "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
         " [$0], [$1, {$2, $3, $4}], [$5];", "r,l,r,r,r,r", True, loc, ip)  # fmt: skip


@dsl_user_op
def pack_half2(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:
    """Two floats rounded to a pair of 16-bit ones."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    args = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    return Int32(_asm(T.i32(), args, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", False, loc, ip))


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once."""
    args = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_asm(T.f32(), args, "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", False, loc, ip))


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2 ** x on the special function unit."""
    args = [Float32(x).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), args, "ex2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """The logarithm to base 2 on the special function unit."""
    args = [Float32(x).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), args, "lg2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def shift_left(x: Int32, by: Int32, *, loc=None, ip=None) -> Int32:
    """x << by, where a shift of 32 or more leaves nothing (LLVM's would leave anything)."""
    args = [Int32(v).ir_value(loc=loc, ip=ip) for v in (x, by)]
    return Int32(_asm(T.i32(), args, "shl.b32 $0, $1, $2;", "=r,r,r", False, loc, ip))


@dsl_user_op
def store_shared(address: Int32, offset: int, value: Int32, *, loc=None, ip=None) -> None:
    """Four bytes to shared memory, at a constant distance from an address."""
    args = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, value)]
    _asm(None, args, f"st.shared.b32 [$0+{offset}], $1;", "r,r,~{memory}", True, loc, ip)


@dsl_user_op
def store_global_pair(to: Int64, low: Float32, high: Float32, *, loc=None, ip=None) -> None:
    """Two floats to global memory."""
    args = [Int64(to).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high))]
    _asm(None, args, "st.global.v2.f32 [$0], {$1, $2};", "l,f,f,~{memory}", True, loc, ip)


@dsl_user_op
def load_shared_16_bytes(source: Int32, offset: int, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Sixteen bytes of shared memory, at a constant distance from an address."""
    args = [Int32(source).ir_value(loc=loc, ip=ip)]
    words = llvm.StructType.get_literal([T.i32()] * 4)
    found = _asm(words, args, f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", "=r,=r,=r,=r,r,~{memory}", True,
                 loc, ip)  # fmt: skip
    return tuple(Int32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def load_16_bytes_or_zeros(source: Int64, wanted: Int32, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Sixteen bytes of global memory; zeros, and nothing read, where not wanted."""
    args = [Int64(source).ir_value(loc=loc, ip=ip), Int32(wanted).ir_value(loc=loc, ip=ip)]
    words = llvm.StructType.get_literal([T.i32()] * 4)
    found = _asm(words, args,
         "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
         " @p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
         "=&r,=&r,=&r,=&r,l,r", False, loc, ip)  # fmt: skip
    return tuple(Int32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def load_4_floats_or_zeros(source: Int64, wanted: Int32, *, loc=None, ip=None) -> tuple[Float32, ...]:
    """Four floats of global memory; zeros, and nothing read, where not wanted."""
    args = [Int64(source).ir_value(loc=loc, ip=ip), Int32(wanted).ir_value(loc=loc, ip=ip)]
    floats = llvm.StructType.get_literal([T.f32()] * 4)
    found = _asm(floats, args,
         "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
         " @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
         "=&f,=&f,=&f,=&f,l,r,~{memory}", True, loc, ip)  # fmt: skip
    return tuple(Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def store_8_bytes(to: Int64, a: Int32, b: Int32, *, loc=None, ip=None) -> None:
    """Eight bytes to global memory."""
    args = [Int64(to).ir_value(loc=loc, ip=ip), *(Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b))]
    _asm(None, args, "st.global.v2.b32 [$0], {$1, $2};", "l,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def store_16_bytes(to: Int64, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None) -> None:
    """Sixteen bytes to global memory."""
    args = [Int64(to).ir_value(loc=loc, ip=ip), *(Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d))]
    _asm(None, args, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}", True, loc, ip)
