"""What is not served is refused when the server starts, with the reason."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from vllm.platforms.interface import DeviceCapability
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_steps import DIM, HEADS, KV_HEADS, builder_of, layer, metadata_of, step_of

from fa4_core import UnsupportedError, kernels
from fa4_vllm import compat
from fa4_vllm.backend import FA4Backend


@pytest.fixture(params=["all ours", "split"], autouse=True)
def _both_ways(request):
    """Everything here holds where all rows are ours and where decode rows are the stock backend's."""
    if request.param == "split":
        request.getfixturevalue("split")


def impl(**extra):
    return FA4Backend.get_impl_cls()(*ARGUMENTS, **extra)


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
        impl(**extra)


def test_unknown_arguments_that_say_nothing_are_let_pass(config):
    impl(some_new_option=None, another=False)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_context_parallelism(config, side, monkeypatch):
    parallel = types.SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    setattr(parallel, f"{side}_context_parallel_size", 2)
    monkeypatch.setattr(config, "parallel_config", parallel)
    with pytest.raises(UnsupportedError, match=f"{side} context parallelism"):
        impl()


def test_a_layer_that_no_kernel_serves(config, monkeypatch):
    monkeypatch.setattr(kernels.ReferenceKernel, "refuses", lambda self, question: "not today")
    with pytest.raises(UnsupportedError, match="reference: not today"):
        impl()


def test_a_step_and_a_call(config):
    made = layer()
    for step in (step_of(made), step_of(made, q=[1, 1], kv=[30, 40])):
        for causal in (False, torch.ones(len(step.batch.kv_lens), dtype=torch.int32)):
            with pytest.raises(ValueError, match="causal was .*; allowed: True"):
                builder_of(config).build(0, metadata_of(step, causal=causal))
    with pytest.raises(ValueError, match="output_scale or output_block_scale was given"):
        made.forward(None, step.q, None, None, None, None, torch.empty(1), output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}, "chunked local attention: its mask is no window"),
        ("FullAttentionSpec", {"attention_chunk_size": 64}, "chunked local attention: its mask is no window"),
        ("SinkFullAttentionSpec", {"sink_len": 16}, "SinkFullAttentionSpec: allowed: FullAttentionSpec, Sliding"),
        ("RSWASpec", {"rswa_window": 64}, "RSWASpec: allowed: FullAttentionSpec, SlidingWindowSpec"),
        ("EncoderOnlyAttentionSpec", {}, "EncoderOnlyAttentionSpec: allowed: FullAttentionSpec, SlidingWindowSpec"),
    ],
)
def test_a_group_whose_builder_vllm_wraps(config, kind, more, reason):
    with pytest.raises(UnsupportedError, match=reason):
        builder_of(config, spec=getattr(kv_cache_interface, kind), **more)


def test_the_builder_of_static_sinks(config):
    """It lengthens every request and leaves the host's lengths as they were, which would no longer be bounds."""
    from vllm.model_executor.layers.attention.static_sink_attention import create_static_sink_attention_backend

    wrapped = create_static_sink_attention_backend(FA4Backend, 16).get_builder_cls()
    fields = {"block_size": 16, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.float32}
    with pytest.raises(UnsupportedError, match="SinkFullAttentionSpec"):
        wrapped(kv_cache_interface.SinkFullAttentionSpec(**fields, sink_len=16), [], config, torch.device("cpu"))


def test_reference_sliding_window_attention(config, monkeypatch):
    """0.25.1 does not ask whether a backend serves it."""
    monkeypatch.setattr(type(config.model_config), "rswa_window", 128)
    with pytest.raises(UnsupportedError, match="reference sliding window attention: a prompt that stays in sight"):
        impl()


SERVED = {"head_size": DIM, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}


def reasons(capability=DeviceCapability(9, 0), **change):  # noqa: B008
    """Why our backend says no, asked as this version asks."""
    asked = {k: v for k, v in {**SERVED, **change}.items() if k in AttentionSelectorConfig._fields}
    return FA4Backend.validate_configuration(device_capability=capability, **AttentionSelectorConfig(**asked)._asdict())


def test_vllms_questions():
    assert reasons() == []
    assert reasons(has_sink=True, has_sliding_window=True, use_batch_invariant=True, use_kv_connector=True) == []
    for change in (
        {"dtype": torch.float64},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"use_mla": True},
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"use_per_head_quant_scales": True},
        {"attn_type": "encoder"},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"use_non_causal": True},
        {"use_rswa": True},  # this and those below: not asked by 0.25.1
        {"use_pcp": True},
        {"use_dcp": True},
        {"use_adaptive_verification": True},
    ):
        if set(change) <= set(AttentionSelectorConfig._fields):
            assert reasons(**change), change


def test_what_the_stock_backend_refuses_is_refused_where_it_has_a_part(monkeypatch):
    splits = FA4Backend.get_impl_cls().__name__ == "SplitImpl"
    for change in ({"head_size": 12}, {"capability": DeviceCapability(7, 5)}):
        assert bool(reasons(**change)) is splits, change
    assert bool(reasons(DeviceCapability(8, 0), has_sink=True)) is splits
    monkeypatch.setattr("vllm.v1.attention.backends.flash_attn.flash_attn_supports_sinks", lambda: False, raising=False)
    assert bool(reasons(has_sink=True)) is splits
    monkeypatch.setattr(FlashAttentionBackend, "get_preferred_block_size", classmethod(lambda cls, default: 128))
    assert FA4Backend.get_preferred_block_size(16) == (128 if splits else 16)
    sizes = staticmethod(lambda kv_cache_spec=None: [128])  # as for head dim 256 on Blackwell
    monkeypatch.setattr(FlashAttentionBackend, "get_supported_kernel_block_sizes", sizes)
    assert FA4Backend.supports_block_size(16) is not splits


