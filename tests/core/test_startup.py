"""What a server says at its start."""

import pytest
import torch

from fa4_core import LayerSpec, UnsupportedError, startup
from fa4_core.counters import read_published

SPEC = LayerSpec(9, 3, 64, dtype=torch.float32)


def test_one_line_says_what_serves_which_layers(caplog):
    window = LayerSpec(9, 3, 64, dtype=torch.float32, window=(127, None))
    with caplog.at_level("INFO", "fa4"):
        line = startup.start("engine", "1.2", [SPEC, window, SPEC], page_size=16, device=torch.device("cpu"))
    assert [r.getMessage() for r in caplog.records] == [line]
    assert f"in engine 1.2, torch {torch.__version__}, cpu: reference for [{SPEC} | {window}] (plain torch" in line
    assert "page size 16, not invariant" in line
    assert [p.engine for p in read_published()] == ["engine"]


def test_a_layer_that_is_not_served_stops_the_start(monkeypatch):
    monkeypatch.setattr("fa4_core.kernels.ReferenceKernel.refuses", lambda self, question: "not today")
    with pytest.raises(UnsupportedError, match="reference: not today"):
        startup.start("engine", "1.2", [SPEC], page_size=16, device=torch.device("cpu"))
    assert read_published() == []
