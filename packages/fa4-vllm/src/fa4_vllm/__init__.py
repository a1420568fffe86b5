"""fa4-core's prefill attention as a vLLM attention backend: `--attention-backend CUSTOM`."""

__version__ = "0.1.0"
