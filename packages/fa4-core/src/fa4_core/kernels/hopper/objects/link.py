"""From a compiled kernel to a shared library that loads without the DSL: gcc, the DSL's static runtime, a shim.

What stays open is the CUDA runtime and tvm-ffi: torch brings the first into the process, the loader is the second.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ....errors import bad

RUNTIME = "libcuda_dialect_runtime_static.a"  # of the DSL: calls of the CUDA runtime, by names of its own
OPEN = ("cuda", "TVMFFI")  # what the names of symbols that the library does not hold begin with
# The one thing that the DSL's host code asks of the DSL's own tvm-ffi glue: to turn a CUDA error into an exception.
SHIM = r"""
#include <stdio.h>
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *unused, int code) {
  char message[64];
  snprintf(message, sizeof message, "CUDA error %d in a Hopper kernel", code);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
}
"""


def compiler() -> str:
    """The C compiler that links.

    Raises:
        ValueError: There is none.
    """
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise bad("gcc", "not found on PATH", "a C compiler, which links the kernels; Debian's package is called gcc")
    return found


def runtime() -> Path:
    """The DSL's static runtime, of the CUDA version that this DSL compiles with.

    Raises:
        ValueError: The DSL's packages do not hold it.
    """
    import cutlass
    from cutlass.base_dsl.version_info import CUDA_VERSION

    root = Path(cutlass.__file__).parents[2]  # nvidia_cutlass_dsl/<packages>/cutlass/__init__.py
    folders = [root / f"cu{CUDA_VERSION.major}" / "lib", root / "lib"]  # 4.5.2 knows only the second
    for folder in folders:
        if (folder / RUNTIME).exists():
            return folder / RUNTIME
    raise bad(RUNTIME, "not found", f"a file in one of {', '.join(map(str, folders))}: reinstall nvidia-cutlass-dsl")


def link(kernel: Path, into: Path) -> None:
    """Make a shared library of one object file.

    Args:
        kernel: The object file.
        into: The library; it appears whole or not at all.

    Raises:
        ValueError: There is no compiler, no runtime, or the link failed.
    """
    with TemporaryDirectory(dir=into.parent, prefix=".link-") as folder:
        shim, made = Path(folder) / "shim.c", Path(folder) / into.name
        shim.write_text(SHIM)
        command = [compiler(), "-shared", "-fPIC", "-O1", "-o", str(made), str(kernel), str(shim), str(runtime())]
        done = subprocess.run([*command, "-lpthread", "-ldl"], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
        listed = subprocess.run(["nm", "-D", "-P", "--undefined-only", str(made)], capture_output=True, text=True)
        foreign = unknown(listed.stdout)
        if listed.returncode or foreign:  # bound late, they would end a server at its first call
            raise ValueError(f"{into.name} asks for symbols that nothing brings: {', '.join(foreign) or listed.stderr}")
        made.replace(into)


def unknown(listing: str) -> list[str]:
    """Symbols that neither the C library, the CUDA runtime nor tvm-ffi brings, from a listing of those not defined."""
    symbols = [line.split()[:2] for line in listing.splitlines()]
    # A weak one ("w") may be missing; the C library's carry its version.
    return [name for name, kind in symbols if kind != "w" and "@GLIBC" not in name and not name.startswith(OPEN)]
