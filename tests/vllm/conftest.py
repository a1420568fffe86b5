"""vLLM on a CPU, with our platform plug-in asked for."""

from __future__ import annotations

import os

# Before vLLM is imported, which settles its platform then.
os.environ["FA4_VLLM_CPU"] = "1"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, where a test can look
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import pytest


@pytest.fixture
def config(llama):
    """vLLM's configuration for the small model, as the current one."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config

    model = ModelConfig(model=str(llama), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    made = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=16), device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(made):
        yield made
