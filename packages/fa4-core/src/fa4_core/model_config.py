"""The attention layers of a model, read off its Hugging Face config.json without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .errors import UnsupportedError, bad
from .spec import LayerSpec

_SINKS = {"GptOssForCausalLM"}  # learned sinks show in the weights, not in the config


def layers_of(model: Path, *, tensor_parallel: int = 1, dtype: torch.dtype | None = None) -> dict[LayerSpec, int]:
    """Each kind of attention layer of a decoder, with how many the model has.

    Args:
        model: A config.json, or the directory that holds it.
        tensor_parallel: Ranks that share the heads; what one rank holds is returned.
        dtype: Of activations and cache; None takes the config's.

    Returns:
        Spec to count, in the order of first appearance.

    Raises:
        ValueError: The file is no such config, or the heads do not divide over the ranks.
        UnsupportedError: The model's attention is not of this kind (MLA).
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise bad("model", f"{str(path)!r} ({error})", "a config.json, or a directory that holds one") from None
    config = config.get("text_config", config)
    if config.get("kv_lora_rank"):
        reason = "multi-head latent attention has its own backends in both engines"
        raise UnsupportedError(f"the layers of {path}", {"all": reason})
    try:
        q_heads, count = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // q_heads)
    except (KeyError, TypeError) as error:
        raise bad("model", f"{str(path)!r} without {error}", "the config of a decoder with attention layers") from None
    kv_heads = int(config.get("num_key_value_heads") or q_heads)
    if tensor_parallel < 1 or q_heads % tensor_parallel:
        raise bad("tensor_parallel", tensor_parallel, f"a divisor of the model's {q_heads} q heads")
    found: dict[LayerSpec, int] = {}
    for layer in range(count):
        spec = LayerSpec(
            q_heads // tensor_parallel,
            max(1, kv_heads // tensor_parallel),
            head_dim,
            dtype=dtype or _dtype(config),
            window=(_left(config, layer), None),
            softcap=bool(config.get("attn_logit_softcapping")),
            sinks=bool(_SINKS & set(config.get("architectures") or [])),
        )
        found[spec] = found.get(spec, 0) + 1
    return found


def _dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _left(config: dict[str, Any], layer: int) -> int | None:
    """How many keys before its own a query of this layer sees; a config's window counts the query's own key."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return int(window) - 1
