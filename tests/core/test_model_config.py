"""Layers read off the configs of real families, and what is refused rather than guessed."""

import json

import pytest
import torch

from fa4_core import UnsupportedError
from fa4_core.model_config import layers_of

BASE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6, "hidden_size": 512}


@pytest.fixture
def windows(tmp_path):
    """windows(config, ...): each kind of layer's window left, with the number of layers."""

    def read(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return [(spec.window[0], n) for spec, n in layers_of(tmp_path, **options).items()]

    return read


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "llama"}, [(None, 6)]),
        ({"model_type": "mistral", "sliding_window": 4096}, [(4095, 6)]),
        ({"model_type": "gemma2", "sliding_window": 4096}, [(4095, 3), (None, 3)]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}, [(511, 5), (None, 1)]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, [(None, 6)]),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 4}, [(None, 4), (63, 2)]),
        ({"sliding_window": 9, "layer_types": ["full_attention"] + ["sliding_attention"] * 5}, [(None, 1), (8, 5)]),
        ({"text_config": {"num_hidden_layers": 2, "head_dim": 96}}, [(None, 2)]),
    ],
)  # fmt: skip
def test_which_layers_slide(windows, change, expected):
    assert windows(BASE | change) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention"] * 5 + ["full_attention"]}, "layers of kind linear_attention"),
        ({"layer_types": ["chunked_attention"] * 6}, "layers of kind chunked_attention"),
        ({"model_type": "unheard_of", "sliding_window": 64}, "not which layers of a unheard_of slide"),
        ({"block_configs": [{}]}, "differ in their heads"),
    ],
)
def test_what_is_not_guessed(windows, change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        windows(BASE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads in .* was 0; allowed: an int"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers in .* was 'six'"),
        ({"num_key_value_heads": [4]}, "num_key_value_heads in .* was"),
        ({"hidden_size": 500}, "hidden_size in .* was 500; allowed: a multiple"),
        ({"dtype": "float8"}, "dtype in .* was 'float8'; allowed: bfloat16"),
        ({"layer_types": "full_attention"}, "layer_types in .* allowed: a list of 6"),
        ({"text_config": None}, "holds no object"),
    ],
)
def test_broken_values_are_named(windows, change, message):
    with pytest.raises(ValueError, match=message):
        windows(BASE | change)


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", "3"])
def test_broken_files_are_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"model was .*config.json"):
        layers_of(tmp_path)


def test_ranks_share_the_heads(windows, tmp_path):
    windows(BASE | {"torch_dtype": "float16"})
    [spec] = layers_of(tmp_path, tensor_parallel=8)
    assert (spec.q_heads, spec.kv_heads, spec.dtype) == (1, 1, torch.float16)
    with pytest.raises(ValueError, match="tensor_parallel was 3; allowed: a divisor of 8 q heads"):
        layers_of(tmp_path, tensor_parallel=3)
    windows(BASE | {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 768})
    with pytest.raises(ValueError, match="tensor_parallel was 4"):
        layers_of(tmp_path, tensor_parallel=4)
