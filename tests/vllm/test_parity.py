"""The parity scenarios through vLLM's real classes: its block pool, its builders' input, our write path and impl."""

from __future__ import annotations

import pytest
import torch
from parity import record
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm_steps import AS_LAYER, builder_of, empty_kv_cache

from fa4_core.testing.scenarios import Part, Scenario
from fa4_vllm import compat
from fa4_vllm.backend import FA4Backend

PAGE_SIZE, PAGES = 16, 160


class VllmPlayer:
    """A layer over a pool that has been in use: its free blocks are in no order."""

    def __init__(self, config, scenario: Scenario) -> None:
        spec = scenario.spec
        config.model_config.dtype = spec.dtype
        left, _ = spec.window
        kwargs = {} if scenario.sinks is None else {"sinks": scenario.sinks}
        self.impl = FA4Backend.get_impl_cls()(
            spec.q_heads, spec.head_dim, spec.head_dim**-0.5, spec.kv_heads, None,
            None if left is None else left + 1, "auto", scenario.softcap or None, "decoder", None, **kwargs,
        )  # fmt: skip
        assert self.impl.fa4.spec == spec
        self.builder = builder_of(config, PAGE_SIZE)
        self.kv_cache = empty_kv_cache(PAGES, PAGE_SIZE, kv_heads=spec.kv_heads, dim=spec.head_dim, dtype=spec.dtype)
        self.pool = BlockPool(PAGES, enable_caching=True, hash_block_size=PAGE_SIZE)
        used = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        order = torch.randperm(len(used), generator=torch.Generator().manual_seed(PAGE_SIZE)).tolist()
        self.pool.free_blocks([used[i] for i in order])
        self.blocks: dict[str, list] = {}
        self.lengths: dict[str, int] = {}

    def admit(self, request: str, length: int, shares: str | None, prefix: int) -> None:
        shared = self.blocks[shares][: prefix // PAGE_SIZE] if shares else []
        self.pool.touch(shared)
        self.blocks[request] = shared + self.pool.get_new_blocks(-(-length // PAGE_SIZE) - len(shared))
        self.lengths[request] = length

    def slots(self, request: str) -> torch.Tensor:
        pages = torch.tensor([block.block_id for block in self.blocks[request]])
        return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: self.lengths[request]]

    def step(self, parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([0, *(p.tokens for p in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([p.before + p.tokens for p in parts], dtype=torch.int32)
        table = torch.full((len(parts), PAGES), -1, dtype=torch.int32)
        for row, p in zip(table, parts):
            blocks = self.blocks[p.request]
            row[: len(blocks)] = torch.tensor([block.block_id for block in blocks], dtype=torch.int32)
        new = [self.slots(p.request)[p.before : p.before + p.tokens] for p in parts]
        metadata = self.builder.build(0, CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lens,
            seq_lens_cpu_upper_bound=lens.clone(), num_reqs=len(parts), num_actual_tokens=len(q),
            max_query_len=max(p.tokens for p in parts), max_seq_len=int(lens.max()), block_table_tensor=table,
            slot_mapping=torch.cat(new), causal=True,
        ))  # fmt: skip
        self.impl.do_kv_cache_update(AS_LAYER, k, v, self.kv_cache, metadata.slot_mapping)
        output = torch.full_like(q, torch.nan)
        return self.impl.forward(AS_LAYER, q, k, v, self.kv_cache, metadata, output)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_scenario_is_right_and_is_kept_for_the_other_engine(config, threads, request, tmp_path):
    who = record.name("vllm", compat.version().partition("+")[0], PAGE_SIZE, threads)
    with record.threads(threads):
        played = record.play_all(lambda scenario: VllmPlayer(config, scenario), who, PAGE_SIZE)
    assert len(played.outs) >= 40
    file = record.write(played, request.config.getoption("--parity-to") or tmp_path)
    assert record.read(file).environment == played.environment
