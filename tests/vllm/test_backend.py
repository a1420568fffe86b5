"""A step through vLLM's own metadata, builder and layer, held against the oracle."""

from __future__ import annotations

import types

import pytest
import stock_kernels
import torch
from vllm.model_executor.layers.attention import Attention
from vllm_steps import (
    AS_LAYER,
    DIM,
    FIVE_D,
    HEADS,
    KV_HEADS,
    Q,
    assert_is_oracle,
    builder_of,
    empty_kv_cache,
    forward,
    halves,
    layer,
    metadata_of,
    step_of,
)

from fa4_core import LayerSpec, counters, kernels, workspace
from fa4_vllm import compat, translate
from fa4_vllm.backend import FA4Backend, FA4Impl


def run(impl, step, config, layout="NHD", page_size=16, **changes):
    metadata = builder_of(config, page_size).build(0, metadata_of(step, **changes))
    assert_is_oracle(forward(impl, step, metadata, layout), step)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_mixed_step_on_every_layout_and_page_size(config, layout, page_size):
    impl = layer()
    run(impl, step_of(impl, page_size), config, layout, page_size)


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_vllms_window_counts_the_querys_own_key(config, window):
    impl = layer(sliding_window=window)
    assert impl.fa4.spec.window == (window - 1, 0)
    run(impl, step_of(impl), config)


def test_softcap_and_sinks(config):
    impl = layer(logits_soft_cap=5.0)
    assert impl.fa4.spec.softcap
    run(impl, step_of(impl), config)
    with_sinks = layer(sinks=torch.randn(HEADS, generator=torch.Generator().manual_seed(0)))
    step = step_of(with_sinks)
    assert torch.equal(step.values["sinks"], with_sinks.sinks)
    run(with_sinks, step, config)


def test_without_a_number_of_key_heads_there_are_as_many_as_query_heads(config):
    assert FA4Impl(HEADS, DIM, DIM**-0.5).num_kv_heads == HEADS


