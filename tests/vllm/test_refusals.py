"""What is not served is refused when the server starts, with the reason."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig

from fa4_core import UnsupportedError, kernels
from fa4_vllm import compat
from fa4_vllm.backend import FA4Backend, FA4Impl, FA4MetadataBuilder

from test_backend import DIM, HEADS, KV_HEADS, builder_of, layer, metadata_of, step_of  # isort: skip

ARGUMENTS = (HEADS, DIM, DIM**-0.5, KV_HEADS)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi: positions encoded in the scores"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only: only a decoder's"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder: only a decoder's"),
        ({"kv_sharing_target_layer_name": "model.layers.3.attn"}, "KV sharing: .* has not been tried"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype was 'fp8'; allowed: auto, float16, bfloat16"),
        ({"chunk_lookback": 3}, "chunk_lookback: an argument that this backend does not know"),
    ],
)
def test_a_layer(config, extra, reason):
    with pytest.raises(ValueError, match=reason):
        FA4Impl(*ARGUMENTS, **extra)


def test_unknown_arguments_that_say_nothing_are_let_pass(config):
    FA4Impl(*ARGUMENTS, some_new_option=None, another=False)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_context_parallelism(config, side, monkeypatch):
    parallel = types.SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    setattr(parallel, f"{side}_context_parallel_size", 2)
    monkeypatch.setattr(config, "parallel_config", parallel)
    with pytest.raises(UnsupportedError, match=f"{side} context parallelism"):
        FA4Impl(*ARGUMENTS)


def test_a_layer_that_no_kernel_serves(config, monkeypatch):
    monkeypatch.setattr(kernels.ReferenceKernel, "refuses", lambda self, question: "not today")
    with pytest.raises(UnsupportedError, match="reference: not today"):
        FA4Impl(*ARGUMENTS)


def test_a_step_and_a_call(config):
    impl = layer()
    step = step_of(impl)
    with pytest.raises(ValueError, match="causal was False; allowed: True"):
        builder_of(config).build(0, metadata_of(step, causal=False))
    with pytest.raises(ValueError, match="output_scale or output_block_scale was given"):
        impl.forward(None, step.q, None, None, None, None, torch.empty(1), output_scale=torch.ones(1))


def test_chunked_local_attention(config):
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    fields = {"block_size": 16, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.float32}
    spec = ChunkedLocalAttentionSpec(**fields, attention_chunk_size=64)
    with pytest.raises(UnsupportedError, match="chunked local attention: its mask is no window"):
        FA4MetadataBuilder(spec, [], config, torch.device("cpu"))


SERVED = {"head_size": DIM, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}


def reasons(**change):
    asked = AttentionSelectorConfig(**{**SERVED, **change})
    return FA4Backend.validate_configuration(device_capability=None, **asked._asdict())


def test_vllms_questions():
    assert reasons() == []
    assert reasons(has_sink=True, has_sliding_window=True, use_batch_invariant=True, use_kv_connector=True) == []
    for change in (
        {"dtype": torch.float64},
        {"kv_cache_dtype": "fp8"},
        {"use_mla": True},
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"use_per_head_quant_scales": True},
        {"attn_type": "encoder_only"},
        {"use_non_causal": True},
        {"use_rswa": True},
        {"use_pcp": True},
        {"use_dcp": True},
        {"use_adaptive_verification": True},
    ):
        assert len(reasons(**change)) == 1, change


def test_float32_is_for_cpus_alone(monkeypatch):
    assert FA4Backend.supports_dtype(torch.float32)
    monkeypatch.setattr("fa4_vllm.backend.current_platform", types.SimpleNamespace(is_cpu=lambda: False))
    assert not FA4Backend.supports_dtype(torch.float32)
    assert FA4Backend.supports_dtype(torch.bfloat16)
    assert FA4Backend.supports_block_size(16)
    assert not FA4Backend.supports_block_size(1)


# Questions that the base class answers as we would: with no, or, where it says yes, with something that we serve.
INHERITED = {
    "supports_head_size": "any",
    "supports_kv_cache_dtype": "by supported_kv_cache_dtypes",
    "supports_block_size": "by get_supported_kernel_block_sizes",
    "supports_alibi_sqrt": "no",
    "supports_mm_prefix": "no",
    "supports_per_head_quant_scales": "no",
    "supports_rswa": "no",
    "supports_non_causal": "no",
    "supports_non_causal_dcp": "no",
    "supports_kv_connector": "yes: any strides are served",
    "supports_pcp": "no, by the impl",
    "supports_dcp": "no, by the impl",
    "supports_attn_type": "a decoder's alone",
    "supports_compute_capability": "yes: select() asks the kernels, and says why",
    "supports_combination": "yes",
}


def test_every_question_is_answered_on_purpose():
    """A version that asks something new fails here until somebody has thought about the answer."""
    asked = {name for name, _ in inspect.getmembers(AttentionBackend) if name.startswith("supports_")}
    own = {name for name in vars(FA4Backend) if name.startswith("supports_")}
    assert asked - own == set(INHERITED)
    assert not FA4Impl.supports_pcp
    assert not FA4Impl.supports_dcp
    assert not FA4Impl.can_return_lse_for_decode
    assert not FA4Impl.supports_quant_query_input


def test_an_untested_version_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(compat, "_warned", False)
    monkeypatch.setattr(compat, "version", lambda: "0.31.0+cpu")
    compat.warn_if_untested()
    compat.warn_if_untested()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "0.31.0+cpu, only with 0.32.0" in caplog.text
    monkeypatch.setattr(compat, "_warned", False)
    monkeypatch.setattr(compat, "version", lambda: "0.32.0+cpu")
    compat.warn_if_untested()
    assert len(caplog.records) == 1