def test_page_sizes_are_asked_as_each_version_asks(config, monkeypatch):
    spec = builder_of(config).kv_cache_spec
    for arguments in ((), (spec,)):
        [size] = FA4Backend.get_supported_kernel_block_sizes(*arguments)
        assert isinstance(size, MultipleOf)
    if FA4Backend.get_impl_cls().__name__ == "SplitImpl":
        ways = {"old": lambda: ["no argument"], "new": lambda kv_cache_spec=None: [kv_cache_spec]}
        for name, answer in (("old", "no argument"), ("new", spec)):
            monkeypatch.setattr(FlashAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(ways[name]))
            assert FA4Backend.get_supported_kernel_block_sizes(spec) == [answer]


@pytest.mark.parametrize("invariant", ["0", "1"])
def test_float32_and_any_page_size_are_for_cpus_alone(monkeypatch, invariant):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)  # in which no row is the stock backend's
    assert FA4Backend.supports_dtype(torch.float32)
    cuda = types.SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr("fa4_vllm.backend.current_platform", cuda)
    assert not FA4Backend.supports_dtype(torch.float32)
    assert FA4Backend.supports_dtype(torch.bfloat16)
    assert FA4Backend.supports_block_size(16)
    assert not FA4Backend.supports_block_size(1)


# Questions to a backend that its base class answers as we would: with no, or, where it says yes, with something that
# we serve. The stock backend is not our base class, so what it allows never becomes ours.
INHERITED = {
    "supports_kv_cache_update_bypass": "no",  # from 0.33 on
    "supports_kv_cache_dtype": "by supported_kv_cache_dtypes",
    "supports_block_size": "by get_supported_kernel_block_sizes",
    "supports_alibi_sqrt": "no",
    "supports_mm_prefix": "no",
    "supports_per_head_quant_scales": "no",
    "supports_rswa": "no",  # from 0.32 on
    "supports_non_causal": "no",
    "supports_non_causal_dcp": "no",  # from 0.32 on
    "supports_kv_connector": "yes: any strides are served",
    "supports_pcp": "no, by the impl",  # from 0.32 on
    "supports_dcp": "no, by the impl",  # from 0.32 on
    "supports_attn_type": "a decoder's alone",
}
# What an impl or a builder may be asked, and is allowed. Everything else must be no.
ALLOWED = {
    "supports_update_block_table": "a new page table is a new batch",
    "supports_dense_mha_prefill": "for latent attention alone",  # from 0.32 on
}


def test_every_question_to_the_backend_is_answered_on_purpose():
    """A version that asks something new fails here until somebody has thought about the answer."""
    asked = {name for name in dir(AttentionBackend) if name.startswith("supports_")}
    own = {name for name in vars(FA4Backend) if name.startswith("supports_")}
    assert not issubclass(FA4Backend, FlashAttentionBackend)
    assert asked - own <= set(INHERITED)
    if compat.version().startswith(compat.TESTED[-1]):
        assert asked - own == set(INHERITED), "and nothing is listed that is not asked"
    for name, answer in INHERITED.items():
        question = getattr(FA4Backend, name, False)
        if answer.startswith("no"):
            assert not (question() if callable(question) else question), name


def test_every_permission_of_the_impl_and_of_the_builder_is_no_unless_listed(config):
    for made in (layer(), builder_of(config)):
        permissions = [name for name in dir(made) if name.startswith(("supports_", "can_return", "need_to_return"))]
        assert permissions
        assert [name for name in permissions if getattr(made, name) and name not in ALLOWED] == []
    made = layer()
    for name in (name for name in dir(made) if name.startswith("fused_") and name.endswith("_supported")):
        question = getattr(made, name)
        assert not (question(None) if name == "fused_output_quant_supported" else question()), name


def test_cascade_attention_is_off(config):
    """Asked by 0.25.1 alone, with all that it knows of the step."""
    builder = builder_of(config)
    if hasattr(builder, "use_cascade_attention"):
        asked = {"use_alibi": False, "use_sliding_window": False, "use_local_attention": False, "dcp_world_size": 1}
        lengths = torch.ones(64, dtype=torch.int32).numpy()
        assert not builder.use_cascade_attention(
            common_prefix_len=4096, query_lens=lengths, num_query_heads=8, num_kv_heads=1, num_sms=1, **asked
        )


def test_an_untested_version_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(compat, "_warned", False)
    monkeypatch.setattr(compat, "version", lambda: "0.31.0+cpu")
    compat.warn_if_untested()
    compat.warn_if_untested()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "0.31.0+cpu, only with 0.25.1, 0.32.0, 0.33.0" in caplog.text
    monkeypatch.setattr(compat, "_warned", False)
    monkeypatch.setattr(compat, "version", lambda: "0.32.0+cpu")
    compat.warn_if_untested()
    assert len(caplog.records) == 1


def test_the_versions_that_are_tried_are_those_that_can_be_asked_for():
    text = (Path(__file__).parents[2] / "packages" / "fa4-vllm" / "pyproject.toml").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("vllm = [")]
    allowed = Requirement(line.split('"')[1]).specifier
    assert [version for version in (*compat.TESTED, "0.25.0", "0.34.0") if version in allowed] == list(compat.TESTED)
    assert compat.version().partition("+")[0] in compat.TESTED
