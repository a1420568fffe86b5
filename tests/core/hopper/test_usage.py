"""What is read from a cubin and from the host code, of files put together here."""

import struct

import pytest

from fa4_core.kernels.hopper.objects.usage import Usage, read

STRUCT = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
STL, LDL, FFMA = 0x7387, 0x7983, 0x7223


def elf(machine, sections, flags=0x6005A04, abi=8):
    """An ELF64 file with these sections."""
    names, body, headers = b"\0", b"", [bytes(64)]
    for name, content in [*sections.items(), (".names", b"")]:
        at = len(names)
        names += name.encode() + b"\0"
        content = names if name == ".names" else content
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(content), 0, 0, 1, 0))
        body += content
    start = b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(7) + struct.pack("<HHI", 2, machine, 1)
    start += struct.pack("<QQQIHHHHHH", 0, 0, 64 + len(body), flags, 64, 0, 0, 64, len(headers), len(headers) - 1)
    return start + body + b"".join(headers)


def cubin(registers=128, frame=0, opcodes=(FFMA,), static=1024, more=None, **header):
    info = struct.pack("<BBHII", 4, 0x11, 8, 7, frame) + struct.pack("<BBH", 3, 0x55, 0)
    info += struct.pack("<BBHII", 4, 0x2F, 8, 7, registers) + struct.pack("<BBHI", 4, 0x1B, 4, 9)
    text = b"".join(struct.pack("<QQ", op | 0xABC0000, STL) for op in opcodes)
    return elf(190, {".nv.info": info, ".text.k": text, ".nv.shared.k": bytes(static), **(more or {})}, **header)


def ir(block=(512, 1, 1), dynamic=1000):
    numbers = dict(zip(("1, 0", "1, 1", "1, 2", "2"), (*block, dynamic)))
    lines = ["llvm.func @launch(%arg0: i32) {"]
    for i, (field, value) in enumerate(numbers.items()):
        lines += [
            f"  %{i} = llvm.mlir.constant({value} : i{64 if field == '2' else 32}) : i32",
            f"  %1{i} = llvm.getelementptr %99[0, {field}] : (!llvm.ptr) -> !llvm.ptr, {STRUCT}",
            f"  llvm.store %{i}, %1{i} : i{64 if field == '2' else 32}, !llvm.ptr",
        ]
    other = ["llvm.func @other(%arg0: i64) {", "  llvm.store %0, %13 : i64, !llvm.ptr", "}"]  # names of its own
    return "\n".join([*lines, "}", *other])


def inside(kernel):
    """As the DSL keeps it: in the object for the host, itself an ELF file."""
    return elf(62, {".rodata": b"before" + kernel + b"after"})


def test_what_a_kernel_takes():
    assert read(inside(cubin()), ir()) == Usage(registers=128, threads=512, shared=1000, local=0, spills=0)
    assert read(inside(cubin(registers=40)), ir((32, 4, 2), 0)) == Usage(40, 256, 0, 0, 0)


def test_spills_are_local_memory_and_the_instructions_that_use_it():
    found = read(inside(cubin(frame=88, opcodes=(FFMA, STL, LDL, LDL, FFMA))), ir())
    assert (found.local, found.spills) == (88, 3)


def test_the_drivers_share_of_shared_memory_is_left_out():
    assert read(inside(cubin(static=1024 + 64)), ir()).shared == 1000 + 64
    assert read(inside(cubin(more={".nv.shared.reserved.0": bytes(64)})), ir()).shared == 1000


def test_the_architecture_stands_where_the_abi_has_it():
    assert read(inside(cubin(abi=7, flags=0x5A0D5A)), ir()) == read(inside(cubin()), ir())


@pytest.mark.parametrize(
    ("binary", "host", "message"),
    [
        (inside(cubin(flags=0x6006402)), ir(), "the cubin is for sm_100, not sm_90"),
        (inside(cubin(abi=7, flags=0x640D64)), ir(), "the cubin is for sm_100, not sm_90"),
        (elf(62, {".rodata": b""}), ir(), "holds no cubin"),
        (inside(cubin(more={".text.second": b""})), ir(), "the cubin has 2 kernels"),
        (inside(elf(190, {".text.k": b""})), ir(), "attributes \\[\\]; expected one, with registers"),
        (inside(cubin()), "llvm.func @launch() {}", "stores no constant in fields .*cudaLaunchConfig_t"),
    ],
)
def test_what_is_not_as_known_is_an_error(binary, host, message):
    with pytest.raises(ValueError, match=message):
        read(binary, host)
