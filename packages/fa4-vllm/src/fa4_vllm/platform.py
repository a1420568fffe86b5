"""vLLM's CPU platform, with a user's choice of attention backend honoured."""

from __future__ import annotations

from typing import Any

from vllm.platforms import cpu
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class CpuPlatform(cpu.CpuPlatform):
    """The stock platform takes CPU_ATTN whatever was asked for; this one takes CUSTOM where it was asked for."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        """The backend's class path.

        Raises:
            ValueError: CUSTOM was asked for and does not serve this layer; all reasons listed, as on CUDA.
        """
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        backend = selected_backend.get_class()
        # A CPU has no compute capability, and ours does not look at it.
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"attention backend CUSTOM does not serve this layer: {', '.join(reasons)}")
        return selected_backend.get_path()
