"""What a server says at its start."""

import pytest
import torch

from fa4_core import LayerSpec, Question, Target, UnsupportedError, kernels, select, startup, workspace
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


@pytest.fixture
def blocks(monkeypatch):
    """No workspace is held when a test starts."""
    monkeypatch.setattr(workspace, "_blocks", {})
    return workspace._blocks


def test_the_largest_workspace_of_all_layers_is_reserved_once(monkeypatch, blocks):
    window = LayerSpec(9, 3, 64, dtype=torch.float32, window=(127, None))
    needs = {SPEC: 3000, window: 5000}
    monkeypatch.setattr(
        kernels.ReferenceKernel, "workspace_bytes", lambda self, q: needs[q.spec] if q.page_size == 16 else 0
    )
    cpu = torch.device("cpu")
    assert startup.reserve([SPEC], page_size=1, device=cpu) == 0
    assert not blocks
    for _ in range(2):
        assert startup.reserve([SPEC, window, SPEC], page_size=16, device=cpu) == 5000
    [held] = blocks.values()
    assert held.numel() == 5000
    assert workspace.take(cpu, 4000) is held, "what was reserved is what plans take"
    assert workspace.take(cpu, 6000).numel() == 6000


def test_a_layer_that_is_not_served_reserves_nothing(monkeypatch, blocks):
    monkeypatch.setattr("fa4_core.kernels.ReferenceKernel.refuses", lambda self, question: "not today")
    with pytest.raises(UnsupportedError, match="reference: not today"):
        startup.reserve([SPEC], page_size=16, device=torch.device("cpu"))


def test_the_workspace_is_bounded(monkeypatch, blocks):
    cpu = torch.device("cpu")
    monkeypatch.setenv("FA4_WORKSPACE_MIB", "2")
    assert workspace.take(cpu, 2 << 20).numel() == 2 << 20
    with pytest.raises(ValueError, match="size was 2097153; allowed: 0 to the 2097152 bytes of FA4_WORKSPACE_MIB"):
        workspace.take(cpu, (2 << 20) + 1)
    for wrong in ("0", "513", "-1", "two", "1.5"):
        monkeypatch.setenv("FA4_WORKSPACE_MIB", wrong)
        with pytest.raises(ValueError, match=f"FA4_WORKSPACE_MIB was '{wrong}'; allowed: a whole number of 1 to 512"):
            workspace.take(cpu, 1)


@pytest.mark.parametrize(
    ("page_size", "invariant", "some"),
    [(1, False, True), (1, True, True), (None, True, True), (16, False, True), (16, True, False), (128, True, False)],
)
def test_hoppers_workspace_is_for_scattered_keys_and_for_splits(monkeypatch, page_size, invariant, some):
    monkeypatch.setenv("FA4_WORKSPACE_MIB", "64")
    question = Question(LayerSpec(8, 1, 128), page_size, Target("cuda", (9, 0)), invariant)
    assert select(question, "hopper").workspace_bytes(question) == some * (64 << 20)
