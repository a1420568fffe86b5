"""Where SGLang's versions differ: each item says which of them need it and when it can go."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fa4_core import UnsupportedError

from .plugin import NAME

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

    from .backend import FA4Backend

TESTED = ("0.5.14", "0.5.16", "0.5.20", "0.5.23")

# Architectures which SGLang lets through with attention backends of its own list alone, and whose attention is served.
LIFTED = (
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",  # since 0.5.23
)
# These have the same text model, and image tokens that see each other, which is not served.
LIFTED_WITHOUT_IMAGES = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
IMAGES = "image tokens that see each other; with enable_multimodal=False it is served"
# Refused here, since SGLang's lists say less: they look at --attention-backend alone, and not on every device.
REFUSED = dict.fromkeys(
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "chunked local attention, whose mask is no window"
)

logger = logging.getLogger("fa4")

_warned = False
_lifted = False


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


def declare(server_args: ServerArgs, fields: dict[str, Any]) -> None:
    """Resolve options of the server to something else; as option(), the plain write goes with 0.5.16."""
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        for name, value in fields.items():
            setattr(server_args, name, value)
    else:
        declare_resolution(server_args, "fa4-sglang", **fields)


def lift_lists() -> None:
    """Have SGLang's resolution of a model's options come by here, once a process.

    0.5.20 made that step one which plugins may wrap; the hook on a private method goes with 0.5.16. The whole of it
    goes when SGLang asks its backends what they serve, or lets names pass that it does not know.
    """
    global _lifted
    if _lifted:
        return
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
        HookRegistry.register(target, resolve_model, HookType.AROUND)
    else:
        register_resolution_hook("handle_model_specific_adjustments")(lambda args, step: resolve_model(step, args))
    _lifted = True


def resolve_model(step: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """SGLang's own step, which sees "triton" in our place where its list would refuse what is served.

    All of those lists have "triton" in all versions, and the step decides nothing else by it for these architectures.

    Args:
        step: Resolves what depends on a model.
        server_args: The server's options.

    Raises:
        UnsupportedError: This backend was asked for with an architecture whose attention is not served.
    """
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ours = [field for field in fields if option(server_args, field) == NAME]
    if not ours or not _listed(server_args):
        return step(server_args)
    declare(server_args, dict.fromkeys(ours, "triton"))
    try:
        step(server_args)
    finally:
        declare(server_args, dict.fromkeys(ours, NAME))


def _listed(server_args: ServerArgs) -> bool:
    """Whether a list of SGLang's would wrongly refuse a model. Raises where ours does, with the reason."""
    from sglang.srt.connector import ConnectorType
    from sglang.srt.utils.common import parse_connector_type

    if parse_connector_type(option(server_args, "model_path")) == ConnectorType.INSTANCE:
        return False  # only the other instance knows the model, and SGLang does not ask either
    try:
        from sglang.srt.arg_groups.overrides import model_config_of
    except ImportError:  # goes with 0.5.16
        config = server_args.get_model_config()
    else:
        config = model_config_of(server_args)
    name = config.hf_config.architectures[0]
    why = REFUSED.get(name)
    if name in LIFTED_WITHOUT_IMAGES and config.is_multimodal:
        why = IMAGES
    if why is not None:
        raise UnsupportedError(f"{name} through --prefill-attention-backend {NAME}", {NAME: why})
    return name in LIFTED + LIFTED_WITHOUT_IMAGES


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
