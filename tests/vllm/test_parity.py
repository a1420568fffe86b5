"""The parity scenarios through vLLM's real classes: its block pool, its builders' input, our write path and impl."""

from __future__ import annotations

import types

import pytest
import torch
from parity import record
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm_steps import builder_of, empty_kv_cache

from fa4_core.testing.scenarios import Part, Scenario
from fa4_vllm import compat
from fa4_vllm.backend import FA4Backend

PAGE_SIZE, PAGES = 16, 160


class VllmPlayer:
    """A layer over a pool that has been in use: its free blocks are in no order."""

    def __init__(self, config, scenario: Scenario, device: str) -> None:
        spec = scenario.spec
        self.device = device
        one = torch.ones((), device=device)
        self.layer = types.SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        config.model_config.dtype = spec.dtype
        left, _ = spec.window
        kwargs = {} if scenario.sinks is None else {"sinks": scenario.sinks.to(device)}
        self.impl = FA4Backend.get_impl_cls()(
            spec.q_heads, spec.head_dim, spec.head_dim**-0.5, spec.kv_heads, None,
            None if left is None else left + 1, "auto", scenario.softcap or None, "decoder", None, **kwargs,
        )  # fmt: skip
        assert self.impl.fa4.spec == spec
        self.builder = builder_of(config, PAGE_SIZE, device=device)
        shape = {"kv_heads": spec.kv_heads, "dim": spec.head_dim}
        self.kv_cache = empty_kv_cache(PAGES, PAGE_SIZE, **shape, dtype=spec.dtype, device=device)
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
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts, seq_lens=lens.to(self.device),
            seq_lens_cpu_upper_bound=lens, num_reqs=len(parts), num_actual_tokens=len(q),
            max_query_len=max(p.tokens for p in parts), max_seq_len=int(lens.max()),
            block_table_tensor=table.to(self.device), slot_mapping=torch.cat(new).to(self.device), causal=True,
        ))  # fmt: skip
        q, k, v = (t.to(self.device) for t in (q, k, v))
        self.impl.do_kv_cache_update(self.layer, k, v, self.kv_cache, metadata.slot_mapping)
        output = torch.full_like(q, torch.nan)
        return self.impl.forward(self.layer, q, k, v, self.kv_cache, metadata, output).cpu()


@pytest.mark.parametrize("on", [on for all_on in record.ON.values() for on in all_on])
def test_every_scenario_is_right_and_is_kept_for_the_other_engine(config, on, device, request, tmp_path, monkeypatch):
    if on not in record.ON[device]:
        pytest.skip(f"--device is {device}")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")  # or decode rows go to vLLM's own kernel on a GPU
    who = record.name("vllm", compat.version().partition("+")[0], PAGE_SIZE, on)
    with record.threads(on):
        played = record.play_all(lambda scenario: VllmPlayer(config, scenario, device), who, PAGE_SIZE, device)
    assert len(played.outs) >= 40
    file = record.write(played, request.config.getoption("--parity-to") or tmp_path)
    assert record.read(file).environment == played.environment
