"""What is refused when a server starts, and that the reason is given."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import memory_pool, swa_memory_pool
from sglang.srt.server_args import ServerArgs
from world import DIM, KV_HEADS, SLOTS, Block, make_runner

from fa4_core import UnsupportedError
from fa4_sglang import limits
from fa4_sglang.backend import FA4Backend


def refusal(blocks=None, **options) -> str:
    with pytest.raises(UnsupportedError) as raised:
        FA4Backend(make_runner(blocks or [Block(0)], **options))
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only, which sees keys after its own position"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional, which sees keys after"),
        ({"use_irope": True}, "chunked local attention"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "capped by 'sigmoid'"),
        ({"pos_encoding_mode": "ALIBI"}, "positions encoded in the scores (ALIBI)"),
    ],
)
def test_layers(kind, reason):
    said = refusal([Block(0), Block(1, **kind), Block(2, **kind)])
    assert reason in said
    assert "layers.1.attn and 1 more: " in said
    assert "layers.0" not in said


def test_a_temperature_by_position():
    block = Block(0)
    block.attn.xai_temperature_len = 1024  # models set it after the layer is made
    assert "temperature" in refusal([block])


def test_a_layer_that_only_a_call_shows():
    backend = FA4Backend(make_runner([Block(0)]))
    with pytest.raises(UnsupportedError, match="cross attention"):
        backend._spec(Block(0, is_cross_attention=True).attn, sinks=False)


def test_layers_that_models_from_transformers_keep_in_a_dict():
    runner = make_runner([Block(0)])
    runner.model.attention_instances = {3: Block(3, use_irope=True).attn}
    with pytest.raises(UnsupportedError, match="3: chunked local"):
        FA4Backend(runner)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dcp_size": 2}, "--dcp-size 2: decode context parallelism"),
        ({"attn_cp_size": 2}, "--attn-cp-size 2: context parallelism"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap True: "),
        ({"enable_pdmux": True}, "--enable-pdmux True: "),
        ({"enable_unified_memory": True}, "--enable-unified-memory True: "),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm LowConfidence: "),
    ],
)
def test_options(options, reason):
    assert reason in refusal(**options)


def test_the_options_are_this_versions():
    """A renamed option would be let pass unseen."""
    known = ServerArgs(model_path="none", device="cpu")
    names = [name for name, _, _ in limits.OPTIONS]
    names += ["speculative_algorithm", "speculative_attention_mode", "speculative_draft_attention_backend"]
    names += ["attention_backend", "decode_attention_backend", "enable_deterministic_inference"]
    assert [name for name in names if not hasattr(known, name)] == []
    assert all(getattr(known, name) in off for name, off, _ in limits.OPTIONS)


SPECULATION = {"speculative_algorithm": "EAGLE"}
DECODE = {"speculative_attention_mode": "decode"}
DRAFT = {"speculative_draft_attention_backend": "fa-cute"}
STOCK = {"prefill_attention_backend": "fa-cute", "decode_attention_backend": "triton"}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (STOCK, "use --speculative-attention-mode decode"),
        ({"attention_backend": "fa-cute", **DECODE}, "--decode-attention-backend"),
        (
            {**STOCK, **DECODE, "speculative_draft_attention_backend": "fa-cute"},
            "--speculative-draft-attention-backend",
        ),
    ],
)
def test_speculative_decoding_through_us(options, hint):
    said = refusal(**SPECULATION, **options)
    assert "--speculative-algorithm EAGLE: " in said
    assert hint in said


def test_speculative_decoding_beside_us_is_served():
    FA4Backend(make_runner([Block(0)], **SPECULATION, **STOCK, **DECODE))


def mha_pool(kind=memory_pool.MHATokenToKVPool, dtype=torch.bfloat16, **more):
    common = {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    return kind(size=SLOTS, page_size=16, dtype=dtype, **common, **more)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_keys(dtype):
    assert f"--kv-cache-dtype: keys and values of type {dtype} are not served" in refusal(pool=mha_pool(dtype=dtype))


def test_pools_of_other_kinds():
    class Other(memory_pool.MHATokenToKVPool):
        pass

    assert "Other: only pools of the kind MHATokenToKVPool are served" in refusal(pool=mha_pool(Other))
    mla = memory_pool.MLATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    assert "MLATokenToKVPool: only pools" in refusal(pool=mla)


def test_layouts_of_other_kinds(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "KV layout: hnd is not served" in refusal(pool=mha_pool())


def test_pools_for_sliding_windows():
    pool = object.__new__(swa_memory_pool.SWAKVPool)
    assert "SWAKVPool: a second pool for sliding-window layers; use --disable-hybrid-swa-memory" in refusal(pool=pool)


def test_latent_attention():
    runner = make_runner([Block(0)])
    runner.use_mla_backend = True
    with pytest.raises(UnsupportedError, match="MLA: latent attention"):
        FA4Backend(runner)


def test_what_no_kernel_serves(monkeypatch):
    monkeypatch.setenv("FA4_KERNEL", "none such")
    with pytest.raises(ValueError, match="none such"):
        FA4Backend(make_runner([Block(0)]))


def test_all_reasons_are_given_at_once():
    said = refusal([Block(0, use_irope=True)], dcp_size=2)
    assert "chunked local" in said
    assert "--dcp-size 2" in said
