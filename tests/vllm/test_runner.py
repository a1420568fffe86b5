"""What vLLM's model runners do with our builder: V1's order of a batch, V2's metadata over two KV-cache groups."""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.spec_decode.utils import extend_all_queries_by_N
from vllm.v1.worker.gpu import attn_utils
from vllm_steps import DIM, HEADS, KV_HEADS, assert_is_oracle, builder_of, forward, metadata_of, step_of

from fa4_vllm.backend import FA4Backend

FULL, SLIDING, WINDOW = "model.layers.0.attn", "model.layers.1.attn", 20


class Batch:
    """As much of V1's InputBatch as its reordering touches."""

    def __init__(self, scheduled, computed, prompt):
        self.req_ids = [str(i) for i in range(len(scheduled))]
        self.num_computed_tokens_cpu, self.num_prompt_tokens = np.array(computed), np.array(prompt)
        self.output = types.SimpleNamespace(num_scheduled_tokens=dict(zip(self.req_ids, scheduled)))

    def swap_states(self, i, j):
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        for column in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            column[[i, j]] = column[[j, i]]


def test_v1s_runner_puts_the_rows_first_that_we_call_decode(config, split):
    """Its own ordering, with the threshold that it takes from our builder; the builder's split then finds them all."""
    scheduled = [40, 1, 7, 1, 1]
    batch = Batch(scheduled, computed=[0, 29, 43, 16, 0], prompt=[40, 20, 50, 16, 1])
    builder = builder_of(config)
    reorder_batch_to_split_decodes_and_prefills(batch, batch.output, decode_threshold=builder.reorder_batch_threshold)
    order = [int(request) for request in batch.req_ids]
    assert sorted(order[:2]) == [1, 3], "the last is a prompt of one token and has nothing cached: prefill"
    q, kv = [scheduled[i] for i in order], [[40, 30, 50, 17, 1][i] for i in order]
    impl = FA4Backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS)
    step = step_of(impl, q=q, kv=kv)
    metadata = builder.build(0, metadata_of(step))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
    assert_is_oracle(forward(impl, step, metadata), step)


@pytest.fixture(params=["split", "all ours"])
def two_groups(request, config):
    """A model with a full and a sliding-window layer, each a KV-cache group, as V2's runner sets them up."""
    if request.param == "split":
        request.getfixturevalue("split")
    for name, window in ((FULL, None), (SLIDING, WINDOW)):
        Attention(
            HEADS, DIM, DIM**-0.5, KV_HEADS, cache_config=config.cache_config, prefix=name, attn_backend=FA4Backend,
            per_layer_sliding_window=window,
        )  # fmt: skip
    shape = {"block_size": 16, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec([FULL], FullAttentionSpec(**shape)),
        KVCacheGroupSpec([SLIDING], SlidingWindowSpec(**shape, sliding_window=WINDOW)),
    ]
    kv_cache_config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    attn_groups, support, sizes = attn_utils.init_attn_backend(kv_cache_config, config, torch.device("cpu"))
    assert sizes == [16, 16]
    layers = config.compilation_config.static_forward_context
    return types.SimpleNamespace(
        split=request.param == "split", kv_cache_config=kv_cache_config, attn_groups=attn_groups, support=support,
        impls={name: layers[name].impl for name in (FULL, SLIDING)},
    )  # fmt: skip


