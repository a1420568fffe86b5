"""vLLM on a CPU, with our platform plug-in asked for; on a GPU where `--device cuda` says so."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config):
    """Before vLLM is imported, which settles its platform then."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, where a test can look
    if config.getoption("--device") == "cpu":
        os.environ["FA4_VLLM_CPU"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        import stub_ops

        stub_ops.install()


@pytest.fixture(autouse=True)
def _variables_read_anew():
    """vLLM remembers all environment variables once an engine has started in the process."""
    from vllm import envs
    from vllm.v1.attention.backends import utils

    envs.disable_envs_cache()
    if hasattr(utils, "get_kv_cache_layout"):  # 0.25.1
        utils.get_kv_cache_layout.cache_clear()


@pytest.fixture
def config(llama, device):
    """vLLM's configuration for the small model, as the current one."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config

    model = ModelConfig(model=str(llama), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    made = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=16), device_config=DeviceConfig(device))
    with set_current_vllm_config(made):
        yield made


@pytest.fixture
def split(monkeypatch):
    """Our backend as on CUDA: decode rows go to vLLM's own FlashAttention, whose kernels are plain torch here."""
    import stock_kernels

    stock_kernels.use(monkeypatch)
    monkeypatch.setattr("fa4_vllm.backend.splits", lambda: True)
    return stock_kernels.calls


@pytest.fixture
def drafting(config):
    """Three draft tokens a step, so that a decode row has up to four queries."""
    from vllm.config import SpeculativeConfig

    config.speculative_config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=3,
        target_model_config=config.model_config, target_parallel_config=config.parallel_config,
    )  # fmt: skip
    return config
