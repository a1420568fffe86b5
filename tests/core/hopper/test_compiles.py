"""What is compiled is counted, once for each kernel."""

import sys
import types

from fa4_core import counters
from fa4_core.kernels.hopper import launch


def test_a_kernel_is_compiled_once_and_counted(monkeypatch):
    asked = []
    fake = types.SimpleNamespace(compile_helper=lambda key: asked.append(key) or print)
    monkeypatch.setitem(sys.modules, "fa4_core.kernels.hopper.build", fake)
    monkeypatch.setattr(launch, "_functions", {})
    for key in ("gather", "gather", "find_runs"):
        launch.function_of(key)
    assert asked == ["gather", "find_runs"]
    assert counters.stats() == {"compiles.hopper": 2}
