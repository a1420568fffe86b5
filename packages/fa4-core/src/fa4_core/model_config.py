"""The attention layers of a model, read off its Hugging Face config.json without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .errors import UnsupportedError, bad
from .spec import FLOATS, LayerSpec

_SINKS = {"gpt_oss"}  # learned sinks show in the weights, not in the config
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "starcoder2"}  # a window in the config is every layer's
_EVERY_OTHER_SLIDES = {"gemma2"}  # beginning with the first
_LAST_SLIDE = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}  # from max_window_layers on


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
        UnsupportedError: The model has layers of another kind, or does not say which of its layers slide.
    """
    config = _Config(model / "config.json" if model.is_dir() else model)
    if config.get("kv_lora_rank"):
        raise config.unsupported("multi-head latent attention has its own backends in both engines")
    if config.get("block_configs"):
        raise config.unsupported("the layers differ in their heads")
    q_heads, count = config.number("num_attention_heads"), config.number("num_hidden_layers")
    kv_heads = config.number("num_key_value_heads", q_heads)
    head_dim = config.get("head_dim")
    if head_dim is None and config.number("hidden_size") % q_heads:
        raise config.bad("hidden_size", f"a multiple of num_attention_heads ({q_heads}), where head_dim is not given")
    head_dim = config.number("head_dim", config.number("hidden_size") // q_heads if head_dim is None else None)
    if tensor_parallel < 1 or q_heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        allowed = f"a divisor of {q_heads} q heads that divides {kv_heads} kv heads, or is a multiple of them"
        raise bad("tensor_parallel", tensor_parallel, allowed)
    found: dict[LayerSpec, int] = {}
    for slides in _sliding(config, count):
        spec = LayerSpec(
            q_heads // tensor_parallel,
            max(1, kv_heads // tensor_parallel),
            head_dim,
            dtype=dtype or config.dtype(),
            # A config's window counts the query's own key.
            window=(config.number("sliding_window") - 1 if slides else None, None),
            softcap=bool(config.get("attn_logit_softcapping")),
            sinks=config.get("model_type") in _SINKS,
        )
        found[spec] = found.get(spec, 0) + 1
    return found


def _sliding(config: _Config, count: int) -> list[bool]:
    """Of each layer, whether it attends within a window."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise config.bad("layer_types", f"a list of {count}, one a layer")
        other = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if other:
            raise config.unsupported(f"layers of kind {', '.join(other)} are not of this attention")
        return [kind == "sliding_attention" for kind in kinds]
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return [False] * count
    kind = config.get("model_type")
    if kind in _ALL_SLIDE:
        return [True] * count
    if kind in _EVERY_OTHER_SLIDES:
        return [layer % 2 == 0 for layer in range(count)]
    if kind in _LAST_SLIDE:
        first = config.number("max_window_layers", count)
        return [layer >= first for layer in range(count)]
    if config.get("sliding_window_pattern") is not None:
        every = config.number("sliding_window_pattern")  # the last of so many sees everything
        return [(layer + 1) % every != 0 for layer in range(count)]
    raise config.unsupported(f"sliding_window is set, but not which layers of a {kind} slide")


class _Config:
    """A config.json whose values are asked for by name and held against what they must be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            whole = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            was = f"{str(path)!r} ({type(error).__name__}: {error})"
            raise bad("model", was, "a config.json, or a directory that holds one") from None
        # Models of several kinds of input keep their decoder's values apart, and some of them one level up.
        nested = whole.get("text_config", {}) if isinstance(whole, dict) else None
        if not isinstance(nested, dict):
            raise bad("model", f"{str(path)!r}, which holds no object", "a config.json")
        self._values: dict[str, Any] = {**whole, **nested}

    def get(self, name: str) -> Any:
        """A value, or None where it is missing or null."""
        return self._values.get(name)

    def number(self, name: str, default: int | None = None) -> int:
        """An int of at least 1. Raises ValueError where it is none, or missing without a default."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(name, "an int of at least 1")
        return value

    def dtype(self) -> torch.dtype:
        """The type of activations. Raises ValueError where it is none that is served."""
        value = self.get("dtype") or self.get("torch_dtype") or "bfloat16"
        names = {str(d).removeprefix("torch."): d for d in FLOATS}
        if value not in names:
            raise self.bad("dtype", ", ".join(names))
        return names[value]

    def bad(self, name: str, allowed: str) -> ValueError:
        """A ValueError that names the file, the value and what is allowed."""
        return bad(f"{name} in {str(self._path)!r}", repr(self._values.get(name)), allowed)

    def unsupported(self, why: str) -> UnsupportedError:
        """An UnsupportedError about the whole model."""
        return UnsupportedError(f"the layers of {self._path}", {"all": why})
