"""What is refused when a server starts, and that the reason is given."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import memory_pool, swa_memory_pool
from sglang.srt.server_args import ServerArgs
from world import SLOTS, Block, make_runner, one_pool, two_pools

from fa4_core import UnsupportedError
from fa4_sglang import compat, limits
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
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding True: "),
        ({"enable_dp_attention": True}, "--enable-dp-attention True: data-parallel attention"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2: data-parallel attention"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout True: "),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm LowConfidence: "),
    ],
)
def test_options(options, reason):
    if options.keys() <= MISSING[compat.version()]:
        pytest.skip("this version has no such option")
    assert reason in refusal(**options)


# Options that came later: each version has all the others.
MISSING = {"0.5.23": set(), "0.5.20": {"attn_dp_size", "enable_kv_cache_sharding"}}
MISSING["0.5.16"] = MISSING["0.5.20"]
MISSING["0.5.14"] = MISSING["0.5.16"] | {"dcp_size", "enable_unified_memory", "enable_page_major_kv_layout"}


def test_the_options_are_this_versions():
    """A renamed option would be let pass unseen."""
    known = ServerArgs(model_path="none", device="cpu")
    names = [name for name, _, _ in limits.OPTIONS]
    names += ["speculative_algorithm", "speculative_attention_mode", "speculative_draft_attention_backend"]
    names += ["attention_backend", "decode_attention_backend", "enable_deterministic_inference"]
    assert {name for name in names if not hasattr(known, name)} == MISSING[compat.version()]
    assert all(compat.option(known, name) in off for name, off, _ in limits.OPTIONS)


@pytest.mark.skipif(compat.version() < "0.5.20", reason="resolution still writes the options themselves")
def test_options_count_as_they_were_resolved():
    from sglang.srt.arg_groups.overrides import declare_resolution

    runner = make_runner([Block(0)])
    declare_resolution(runner.server_args, "a test", attn_cp_size=2)
    assert runner.server_args.attn_cp_size == 1
    with pytest.raises(UnsupportedError, match="--attn-cp-size 2"):
        FA4Backend(runner)


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


BLOCKS = [Block(0), Block(1, sliding_window_size=20)]
BOTH = pytest.mark.parametrize("make", [one_pool, two_pools])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_keys(make, dtype):
    said = refusal(BLOCKS, pool=make(BLOCKS, 16, dtype))
    assert f"--kv-cache-dtype: keys and values of type {dtype} are not served" in said


def test_pools_of_other_kinds():
    class Other(memory_pool.MHATokenToKVPool):
        pass

    class OtherTwo(swa_memory_pool.SWAKVPool):
        pass

    pool = one_pool(BLOCKS, 16)
    pool.__class__ = Other
    assert "Other: only pools of the kinds MHATokenToKVPool and SWAKVPool are served" in refusal(pool=pool)
    assert "Other: only pools" in refusal(pool=two_pools(BLOCKS, 16, token_to_kv_pool_class=Other))
    pool = two_pools(BLOCKS, 16)
    pool.__class__ = OtherTwo
    assert "OtherTwo: only pools" in refusal(pool=pool)
    mla = memory_pool.MLATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    assert "MLATokenToKVPool: only pools" in refusal(pool=mla)


@pytest.mark.parametrize("name", ["MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8"])
def test_quantised_pools(name):
    """Of their kind only: to make one takes a GPU."""
    kind = getattr(memory_pool, name, None)
    if (kind is None) != (name.endswith("MXFP8") and compat.version() == "0.5.14"):
        pytest.fail(f"{name} has moved")
    if kind is not None:
        assert f"{name}: only pools" in refusal(pool=object.__new__(kind))


@pytest.mark.skipif(compat.version() == "0.5.14", reason="has no such layout")
@BOTH
def test_layouts_of_other_kinds(make, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "KV layout: hnd is not served" in refusal(BLOCKS, pool=make(BLOCKS, 16))


def test_a_ring_of_slots_for_sliding_windows():
    pool = two_pools(BLOCKS, 16)
    pool.swa_req_ring_size = 32
    assert "SWAKVPool: a ring of slots a request" in refusal(BLOCKS, pool=pool)


def test_image_tokens_that_see_each_other():
    runner = make_runner([Block(0)])
    runner.model.prepare_attn_masks = lambda *_: None
    FA4Backend(runner), "its images are turned off"
    runner.model_config.is_multimodal = True
    with pytest.raises(UnsupportedError, match="Module: image tokens that see each other"):
        FA4Backend(runner)


def test_models_that_write_masks_of_their_images_have_the_name_that_shows_it():
    from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration
    from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration
    from sglang.srt.models.gemma4_unified import Gemma4UnifiedForConditionalGeneration

    for kind in (
        Gemma3ForConditionalGeneration, Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration,
    ):  # fmt: skip
        assert hasattr(kind, "prepare_attn_masks")


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
    said = refusal([Block(0, use_irope=True)], attn_cp_size=2)
    assert "chunked local" in said
    assert "--attn-cp-size 2" in said
