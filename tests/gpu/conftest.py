"""Tests that need a Hopper GPU; skipped elsewhere. FA4_HOPPER_OBJECTS=DIR spares them the compiling."""

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
