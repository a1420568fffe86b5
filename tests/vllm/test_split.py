"""As on CUDA: decode rows through vLLM's own FlashAttention, prefill rows through prefill(); its real classes."""

from __future__ import annotations

import types

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm_steps import (
    AS_LAYER,
    DIM,
    HEADS,
    KV_HEADS,
    assert_is_oracle,
    builder_of,
    empty_kv_cache,
    forward,
    kv_cache_of,
    layer,
    metadata_of,
    step_of,
)

from fa4_core import counters, kernels, workspace
from fa4_vllm import backend
from fa4_vllm import split as module
from fa4_vllm.backend import FA4Backend, FA4Impl, FA4MetadataBuilder

DECODE = ([1, 1, 1], [30, 17, 50])


@pytest.fixture
def full_graphs(config, split):
    """The configuration in which the stock builder keeps what it computes ahead in one persistent buffer."""
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = 8
    return config


@pytest.fixture
def stock_builds(monkeypatch):
    """What the stock build() was asked and what it answered, call by call."""
    seen, build = [], FlashAttentionMetadataBuilder.build

    def watched(self, common_prefix_len, common_attn_metadata, fast_build=False):
        made = build(self, common_prefix_len, common_attn_metadata, fast_build)
        seen.append(types.SimpleNamespace(asked=common_attn_metadata, fast=fast_build, made=made))
        return made

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", watched)
    return seen


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("way", ["build", "build_for_cudagraph_capture", "build_for_drafting"])
def test_a_step_of_decode_rows_alone_gets_the_stock_metadata_untouched(full_graphs, stock_builds, way, padding):
    impl = layer()
    step = step_of(impl, q=DECODE[0], kv=DECODE[1])
    builder, asked = builder_of(full_graphs), metadata_of(step, padding)
    if way == "build":
        metadata = builder.build(0, asked)
    elif way == "build_for_drafting":
        metadata = builder.build_for_drafting(asked, draft_index=1)
    else:
        metadata = builder.build_for_cudagraph_capture(asked)
    [call] = stock_builds
    assert call.asked is asked
    assert metadata is call.made
    assert type(metadata) is FlashAttentionMetadata
    if way == "build_for_drafting":
        assert call.fast
        assert metadata.scheduler_metadata is None
    else:
        assert metadata.scheduler_metadata.data_ptr() == builder.scheduler_metadata.data_ptr(), "the captured buffer"
    assert_is_oracle(forward(impl, step, metadata), step)
    assert not counters.stats(), "nothing went through us"