BATCHES = {
    "decode": ([1, 1], [30, 47], 0),
    "decode, padded": ([1, 1], [30, 47], 2),
    "mixed": ([1, 1, 7, 40], [30, 47, 50, 40], 0),
    "prefill": ([7, 40], [50, 40], 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_v2s_metadata_over_two_groups(two_groups, name):
    """Each group has its own pages; the host's lengths are optimistic, as they are while drafts are in flight."""
    q, kv, padding = BATCHES[name]
    steps = {layer: step_of(impl, q=q, kv=kv, seed=i) for i, (layer, impl) in enumerate(two_groups.impls.items())}
    batch = steps[FULL].batch
    starts = torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].expand(padding)])
    lens = torch.cat([batch.kv_lens, batch.kv_lens.new_zeros(padding)])
    tables = [s.batch.page_table for s in steps.values()]
    tables = [torch.cat([table, torch.zeros_like(table)])[: len(lens)] for table in tables]
    known = {"is_prefilling": torch.tensor([n > 1 for n in q] + [False] * padding)}  # from 0.32 on
    metadata = attn_utils.build_attn_metadata(
        attn_groups=two_groups.attn_groups, num_reqs=len(lens), num_tokens=sum(q), query_start_loc_gpu=starts,
        query_start_loc_cpu=starts.clone(), max_query_len=max(q), seq_lens=lens, max_seq_len=1024,
        block_tables=tables, slot_mappings=torch.zeros(2, sum(q), dtype=torch.int64),
        kv_cache_config=two_groups.kv_cache_config, seq_lens_cpu_upper_bound=lens + 3,
        **{k: v for k, v in known.items() if k in inspect.signature(attn_utils.build_attn_metadata).parameters},
    )  # fmt: skip
    for layer, step in steps.items():
        if two_groups.split and max(q) == 1:
            assert type(metadata[layer]) is FlashAttentionMetadata
        assert_is_oracle(forward(two_groups.impls[layer], step, metadata[layer]), step)


def test_v2s_runner_hears_what_graphs_hold(two_groups):
    assert two_groups.support.min_cg_support.name == ("UNIFORM_BATCH" if two_groups.split else "NEVER")


@pytest.fixture(params=["split", "all ours"])
def way(request):
    if request.param == "split":
        request.getfixturevalue("split")
    return request.param


@pytest.mark.parametrize("known", [True, False])
def test_the_hosts_bounds_reach_the_core_and_are_read_nowhere_else(config, way, known):
    """Nothing is copied from the device to make up for bounds that the runner has not."""
    q, kv = [1, 1, 7, 40], [30, 47, 50, 40]
    impl = FA4Backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS)
    changes = {} if known else {"seq_lens_cpu_upper_bound": None}
    metadata = builder_of(config).build(0, metadata_of(step_of(impl, q=q, kv=kv), **changes))
    batch, first = (metadata.prefill, 2) if way == "split" else (metadata.batch, 0)
    assert batch.host_q_lens.tolist() == q[first:]
    assert (batch.max_q_len, batch.max_kv_len) == (40, 1024)
    assert known == (batch.host_kv_lens is not None)
    if known:
        assert batch.host_kv_lens.tolist() == [n + 3 for n in kv[first:]]


def test_fields_that_are_longer_than_the_step(config, way):
    """V2's runner hands over whole buffers where it pads for graphs and this step has none."""
    impl = FA4Backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS)
    step = step_of(impl, q=[1, 40], kv=[30, 40])
    metadata = builder_of(config).build(0, metadata_of(step, padding=3, num_reqs=2))
    assert_is_oracle(forward(impl, step, metadata), step)


@pytest.mark.parametrize("tokens", [1, 3])
def test_v1s_drafter_makes_requests_longer_than_the_hosts_bounds(drafting, way, tokens):
    """By one token, or by all three where it drafts them at once; its own function leaves the bounds as they were."""
    q, kv = [1, 9, 40], [30, 50, 40]
    impl = FA4Backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS)
    target = step_of(impl, q=q, kv=kv).batch
    step = step_of(impl, q=[n + tokens for n in q], kv=[n + tokens for n in kv])
    asked = metadata_of(
        types.SimpleNamespace(batch=target),
        seq_lens_cpu_upper_bound=target.kv_lens.clone(),
        block_table_tensor=step.batch.page_table,
    )
    slots = torch.zeros(sum(q) + 3 * tokens, dtype=torch.int64)
    longer = extend_all_queries_by_N(asked, tokens, torch.arange(len(q) + 1, dtype=torch.int32), slots)
    metadata = builder_of(drafting).build_for_drafting(longer, draft_index=0)
    assert_is_oracle(forward(impl, step, metadata), step)
