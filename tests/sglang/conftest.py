"""SGLang's own classes with a backend under them, and a dense reference that knows nothing of pages."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config):
    """Before SGLang is imported, here and in the engine's processes."""
    if config.getoption("--device") == "cpu":
        os.environ["FA4_SGLANG_CPU"] = "1"
        os.environ["TRITON_INTERPRET"] = "1"  # up to 0.5.20 its page allocators are Triton kernels
        from fa4_sglang import cpu

        cpu.at_start()
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as SGLang's own processes do: ours, by its entry point, and then the hooks


@pytest.fixture(autouse=True)
def _own_start(monkeypatch):
    """A start line and a warning of the test's own: both are said once a process."""
    from fa4_sglang import backend, compat

    backend._started.clear()
    monkeypatch.setattr(compat, "_warned", False)
