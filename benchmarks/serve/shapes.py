"""Models that are a shape alone: a configuration and a tokenizer; the weights are the engine's dummy loader's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TINY = {  # for a CPU: whether the benchmark runs, not how fast
    **LLAMA_3_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
}
SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TINY}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write(shape: str, tokenizer: Path, into: Path) -> Path:
    """A model's directory.

    Args:
        shape: One of SHAPES.
        tokenizer: A directory with a tokenizer's files; any whose ids fit the vocabulary.
        into: Where the directory is made.
    """
    folder = into / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)
    return folder
