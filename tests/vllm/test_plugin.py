"""Registration, and the CPU platform that is there only where asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from fa4_vllm import plugin
from fa4_vllm.backend import FA4Backend

ASKED = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}


def test_entry_points():
    [general] = entry_points(group="vllm.general_plugins", name="fa4_vllm")
    [platform] = entry_points(group="vllm.platform_plugins", name="fa4_vllm_cpu")
    assert (general.load(), platform.load()) == (plugin.register, plugin.cpu_platform)


def test_custom_is_us_however_often_we_register():
    plugin.register()
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is FA4Backend
    assert FA4Backend.get_name() == "CUSTOM"


def test_the_plug_in_loads_nothing_heavy():
    code = "import sys, fa4_vllm.plugin; print({'torch', 'vllm', 'fa4_core'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(("value", "path"), [(None, None), ("", None), ("0", None), ("1", plugin.PLATFORM)])
def test_the_platform_is_inert_unless_asked_for(monkeypatch, value, path):
    monkeypatch.delenv(plugin.CPU, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.CPU, value)
    assert plugin.cpu_platform() == path


def test_the_platform_honours_the_flag_and_nothing_else_changes():
    plugin.register()
    config = AttentionSelectorConfig(**ASKED)
    assert type(current_platform).__module__ == "fa4_vllm.platform"
    assert current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config) == plugin.BACKEND
    stock = AttentionBackendEnum.CPU_ATTN.get_path()
    for other in (None, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.FLASH_ATTN):
        assert current_platform.get_attn_backend_cls(other, config) == stock


def test_the_platform_refuses_with_all_reasons():
    config = AttentionSelectorConfig(**{**ASKED, "kv_cache_dtype": "fp8", "use_mm_prefix": True})
    with pytest.raises(ValueError, match="CUSTOM does not serve this layer: kv_cache_dtype not supported, partial"):
        current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config)


def test_our_lines_reach_vllms_log_once():
    # In a process of its own: here the root logger has pytest's handlers, and then nothing is missing.
    code = (
        "import logging, sys; logging.getLogger('vllm').addHandler(logging.StreamHandler(sys.stdout));"
        "logging.getLogger('vllm').setLevel('INFO'); from fa4_vllm import compat;"
        "compat.share_logging(); compat.share_logging(); logging.getLogger('fa4').info('a line of ours')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (shown.stdout + shown.stderr).count("a line of ours") == 1, shown
