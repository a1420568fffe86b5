"""Tests that need a Hopper GPU; skipped elsewhere. FA4_HOPPER_OBJECTS names a folder of compiled kernels."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def pytest_collection_modifyitems(items):
    if not has_hopper():
        for item in items:
            if HERE in Path(item.fspath).parents:
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


def load_objects() -> None:
    """Provide every kernel found in FA4_HOPPER_OBJECTS, so that nothing is compiled here."""
    where = os.environ.get("FA4_HOPPER_OBJECTS")
    if where:
        from tvm_ffi import load_module

        from fa4_core.kernels.hopper.config import all_configs
        from fa4_core.kernels.hopper.launch import provide

        names = {config.name: config for config in all_configs()}
        for path in sorted(Path(where).glob("*.so")):
            key = names.get(path.stem, path.stem.removeprefix("fa4_hopper_"))
            provide(key, load_module(str(path))[path.stem])


if has_hopper():
    load_objects()
