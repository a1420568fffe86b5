"""What a compiled kernel takes of an SM, read from its object: no CUDA toolkit is needed, what is read is what ships.

The numbers that ptxas settled stand in the cubin, an ELF file inside the object. What the launch asks for, threads and
dynamic shared memory, stands in the DSL's host code, read from its IR.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

EM_CUDA, ABI, TARGET = 190, 8, 90  # the machine, the byte that tells the ABI's version, the architecture
REGISTERS, FRAME = 0x2F, 0x11  # attributes of .nv.info: registers a thread, bytes of local memory a thread
SIZED = 4  # the format of an attribute followed by that many bytes
STORE_LOCAL, LOAD_LOCAL = 0x387, 0x983  # opcodes, the low 12 bits of a 16-byte instruction
SYSTEM_SHARED = 1024  # bytes of every block that the driver keeps; ptxas counts them, the limit does not

CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"  # cudaLaunchConfig_t
FIELD = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, ([\d, ]+)\] : \(!llvm\.ptr\) -> !llvm\.ptr, {CONFIG}")
STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i(?:32|64), !llvm\.ptr")
CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i(?:32|64)\)")
BLOCK, DYNAMIC = ("1, 0", "1, 1", "1, 2"), "2"  # fields of cudaLaunchConfig_t


@dataclass(frozen=True)
class Usage:
    """Of one kernel.

    Args:
        registers: A thread's, at launch.
        threads: Of a block.
        shared: Bytes of a block, the driver's left out.
        local: Bytes of a thread that do not fit into registers.
        spills: Instructions that load or store them.
    """

    registers: int
    threads: int
    shared: int
    local: int
    spills: int


def read(binary: bytes, ir: str) -> Usage:
    """Usage of the one kernel in an object.

    Args:
        binary: The object file, or the library made of it.
        ir: The DSL's IR of the host code.

    Raises:
        ValueError: Either does not look as all DSL versions that were tried make it.
    """
    registers, local, static, spills = _cubin(binary)
    threads, dynamic = _launch(ir)
    return Usage(registers, threads, dynamic + max(0, static - SYSTEM_SHARED), local, spills)


def _cubin(binary: bytes) -> tuple[int, int, int, int]:
    """(registers, local bytes, static shared bytes, local loads and stores)."""
    found: dict[int, int] = {}
    shared = spills = kernels = 0
    elf = binary[_start(binary) :]
    if _target(elf) != TARGET:
        raise ValueError(f"the cubin is for sm_{_target(elf)}, not sm_{TARGET}")
    for name, offset, size in _sections(elf):
        if name == ".nv.info":
            found = dict(_attributes(elf[offset : offset + size]))
        elif name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            shared += size
        elif name.startswith(".text."):
            kernels += 1
            words = struct.unpack_from(f"<{size // 8}Q", elf, offset)[::2]
            spills += sum((w & 0xFFF) in (STORE_LOCAL, LOAD_LOCAL) for w in words)
    if kernels != 1 or REGISTERS not in found:
        raise ValueError(
            f"the cubin has {kernels} kernels and attributes {sorted(found)}; expected one, with registers"
        )
    return found[REGISTERS], found.get(FRAME, 0), shared, spills


def _start(binary: bytes) -> int:
    """Where the cubin begins: an ELF file for a GPU, inside another one."""
    at = binary.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", binary, at + 18)[0] == EM_CUDA:
            return at
        at = binary.find(b"\x7fELF", at + 4)
    raise ValueError("the object holds no cubin")


def _target(elf: bytes) -> int:
    """The architecture, 90 for sm_90 and sm_90a; its place in the flags moved with CUDA 13."""
    flags: int = struct.unpack_from("<I", elf, 48)[0]
    return (flags >> 8 if elf[ABI] >= 8 else flags) & 0xFF


def _sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each section of an ELF64 file."""
    [table] = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        at = strings + name
        yield elf[at : elf.index(b"\0", at)].decode(), offset, size


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of each attribute of a symbol: two words, the symbol and the value."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            if size == 8:
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += size


def _launch(ir: str) -> tuple[int, int]:
    """(threads of a block, dynamic shared bytes): the constants stored into the launch's configuration."""
    constants: dict[str, int] = {}
    fields: dict[str, str] = {}
    stored: dict[str, int] = {}
    for line in ir.splitlines():
        line = line.strip()
        if line.startswith("llvm.func"):  # names begin anew
            constants, fields = {}, {}
        elif m := CONSTANT.match(line):
            constants[m[1]] = int(m[2])
        elif m := FIELD.match(line):
            fields[m[1]] = m[2]
        elif (m := STORE.match(line)) and m[2] in fields and m[1] in constants:
            stored[fields[m[2]]] = constants[m[1]]
    missing = [f for f in (*BLOCK, DYNAMIC) if f not in stored]
    if missing:
        raise ValueError(f"the host code stores no constant in fields {missing} of cudaLaunchConfig_t")
    return stored[BLOCK[0]] * stored[BLOCK[1]] * stored[BLOCK[2]], stored[DYNAMIC]
