"""From a compiled kernel to a shared library without the DSL: gcc, the DSL's static runtime, a shim."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ....errors import bad

RUNTIME = "libcuda_dialect_runtime_static.a"  # of the DSL; the CUDA runtime is in it
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
        made.replace(into)
