"""Entry points. vLLM calls them in each of its processes, before anything is ready, so nothing heavy is imported."""

from __future__ import annotations

import os

CPU = "FA4_VLLM_CPU"
BACKEND = "fa4_vllm.backend.FA4Backend"
PLATFORM = "fa4_vllm.platform.CpuPlatform"


def register() -> None:
    """Make `--attention-backend CUSTOM` mean us; may be called any number of times (group vllm.general_plugins)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def cpu_platform() -> str | None:
    """The CPU platform that honours the flag, where FA4_VLLM_CPU=1 asks for it (group vllm.platform_plugins)."""
    return PLATFORM if os.environ.get(CPU) == "1" else None
