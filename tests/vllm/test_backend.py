"""A step through vLLM's own metadata, builder and layer, held against the oracle."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from fa4_core import LayerSpec, counters
from fa4_core.testing import make_step
from fa4_vllm.backend import FA4Backend, FA4Impl, FA4MetadataBuilder

HEADS, KV_HEADS, DIM = 6, 2, 32
Q, KV = [1, 1, 40, 7, 1], [30, 17, 40, 50, 1]


def layer(**extra):
    window = extra.pop("sliding_window", None)
    softcap = extra.pop("logits_soft_cap", None)
    positional = (HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, "auto", softcap, "decoder", None)
    return FA4Impl(*positional, **extra)


def step_of(impl, page_size=16, spare_rows=0):
    return make_step(impl.spec, Q, KV, page_size=page_size, spare_rows=spare_rows, softcap=impl.softcap)


def kv_cache_of(step, layout):
    """The pages as vLLM hands them over: [pages, kv_heads, page_size, 2 * d], heads first or rows first in memory."""
    rows_first = torch.cat([step.k_pages, step.v_pages], -1)
    return rows_first.transpose(1, 2) if layout == "NHD" else rows_first.transpose(1, 2).contiguous()


def metadata_of(step, padding=0, **changes):
    """vLLM's account of the step, padded with requests of no query as full CUDA graphs have it."""
    starts = torch.cat([step.batch.cu_seqlens_q, step.batch.cu_seqlens_q[-1:].expand(padding)])
    lens = torch.cat([step.batch.kv_lens, step.batch.kv_lens.new_zeros(padding)])
    table = step.batch.page_table
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": lens,
        "seq_lens_cpu_upper_bound": lens + 3,  # optimistic, as for speculative rows
        "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(Q),
        "max_seq_len": 1024,
        "block_table_tensor": torch.cat([table, table.new_full((padding, table.shape[1]), -1)]),
        "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64),
        "causal": True,
    }
    return CommonAttentionMetadata(**{**fields, **changes})


def builder_of(config, page_size=16):
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    return FA4MetadataBuilder(spec, [], config, torch.device("cpu"))


def run(impl, step, config, layout="NHD", page_size=16, **changes):
    metadata = builder_of(config, page_size).build(0, metadata_of(step, **changes))
    output = torch.full((step.q.shape[0], HEADS, DIM), torch.nan)
    assert impl.forward(None, step.q, None, None, kv_cache_of(step, layout), metadata, output) is output
    want, _ = step.oracle()
    torch.testing.assert_close(output.double(), want, atol=2e-6, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_mixed_step_on_every_layout_and_page_size(config, layout, page_size):
    impl = layer()
    run(impl, step_of(impl, page_size), config, layout, page_size)


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_vllms_window_counts_the_querys_own_key(config, window):
    impl = layer(sliding_window=window)
    assert impl.spec.window == (window - 1, 0)
    run(impl, step_of(impl), config)


def test_softcap_and_sinks(config):
    impl = layer(logits_soft_cap=5.0)
    assert impl.spec.softcap
    run(impl, step_of(impl), config)
    with_sinks = layer(sinks=torch.randn(HEADS, generator=torch.Generator().manual_seed(0)))
    step = step_of(with_sinks)
    assert torch.equal(step.values["sinks"], with_sinks.sinks)
    run(with_sinks, step, config)


def test_padding_requests_and_rows(config):
    impl = layer()
    run(impl, step_of(impl, spare_rows=9), config, padding=4)


def test_lengths_that_the_host_does_not_know(config):
    impl = layer()
    run(impl, step_of(impl), config, seq_lens_cpu_upper_bound=None)


def test_another_groups_pages(config):
    """One step over two KV-cache groups: the second's table takes the first's place, and nothing is carried over."""
    impl = layer()
    first, second = step_of(impl), make_step(impl.spec, Q, KV, seed=5)
    builder = builder_of(config)
    metadata = builder.build(0, metadata_of(first))
    moved = builder.update_block_table(metadata, second.batch.page_table, metadata.slot_mapping)
    for step, described in ((first, metadata), (second, moved)):
        output = torch.full((step.q.shape[0], HEADS, DIM), torch.nan)
        impl.forward(None, step.q, None, None, kv_cache_of(step, "NHD"), described, output)
        torch.testing.assert_close(output.double(), step.oracle()[0], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_keys_and_values_go_where_the_slots_say(config, layout):
    impl, page_size = layer(), 16
    shape = (5, page_size, KV_HEADS, 2 * DIM) if layout == "NHD" else (5, KV_HEADS, page_size, 2 * DIM)
    memory = torch.full(shape, torch.nan)
    kv_cache = memory.transpose(1, 2) if layout == "NHD" else memory
    slots = torch.tensor([17, -1, 70, 0])
    key, value = torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM)  # two rows of padding
    impl.do_kv_cache_update(None, key, value, kv_cache, slots)
    written = {(1, 1): 0, (4, 6): 2, (0, 0): 3}
    for (page, row), token in written.items():
        assert torch.equal(kv_cache[page, :, row, :DIM], key[token])
        assert torch.equal(kv_cache[page, :, row, DIM:], value[token])
    assert int((~memory.isnan()).sum()) == 3 * KV_HEADS * 2 * DIM


def test_memory_profiling_runs_without_a_step(config):
    output = torch.full((4, HEADS, DIM), torch.nan)
    layer().forward(None, torch.zeros(4, HEADS, DIM), None, None, None, None, output)
    assert (output == 0).all()


def test_steps_are_counted_apart_from_layers(config):
    impl = layer()
    step = step_of(impl)
    metadata = builder_of(config).build(0, metadata_of(step))
    for _ in range(3):
        output = torch.empty(step.q.shape[0], HEADS, DIM)
        impl.forward(None, step.q, None, None, kv_cache_of(step, "NHD"), metadata, output)
    counted = counters.stats()
    assert (counted["vllm.steps"], counted["vllm.scheduled_tokens"]) == (1, sum(Q))
    assert counted["prefill.query_tokens.reference"] == 3 * sum(Q)


def test_the_engines_invariant_setting_reaches_the_core(config, monkeypatch):
    asked = []
    monkeypatch.setattr("fa4_vllm.backend.prefill", lambda *a, **kw: asked.append(kw["invariant"]))
    for setting in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", setting)
        impl = layer()
        step = step_of(impl)
        metadata = builder_of(config).build(0, metadata_of(step))
        output = torch.empty(step.q.shape[0], HEADS, DIM)
        impl.forward(None, step.q, None, None, kv_cache_of(step, "NHD"), metadata, output)
    assert asked == [False, True]


def test_the_attention_layer_of_a_model_takes_us(config):
    from vllm.model_executor.layers.attention import Attention

    made = Attention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, cache_config=config.cache_config, prefix="model.layers.0.attn",
        attn_backend=FA4Backend,
    )  # fmt: skip
    assert isinstance(made.impl, FA4Impl)
    assert made.impl.spec == LayerSpec(HEADS, KV_HEADS, DIM, dtype=torch.float32)
