"""The parity scenarios through SGLang's real classes: its allocators and pools, its layer, our writes and backend."""

from __future__ import annotations

import math

import pytest
import torch
from parity import record
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import nn
from world import make_runner

from fa4_core.testing.scenarios import Part, Scenario
from fa4_sglang import compat

SLOTS = 2560


class SglangPlayer:
    """A layer over a pool that is full: a request's pages are those that others give up, one by one."""

    def __init__(self, scenario: Scenario, page_size: int, device: str) -> None:
        spec, self.device = scenario.spec, device
        left, _ = spec.window
        self.layer = RadixAttention(
            spec.q_heads, spec.head_dim, scaling=spec.head_dim**-0.5, num_kv_heads=spec.kv_heads, layer_id=0,
            logit_cap=scenario.softcap, sliding_window_size=-1 if left is None else left,
        )  # fmt: skip
        sinks = None if scenario.sinks is None else scenario.sinks.to(device)
        block = nn.Module()
        block.attn, block.sinks = self.layer, sinks
        pool = MHATokenToKVPool(
            size=SLOTS, page_size=page_size, dtype=spec.kv_dtype, head_num=spec.kv_heads, head_dim=spec.head_dim,
            layer_num=1, device=device, enable_memory_saver=False,
        )  # fmt: skip
        for buffer in pool.k_buffer + pool.v_buffer:
            buffer.fill_(torch.nan)  # what nobody has written must not be read
        options = {"enable_deterministic_inference": True}  # as vLLM's side: splits depend on what is in a step
        self.runner = make_runner([block], page_size, dtype=spec.kv_dtype, pool=pool, device=device, **options)
        self.runner.dtype = spec.dtype
        self.backend = ATTENTION_BACKENDS["fa-cute"](self.runner)
        assert self.backend._specs[self.layer] == spec
        self.sinks = {} if sinks is None else {"sinks": sinks}
        self.page_size = page_size
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(SLOTS, spec.kv_dtype, device, pool, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SLOTS, page_size, spec.kv_dtype, device, pool, need_sort=False)
        held = self.allocator.alloc(SLOTS).cpu().view(-1, page_size)
        order = torch.randperm(len(held), generator=torch.Generator().manual_seed(page_size))
        self.others = list(held[order])
        self.taken: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def admit(self, request: str, length: int, shares: str | None, prefix: int) -> None:
        own = []
        for _ in range(math.ceil((length - prefix) / self.page_size)):
            self.allocator.free(self.others.pop().to(self.device))
            own.append(self.allocator.alloc(self.page_size).cpu())
        shared = self.taken[shares][:prefix] if shares else torch.empty(0, dtype=torch.int64)
        self.taken[request] = torch.cat([shared, *own])
        self.lengths[request] = length
        self.rows[request] = 1 + len(self.rows)  # row 0 of SGLang's table is for padding

    def slots(self, request: str) -> torch.Tensor:
        return self.taken[request][: self.lengths[request]].clone()

    def step(self, parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def there(numbers: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self.device)

        lens = [p.before + p.tokens for p in parts]
        for p, n in zip(parts, lens):
            self.runner.req_to_token_pool.write(
                (self.rows[p.request], slice(0, n)), self.slots(p.request)[:n].to(self.device, torch.int32)
            )
        decodes = [p.tokens == 1 and p.before > 0 for p in parts]
        mode = ForwardMode.DECODE if all(decodes) else ForwardMode.MIXED if any(decodes) else ForwardMode.EXTEND
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(parts), input_ids=there([0] * len(q)),
            req_pool_indices=there([self.rows[p.request] for p in parts]), seq_lens=there(lens),
            seq_lens_cpu=torch.tensor(lens), seq_lens_sum=sum(lens),
            out_cache_loc=torch.cat([self.slots(p.request)[p.before : n] for p, n in zip(parts, lens)]).to(self.device),
        )  # fmt: skip
        if mode.is_extend():
            new, old = [p.tokens for p in parts], [p.before for p in parts]
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = there(new, torch.int32), new
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = there(old, torch.int32), old
            batch.extend_num_tokens = sum(new)
        self.backend.init_forward_metadata(batch)
        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=self.backend)):
            rows = (t.to(self.device).flatten(1) for t in (q, k, v))
            out = self.layer(*rows, batch, **self.sinks)
        return out.view_as(q).cpu().clone()


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("on", [on for all_on in record.ON.values() for on in all_on])
def test_every_scenario_is_right_and_is_kept_for_the_other_engine(on, page_size, device, request, tmp_path):
    if on not in record.ON[device]:
        pytest.skip(f"--device is {device}")
    who = record.name("sglang", compat.version(), page_size, on)
    with record.threads(on):
        played = record.play_all(lambda s: SglangPlayer(s, page_size, device), who, page_size, device)
    assert len(played.outs) >= 40
    file = record.write(played, request.config.getoption("--parity-to") or tmp_path)
    assert record.read(file).environment == played.environment
