"""Where SGLang's versions differ: each item says which of them need it and when it can go."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

TESTED = ("0.5.23",)

logger = logging.getLogger("fa4")

_warned = False


def version() -> str:
    """SGLang's version, as installed."""
    return importlib.metadata.version("sglang")


def warn_if_untested() -> None:
    """Say once a process that this SGLang is none that the backend was tested with."""
    global _warned
    if version() not in TESTED and not _warned:
        _warned = True
        logger.warning(
            "fa-cute was not tested with SGLang %s, only with %s: compare its answers with those of another attention "
            "backend before you rely on them",
            version(), ", ".join(TESTED),
        )  # fmt: skip


def require() -> None:
    """Hold what the backend takes from SGLang against what is there.

    Raises:
        ImportError: A name has moved or gone, named.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache import memory_pool

    # Releases before 0.5.14 have other hooks; this check goes when nobody can meet them any more.
    for owner, name in (
        (AttentionBackend, "init_forward_metadata_out_graph"),
        (memory_pool, "KVWriteLoc"),
        (memory_pool, "MHATokenToKVPool"),
    ):
        if not hasattr(owner, name):
            raise ImportError(f"SGLang {version()} has no {owner.__name__}.{name}; tested: {', '.join(TESTED)}")


def write_loc(forward_batch: ForwardBatch, layer: RadixAttention) -> Any:
    """Where a layer's new keys and values go, for the pool's set_kv_buffer()."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    # 0.5.23 made for_layer(), which also carries the batch's mark of physical ids. The rest of this goes with 0.5.20.
    if hasattr(KVWriteLoc, "for_layer"):
        return KVWriteLoc.for_layer(forward_batch, layer)
    return KVWriteLoc(forward_batch.out_cache_loc, None)
