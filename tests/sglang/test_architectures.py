"""Architectures that SGLang's lists refuse: real options over real configurations, none of them with weights."""

from __future__ import annotations

import pytest
import transformers
from sglang.srt.server_args import ServerArgs
from transformers import Exaone4Config, ExaoneMoeConfig, Gemma4Config, Gemma4TextConfig, GptOssConfig, Llama4TextConfig

from fa4_core import UnsupportedError
from fa4_sglang import compat

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWS = {"sliding_window": 32, "sliding_window_pattern": 2}
CONFIGS = {
    "GptOssForCausalLM": GptOssConfig(**SMALL, num_local_experts=2, sliding_window=32),
    "Gemma4ForCausalLM": Gemma4TextConfig(**SMALL),
    "Exaone4ForCausalLM": Exaone4Config(**SMALL, **WINDOWS),
    "ExaoneMoEForCausalLM": ExaoneMoeConfig(**SMALL, **WINDOWS),
    "Llama4ForCausalLM": Llama4TextConfig(**SMALL, num_local_experts=2),
    "Gemma4ForConditionalGeneration": Gemma4Config(text_config=Gemma4TextConfig(**SMALL)),
    "LlamaForCausalLM": transformers.LlamaConfig(**SMALL),
}
LISTED = ["GptOssForCausalLM", "Gemma4ForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM"]
NAMES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
BOTH = {"attention_backend": "fa-cute"}
PREFILL = {"attention_backend": "triton", "prefill_attention_backend": "fa-cute"}
ASKED = pytest.mark.parametrize("asked", [BOTH, PREFILL], ids=["both phases", "prefill"])


@pytest.fixture
def resolve(tmp_path):
    """resolve(architecture, option=...): what SGLang makes of the options of a server with a GPU."""

    def resolve(architecture: str, **options) -> ServerArgs:
        config = CONFIGS[architecture]
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        made = ServerArgs(model_path=str(tmp_path), device="cuda", skip_tokenizer_init=True, **options)
        getattr(made, "resolve_once", lambda: None)()  # until 0.5.16 the constructor resolves
        return made

    return resolve


def backends(options: ServerArgs) -> list[str | None]:
    return [compat.option(options, name) for name in NAMES]


@ASKED
@pytest.mark.parametrize("architecture", LISTED)
def test_what_is_served_is_let_through(resolve, architecture, asked):
    assert backends(resolve(architecture, **asked)) == [asked.get(name) for name in NAMES]


@pytest.mark.parametrize("architecture", LISTED)
def test_the_lists_hold_for_every_other_backend(resolve, architecture):
    """If not, SGLang has dropped a list, and what lifts it can go."""
    with pytest.raises(AssertionError, match="flex_attention"):
        resolve(architecture, attention_backend="flex_attention")


def test_the_other_phase_still_has_to_be_on_the_list(resolve):
    with pytest.raises(AssertionError, match="Decode: flex_attention"):
        resolve("GptOssForCausalLM", prefill_attention_backend="fa-cute", attention_backend="flex_attention")


@ASKED
def test_chunked_local_attention_stays_refused(resolve, asked):
    with pytest.raises(UnsupportedError, match="Llama4ForCausalLM through .*\n.*chunked local attention"):
        resolve("Llama4ForCausalLM", **asked)


def test_without_us_nothing_is_refused_or_changed(resolve):
    assert backends(resolve("Llama4ForCausalLM"))[0] == "triton"
    assert backends(resolve("GptOssForCausalLM", attention_backend="fa3"))[0] == "fa3"


@ASKED
def test_an_architecture_on_no_list_goes_its_way(resolve, asked):
    assert backends(resolve("LlamaForCausalLM", **asked)) == [asked.get(name) for name in NAMES]


@pytest.mark.skipif(
    not hasattr(Gemma4TextConfig, "is_heterogeneous") and compat.version() == "0.5.23",
    reason="SGLang reads this configuration only with a newer transformers",
)
def test_gemma_4_is_served_without_its_images(resolve):
    with pytest.raises(UnsupportedError, match="image tokens that see each other; with enable_multimodal=False"):
        resolve("Gemma4ForConditionalGeneration", **BOTH)
    without = resolve("Gemma4ForConditionalGeneration", enable_multimodal=False, **BOTH)
    assert backends(without)[0] == "fa-cute"


@pytest.mark.parametrize(
    ("architecture", "shown"),
    [
        ("GptOssForCausalLM", ["triton", "triton", None]),
        ("LlamaForCausalLM", ["triton", "fa-cute", None]),
    ],
)
def test_another_name_is_shown_while_a_list_is_read_and_for_no_other_architecture(tmp_path, architecture, shown):
    seen = []

    def step(server_args):
        seen.append(backends(server_args))
        raise RuntimeError("refused for another reason")

    config = CONFIGS[architecture]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    # Up to 0.5.16 the constructor resolves, so this step is one more; it finds the options as they were given.
    options = ServerArgs(model_path=str(tmp_path), device="cuda", skip_tokenizer_init=True, **PREFILL)
    with pytest.raises(RuntimeError):
        compat.resolve_model(step, options)
    assert seen == [shown]
    assert backends(options) == ["triton", "fa-cute", None], "whatever came of it"


@ASKED
def test_deterministic_inference_keeps_the_radix_cache(resolve, asked):
    options = resolve("LlamaForCausalLM", enable_deterministic_inference=True, **asked)
    assert backends(options) == [asked.get(name) for name in NAMES]
    assert compat.option(options, "disable_radix_cache") is False