MIXED = {
    "decode first": ([1, 1, 1, 40, 7], [30, 17, 1, 40, 50], 3),
    "interleaved": ([1, 40, 1, 7, 1], [30, 40, 17, 50, 1], 1),  # a later short row is prefill
    "one of each": ([1, 9], [20, 9], 1),
    "short prompts": ([1, 2, 2], [30, 2, 40], 1),
    "no query first": ([0, 40, 1], [5, 40, 3], 0),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("order", MIXED)
def test_a_mixed_step_calls_the_stock_build_once_for_the_decode_rows(
    full_graphs, stock_builds, split, order, padding, layout
):
    q, kv, decodes = MIXED[order]
    impl = layer()
    step = step_of(impl, q=q, kv=kv, spare_rows=padding)
    metadata = builder_of(full_graphs).build(0, metadata_of(step, padding))
    tokens = sum(q[:decodes])
    assert len(stock_builds) == (decodes > 0)
    for call in stock_builds:
        assert (call.asked.num_reqs, call.asked.num_actual_tokens, call.asked.max_query_len) == (decodes, tokens, 1)
        assert call.asked.seq_lens.tolist() == kv[:decodes]
        assert call.asked.query_start_loc.tolist() == [0, *torch.tensor(q[:decodes]).cumsum(0).tolist()]
        assert len(call.asked.block_table_tensor) == decodes
        assert len(call.asked.slot_mapping) == tokens
    for _ in range(2):  # layers
        assert_is_oracle(forward(impl, step, metadata, layout), step)
    assert split == [tokens] * 2 if decodes else not split
    counted = counters.stats()
    assert (counted["vllm.steps"], counted["vllm.scheduled_tokens"]) == (1, sum(q) - tokens)
    assert counted["prefill.query_tokens.reference"] == 2 * (sum(q) - tokens)


def test_a_step_of_prefill_rows_alone_asks_the_stock_builder_nothing(full_graphs, stock_builds, split):
    impl = layer()
    step = step_of(impl, q=[40, 7], kv=[40, 50])
    assert_is_oracle(forward(impl, step, builder_of(full_graphs).build(0, metadata_of(step))), step)
    assert not stock_builds
    assert not split


def test_lengths_that_the_host_does_not_know(config, split):
    impl = layer()
    step = step_of(impl, q=[1, 40], kv=[30, 40])
    metadata = builder_of(config).build(0, metadata_of(step, seq_lens_cpu_upper_bound=None))
    assert_is_oracle(forward(impl, step, metadata), step)


def test_draft_rows_are_decode_rows(drafting, full_graphs, stock_builds, split):
    assert FA4Backend.get_builder_cls() is module.SplitMetadataBuilder
    builder = builder_of(full_graphs)
    assert builder.reorder_batch_threshold == 4
    impl = layer()
    for q, kv in (([4, 4], [30, 17]), ([4, 1, 3], [30, 17, 3])):
        step = step_of(impl, q=q, kv=kv)
        asked = metadata_of(step)
        assert builder.build(0, asked) is stock_builds[-1].made
        assert stock_builds[-1].asked is asked
    step = step_of(impl, q=[4, 1, 3, 5, 2], kv=[30, 17, 60, 40, 2])
    metadata = builder.build(0, metadata_of(step))
    assert stock_builds[-1].asked.max_query_len == 4
    assert stock_builds[-1].asked.num_actual_tokens == 8
    assert_is_oracle(forward(impl, step, metadata), step)


def test_without_drafts_a_decode_row_has_one_query(config, split):
    assert builder_of(config).reorder_batch_threshold == 1


@pytest.mark.parametrize("asked", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_full_graphs_are_lowered_to_decode_steps(config, split, asked):
    support = FA4Backend.get_builder_cls().get_cudagraph_support(config, None)
    assert support == AttentionCGSupport.UNIFORM_BATCH
    compilation = config.compilation_config
    compilation.cudagraph_mode = asked
    lowered = compilation.resolve_cudagraph_mode_and_sizes(support, "CUSTOM")
    assert lowered.decode_mode() == CUDAGraphMode.FULL
    assert lowered.mixed_mode() != CUDAGraphMode.FULL


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("q", [[1, 1], [1, 40]])
def test_another_groups_pages(full_graphs, stock_builds, q, page_size):
    """The second group's table takes the first's place on both sides; the stock builder is not asked again."""
    kv = [30, 47]
    impl = layer()
    first, second = step_of(impl, q=q, kv=kv), step_of(impl, page_size, q=q, kv=kv, seed=5)
    builders = builder_of(full_graphs), builder_of(full_graphs, page_size)
    metadata = builders[0].build(0, metadata_of(first, padding=2))
    table = second.batch.page_table
    table = torch.cat([table, table.new_full((5, table.shape[1]), 0)])  # vLLM's buffer, longer than the step
    table = table if max(q) > 1 else table[:4]  # which the stock builder would take as it is
    moved = builders[1].update_block_table(metadata, table, torch.arange(sum(q)))
    assert len(stock_builds) == 1
    assert moved.slot_mapping.tolist() == list(range(sum(q)))
    for step, described in ((first, metadata), (second, moved)):
        assert_is_oracle(forward(impl, step, described), step)
    assert counters.stats().get("vllm.scheduled_tokens", 0) == 2 * sum(n for n in q if n > 1), "each group's"
    if max(q) > 1:
        assert (len(moved.decode.block_table), moved.decode.slot_mapping.tolist()) == (1, [0])


def test_a_mixed_step_for_drafting(full_graphs, stock_builds):
    """A drafter's first step has the target's prompts in it; the stock builder hears that it is for few layers."""
    impl = layer()
    step = step_of(impl, q=[1, 40], kv=[30, 40])
    metadata = builder_of(full_graphs).build_for_drafting(metadata_of(step), draft_index=0)
    assert [call.fast for call in stock_builds] == [True]
    assert metadata.decode.scheduler_metadata is None
    assert_is_oracle(forward(impl, step, metadata), step)


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_windows(full_graphs, window):
    """The stock builder looks for its own impls' windows, and computes ahead with them."""
    from vllm.model_executor.layers.attention import Attention

    made = Attention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, cache_config=full_graphs.cache_config, prefix="model.layers.0.attn",
        attn_backend=FA4Backend, per_layer_sliding_window=window,
    )  # fmt: skip
    assert isinstance(made.impl, module.SplitImpl)
    step = step_of(made.impl, q=[1, 40], kv=[30, 40])
    builder = builder_of(
        full_graphs, layer_names=["model.layers.0.attn"], spec=SlidingWindowSpec, sliding_window=window
    )
    assert_is_oracle(forward(made.impl, step, builder.build(0, metadata_of(step))), step)
    assert builder.aot_sliding_window == (window - 1, 0)


def test_softcap_and_sinks(config, split):
    for impl in (
        layer(logits_soft_cap=5.0),
        layer(sinks=torch.randn(HEADS, generator=torch.Generator().manual_seed(0))),
    ):
        step = step_of(impl, q=[1, 40], kv=[30, 40])
        assert_is_oracle(forward(impl, step, builder_of(config).build(0, metadata_of(step))), step)


def test_the_cache_is_written_by_the_stock_impl(config, split):
    impl = layer()
    step = step_of(impl, q=[1, 3], kv=[30, 3])
    kv_cache = kv_cache_of(step)
    key, value = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, DIM)
    mine, theirs = kv_cache.clone(), kv_cache.clone()
    slots = torch.tensor([17, -1, 3, 0])
    impl.do_kv_cache_update(AS_LAYER, key, value, theirs, slots)
    FA4Impl(HEADS, DIM, DIM**-0.5, KV_HEADS).do_kv_cache_update(AS_LAYER, key, value, mine, slots)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_memory_profiling_runs_without_a_step_and_holds_the_workspace(config, monkeypatch, split):
    """What is held then is not given to the KV pool, which vLLM sizes next; what is taken later has no room."""
    monkeypatch.setattr(workspace, "_blocks", {})
    monkeypatch.setattr(kernels.ReferenceKernel, "workspace_bytes", lambda self, question: 5000)
    impl = layer()
    for kv_cache, held in ((empty_kv_cache(5, 16), []), (torch.tensor([]), [5000])):  # graphs captured, memory measured
        output = torch.full((4, HEADS, DIM), torch.nan)
        impl.forward(None, torch.zeros(4, HEADS, DIM), None, None, kv_cache, None, output)
        assert (output == 0).all()
        assert [block.numel() for block in workspace._blocks.values()] == held


@pytest.mark.parametrize(("cuda", "invariant", "splits"), [(0, 0, False), (0, 1, False), (1, 0, True), (1, 1, False)])
def test_where_rows_are_split(monkeypatch, cuda, invariant, splits):
    """In the invariant setting a row with one query must not change kernels with the rows beside it."""
    monkeypatch.setattr(backend, "current_platform", types.SimpleNamespace(is_cuda=lambda: bool(cuda)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(invariant))
    assert backend.splits() is splits
    classes = (FA4Backend.get_impl_cls(), FA4Backend.get_builder_cls())
    assert classes == ((module.SplitImpl, module.SplitMetadataBuilder) if splits else (FA4Impl, FA4MetadataBuilder))
