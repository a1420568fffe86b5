"""What SGLang finds: the name where it looks for it, and a reason where the backend cannot be had."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.server_args import prepare_server_args
from world import Block, make_runner

import fa4_sglang
from fa4_sglang import compat, plugin
from fa4_sglang.backend import FA4Backend

FLAGS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")


def parse(*flags: str):
    return prepare_server_args(["--model-path", "none", "--device", "cpu", *flags])


def test_the_entry_point_is_what_sglang_loads():
    assert load_plugins_by_group("sglang.srt.plugins")["fa_cute"] == (plugin.register, "fa4-sglang")


@pytest.mark.parametrize("flag", FLAGS)
def test_the_command_line_accepts_the_name(flag):
    assert getattr(parse(flag, "fa-cute"), flag.strip("-").replace("-", "_")) == "fa-cute"


def test_without_the_plugin_it_does_not(capsys):
    server_args.ATTENTION_BACKEND_CHOICES.remove("fa-cute")
    try:
        with pytest.raises(SystemExit):
            parse("--prefill-attention-backend", "fa-cute")
        assert "invalid choice: 'fa-cute'" in capsys.readouterr().err
    finally:
        plugin.register()


def test_registering_twice_is_registering_once():
    plugin.register()
    plugin.register()
    for choices in (
        server_args.ATTENTION_BACKEND_CHOICES,
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert choices.count("fa-cute") == 1
    assert isinstance(ATTENTION_BACKENDS["fa-cute"](make_runner([Block(0)])), FA4Backend)


@pytest.fixture
def registered_anew():
    """Registers again once the test is over."""
    yield
    plugin.register()


@pytest.mark.usefixtures("registered_anew")
def test_a_broken_install_says_so_at_once_and_again_when_it_is_asked_for(monkeypatch, caplog):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fa4_core.startup", None)
        plugin.register()
    [record] = [r for r in caplog.records if r.name == "fa4"]
    assert record.levelno == logging.ERROR
    assert "The attention backend fa-cute cannot be used: ModuleNotFoundError: " in record.getMessage()
    assert "fa4_core.startup" in record.getMessage()
    assert parse("--prefill-attention-backend", "fa-cute"), "no 'invalid choice', which would name no reason"
    with pytest.raises(RuntimeError, match="fa-cute cannot be used: ModuleNotFoundError: .*fa4_core.startup"):
        ATTENTION_BACKENDS["fa-cute"](make_runner([Block(0)]))


def test_a_broken_install_shows_through_sglangs_own_loading():
    """Which swallows what a plugin raises, and shows what it logs only where logging has been set up."""
    code = """if True:
        import sys
        from fa4_sglang import cpu
        cpu.at_start()
        sys.modules["fa4_core"] = None
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.server_args import prepare_server_args
        prepare_server_args(["--model-path", "none", "--prefill-attention-backend", "fa-cute"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "The attention backend fa-cute cannot be used: ModuleNotFoundError: No module named 'fa4_core.startup'"
    assert said in done.stderr


def test_lists_that_cannot_be_lifted_are_said_and_no_reason_to_stop(monkeypatch, caplog):
    def moved():
        raise ValueError("no such step")

    monkeypatch.setattr(compat, "lift_lists", moved)
    plugin.register()
    [record] = [r for r in caplog.records if r.name == "fa4"]
    assert record.levelno == logging.WARNING
    assert "GptOssForCausalLM" in record.getMessage()
    assert "ValueError: no such step" in record.getMessage()
    assert isinstance(ATTENTION_BACKENDS["fa-cute"](make_runner([Block(0)])), FA4Backend)


def test_an_engine_that_has_moved_on_is_named(monkeypatch):
    from sglang.srt.layers.attention import base_attn_backend

    monkeypatch.delattr(base_attn_backend, "AttentionBackend")
    monkeypatch.delitem(sys.modules, "fa4_sglang.backend")
    monkeypatch.delattr(fa4_sglang, "backend")
    with pytest.raises(
        ImportError, match=rf"does not fit SGLang {compat.version()} \(cannot import name 'AttentionBackend'"
    ):
        ATTENTION_BACKENDS["fa-cute"](make_runner([Block(0)]))


def test_registering_imports_nothing_that_the_launcher_does_not_need():
    code = """if True:
        import sys
        from fa4_sglang import cpu, plugin
        cpu.at_start()
        import sglang.launch_server
        import os
        os.environ.pop(cpu.VARIABLE)
        plugin.register()
        print([m for m in ("sglang.srt.mem_cache.memory_pool", "fa4_sglang.backend") if m in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_version_that_was_not_tested_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(compat, "version", lambda: "0.9.99")
    FA4Backend(make_runner([Block(0)])), FA4Backend(make_runner([Block(0)]))
    [record] = [r for r in caplog.records if r.name == "fa4" and r.levelno == logging.WARNING]
    assert "not tested with SGLang 0.9.99, only with 0.5.14, 0.5.16, 0.5.20, 0.5.23" in record.getMessage()


def test_this_version_was_tested(caplog):
    FA4Backend(make_runner([Block(0)]))
    assert compat.version() in compat.TESTED
    assert not [r for r in caplog.records if r.name == "fa4" and r.levelno >= logging.WARNING]
