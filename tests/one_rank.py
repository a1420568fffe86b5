"""A broken installation on all ranks of a server but one."""

from __future__ import annotations

from pathlib import Path

REASON = "this rank's installation is broken"
CODE = '''"""Python runs this at the start of every process."""

import os
import sys


class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.close(os.open({taken!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                raise ImportError({reason!r}) from None


sys.meta_path.insert(0, Broken())
'''


def broken_but_one(folder: Path, module: str) -> Path:
    """A folder for PYTHONPATH: the first process that imports `module` gets it, any other an ImportError."""
    folder.mkdir()
    code = CODE.format(module=module, taken=str(folder / "taken"), reason=REASON)
    (folder / "sitecustomize.py").write_text(code)
    return folder
