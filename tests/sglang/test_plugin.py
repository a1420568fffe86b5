"""What SGLang finds: the name where it looks for it, and a reason where the backend cannot be had."""

from __future__ import annotations

import logging

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.server_args import prepare_server_args
from world import Block, make_runner

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


def test_without_the_plugin_it_does_not(monkeypatch, capsys):
    monkeypatch.setattr(
        server_args, "ATTENTION_BACKEND_CHOICES", server_args.ATTENTION_BACKEND_CHOICES, raising=True
    )
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


def test_a_broken_install_says_so_at_once_and_again_when_it_is_asked_for(monkeypatch, caplog):
    from sglang.srt.mem_cache import memory_pool

    monkeypatch.delattr(memory_pool, "KVWriteLoc")
    try:
        plugin.register()
        [record] = [r for r in caplog.records if r.name == "fa4"]
        assert record.levelno == logging.ERROR
        reason = f"ImportError: SGLang {compat.version()} has no sglang.srt.mem_cache.memory_pool.KVWriteLoc"
        assert reason in record.getMessage()
        assert parse("--prefill-attention-backend", "fa-cute"), "no 'invalid choice', which would name no reason"
        with pytest.raises(RuntimeError, match="fa-cute cannot be used: ImportError: SGLang .* has no"):
            ATTENTION_BACKENDS["fa-cute"](make_runner([Block(0)]))
    finally:
        monkeypatch.undo()
        plugin.register()


def test_a_missing_core_says_so(monkeypatch, caplog):
    import sys

    monkeypatch.setitem(sys.modules, "fa4_core.startup", None)
    plugin.register()
    assert "fa4_core.startup" in caplog.text
    monkeypatch.undo()
    plugin.register()


def test_a_version_that_was_not_tested_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(compat, "version", lambda: "0.9.99")
    FA4Backend(make_runner([Block(0)])), FA4Backend(make_runner([Block(0)]))
    [record] = [r for r in caplog.records if r.name == "fa4" and r.levelno == logging.WARNING]
    assert "not tested with SGLang 0.9.99, only with 0.5.23" in record.getMessage()


def test_this_version_was_tested(caplog):
    FA4Backend(make_runner([Block(0)]))
    assert compat.version() in compat.TESTED
    assert not [r for r in caplog.records if r.name == "fa4" and r.levelno >= logging.WARNING]
