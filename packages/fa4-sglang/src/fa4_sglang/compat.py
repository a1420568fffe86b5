"""Where SGLang's versions differ: each item says which of them need it and when it can go."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

    from .backend import FA4Backend

TESTED = ("0.5.14", "0.5.16", "0.5.20", "0.5.23")

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


def option(server_args: ServerArgs, name: str) -> Any:
    """What an option of the server has been resolved to; None where this version has no such option.

    From 0.5.20 on, SGLang leaves the options as they were given and notes beside them what it makes of them. The plain
    read goes with 0.5.16.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
    except ImportError:
        return getattr(server_args, name, None)
    return getattr(resolving_view(server_args), name, None)


def load_backend() -> type[FA4Backend]:
    """The backend's class; only a scheduler asks for it, since it imports what no other process needs.

    Raises:
        ImportError: Something that it takes from SGLang has moved or gone, named.
    """
    try:
        from .backend import FA4Backend
    except ImportError as error:
        raise ImportError(
            f"the attention backend fa-cute does not fit SGLang {version()} ({error}); tested: {', '.join(TESTED)}"
        ) from error
    return FA4Backend


def write_loc(forward_batch: ForwardBatch, layer: RadixAttention, window_slots: torch.Tensor | None) -> Any:
    """Where a layer's new keys and values go, for the pool's set_kv_buffer().

    Args:
        forward_batch: The step.
        layer: The layer; the pool knows which of its two pools that is in.
        window_slots: [rows], the step's slots in the second pool, or None where there is none.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    loc = forward_batch.out_cache_loc
    # SGLang narrows a padded step's locations after it was planned. From 0.5.16 on KVWriteLoc narrows ours with them.
    window_slots = None if window_slots is None else window_slots[: loc.shape[0]]
    # 0.5.23 made for_layer(), which also carries the batch's mark of physical ids. The rest of this goes with 0.5.20.
    if hasattr(KVWriteLoc, "for_layer"):
        return KVWriteLoc.for_layer(forward_batch, layer, swa_loc=window_slots)
    return KVWriteLoc(loc, window_slots)