def test_the_caches_own_dtype():
    """--kv-cache-dtype; "auto" is the model's."""
    for asked, kv_dtype in (("auto", torch.float16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        spec = translate.spec(HEADS, DIM, KV_HEADS, None, asked, False, False, torch.float16)
        assert (spec.dtype, spec.kv_dtype) == (torch.float16, kv_dtype)


def test_padding_requests_and_rows(config):
    impl = layer()
    run(impl, step_of(impl, spare_rows=9), config, padding=4)


def test_lengths_that_the_host_does_not_know(config):
    impl = layer()
    run(impl, step_of(impl), config, seq_lens_cpu_upper_bound=None)


@pytest.mark.parametrize("page_size", [16, 64])
def test_another_groups_pages(config, page_size):
    """One step over two KV-cache groups: the second's table takes the first's place, and nothing is carried over."""
    impl = layer()
    first, second = step_of(impl), step_of(impl, page_size, seed=5)
    metadata = builder_of(config).build(0, metadata_of(first, padding=2))
    table = second.batch.page_table
    table = torch.cat([table, table.new_full((5, table.shape[1]), -1)])  # vLLM's buffer, longer than the step
    slots = torch.arange(sum(Q))
    moved = builder_of(config, page_size).update_block_table(metadata, table, slots)
    assert (moved.slot_mapping is slots, metadata.slot_mapping is slots) == (True, False)
    for step, described in ((first, metadata), (second, moved)):
        assert_is_oracle(forward(impl, step, described), step)
    assert counters.stats()["vllm.scheduled_tokens"] == 2 * sum(Q), "each group's"


@pytest.mark.skipif(not FIVE_D, reason="from 0.32 on vLLM itself decides how a cache lies in memory")
@pytest.mark.parametrize(("layout", "rows", "heads"), [("NHD", 2, 3), ("HND", 3, 2)])
def test_the_cache_lies_in_memory_as_asked(layout, rows, heads, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    assert FA4Backend.get_kv_cache_stride_order() == (0, 1, rows, heads, 4)
    with_layers = FA4Backend.get_kv_cache_stride_order(include_num_layers_dimension=True)  # as KV connectors ask
    assert sorted(with_layers) == [0, 1, 2, 3, 4, 5]
    assert (with_layers.index(4) < with_layers.index(3)) == (layout == "HND")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_keys_and_values_go_where_the_slots_say(config, layout):
    impl = layer()
    kv_cache = empty_kv_cache(5, 16, layout)
    slots = torch.tensor([17, -1, 70, 0])
    key, value = torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM)  # two rows of padding
    impl.do_kv_cache_update(None, key, value, kv_cache, slots)
    written = {(1, 1): 0, (4, 6): 2, (0, 0): 3}
    keys, values = halves(kv_cache)
    for (page, row), token in written.items():
        assert torch.equal(keys[page, row], key[token])
        assert torch.equal(values[page, row], value[token])
    assert int((~kv_cache.isnan()).sum()) == 3 * KV_HEADS * 2 * DIM


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_on_cuda_vllms_own_writer_is_called(config, layout, monkeypatch):
    """As in the invariant setting, where no row is the stock impl's; its writer has the arguments that it has there."""
    from vllm import _custom_ops

    writer, asked = stock_kernels.reshape_and_cache_flash, []
    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", lambda *a: (asked.append(a[5:]), writer(*a)))
    monkeypatch.setattr("fa4_vllm.backend.current_platform", types.SimpleNamespace(is_cuda=lambda: True))
    impl = FA4Impl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    key, value, slots = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, DIM), torch.tensor([17, -1, 70, 0])
    theirs, mine = empty_kv_cache(5, 16, layout), empty_kv_cache(5, 16, layout)
    impl.do_kv_cache_update(AS_LAYER, key, value, theirs, slots)
    [(kind, k_scale, v_scale)] = asked
    assert (kind, k_scale is AS_LAYER._k_scale, v_scale is AS_LAYER._v_scale) == ("auto", True, True)
    monkeypatch.undo()
    impl.do_kv_cache_update(AS_LAYER, key, value, mine, slots)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_memory_profiling_runs_without_a_step_and_holds_the_workspace(config, monkeypatch):
    """What is held then is not given to the KV pool, which vLLM sizes next; what is taken later has no room."""
    monkeypatch.setattr(workspace, "_blocks", {})
    monkeypatch.setattr(kernels.ReferenceKernel, "workspace_bytes", lambda self, question: 5000)
    impl = layer()
    for kv_cache, held in ((empty_kv_cache(5, 16), []), (torch.tensor([]), [5000])):  # graphs captured, memory measured
        output = torch.full((4, HEADS, DIM), torch.nan)
        impl.forward(None, torch.zeros(4, HEADS, DIM), None, None, kv_cache, None, output)
        assert (output == 0).all()
        assert [block.numel() for block in workspace._blocks.values()] == held


@pytest.mark.parametrize("invariant", ["0", "1"])
def test_kernels_are_asked_about_the_page_size_and_the_setting_that_will_run(config, monkeypatch, invariant):
    """By the layer, by the builder, which knows the page size, and by the workspace."""
    asked = []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    monkeypatch.setattr(kernels.ReferenceKernel, "refuses", lambda self, question: asked.append(question))
    made = Attention(
        HEADS, DIM, DIM**-0.5, cache_config=config.cache_config, prefix="a.0.attn", attn_backend=FA4Backend
    )
    builder_of(config, 64, ["a.0.attn"])
    made.impl.forward(None, None, None, None, torch.tensor([]), None, torch.empty(4, HEADS, DIM))
    assert [question.page_size for question in asked] == [None, 64, None]
    assert {question.invariant for question in asked} == {invariant == "1"}


def test_the_builder_says_what_runs_and_in_whose_log(config, monkeypatch, caplog):
    shared = []
    monkeypatch.setattr(compat, "share_logging", lambda: shared.append(True))
    monkeypatch.setattr(compat, "_warned", False)
    monkeypatch.setattr(compat, "version", lambda: "0.31.0")
    builder_of(config)
    assert shared
    assert "was not tested with vLLM 0.31.0" in caplog.text


def test_steps_are_counted_apart_from_layers(config):
    impl = layer()
    step = step_of(impl)
    metadata = builder_of(config).build(0, metadata_of(step))
    for _ in range(3):
        forward(impl, step, metadata)
    counted = counters.stats()
    assert (counted["vllm.steps"], counted["vllm.scheduled_tokens"]) == (1, sum(Q))
    assert counted["prefill.query_tokens.reference"] == 3 * sum(Q)


def test_the_engines_invariant_setting_reaches_the_core(config, monkeypatch):
    asked = []
    monkeypatch.setattr("fa4_vllm.layer.prefill", lambda *a, **kw: asked.append(kw["invariant"]))
    for setting in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", setting)
        impl = layer()
        step = step_of(impl)
        metadata = builder_of(config).build(0, metadata_of(step))
        forward(impl, step, metadata)
    assert asked == [False, True]


def test_the_attention_layer_of_a_model_takes_us(config):
    made = Attention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, cache_config=config.cache_config, prefix="model.layers.0.attn",
        attn_backend=FA4Backend,
    )  # fmt: skip
    assert isinstance(made.impl, FA4Impl)
    assert made.impl.fa4.spec == LayerSpec(HEADS, KV_HEADS, DIM, dtype=torch.float32)
