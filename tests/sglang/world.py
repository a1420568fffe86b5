"""A server without its scheduler: SGLang's real pools, layers and batches, and all that was ever computed."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.server_args import ServerArgs
from torch import nn

CONTEXT, SLOTS = 512, 4096
Q_HEADS, KV_HEADS, DIM = 4, 2, 32


class Block(nn.Module):
    """An attention layer as models hold it, beside its sinks."""

    def __init__(self, layer_id: int, sinks: torch.Tensor | None = None, **attention: object) -> None:
        super().__init__()
        options = {"scaling": DIM**-0.5, "num_kv_heads": KV_HEADS, **attention}
        self.attn = RadixAttention(Q_HEADS, DIM, layer_id=layer_id, **options)
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)


def one_pool(blocks: list[Block], page_size: int, dtype: torch.dtype = torch.float32, **more) -> MHATokenToKVPool:
    """A pool that all layers share."""
    return MHATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=len(blocks),
        device="cpu", enable_memory_saver=False, **more,
    )  # fmt: skip


def two_pools(blocks: list[Block], page_size: int, dtype: torch.dtype = torch.float32, **more) -> SWAKVPool:
    """A pool for the layers with a sliding window and another for those without, as SGLang makes them."""
    windowed = [b.attn.layer_id for b in blocks if b.attn.sliding_window_size > 0]
    if "enable_kvcache_transpose" in inspect.signature(SWAKVPool).parameters:  # 0.5.14
        more["enable_kvcache_transpose"] = False
    return SWAKVPool(
        size=SLOTS, size_swa=SLOTS // 2, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM,
        swa_attention_layer_ids=windowed,
        full_attention_layer_ids=[b.attn.layer_id for b in blocks if b.attn.layer_id not in windowed],
        device="cpu", **more,
    )  # fmt: skip


def make_runner(
    blocks: list[Block], page_size: int = 1, *, dtype: torch.dtype = torch.float32, pool: object = None,
    device: str = "cpu", **options,
) -> SimpleNamespace:  # fmt: skip
    """What a backend reads of a ModelRunner, its parts SGLang's own."""
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    pool = pool or one_pool(blocks, page_size, dtype)
    return SimpleNamespace(
        model=model,
        device=device,
        dtype=torch.float32,
        page_size=page_size,
        req_to_token_pool=ReqToTokenPool(8, CONTEXT, device, False),
        token_to_kv_pool=pool,
        kv_cache_dtype=dtype,
        use_mla_backend=False,
        sliding_window_size=None,
        model_config=SimpleNamespace(context_len=CONTEXT, is_multimodal=False),
        server_args=ServerArgs(model_path="none", device=device, **options),
    )


@dataclass
class Request:
    """What a request has been given so far."""

    index: int
    slots: torch.Tensor
    k: list[torch.Tensor] = field(default_factory=list)  # [kv_len, KV_HEADS, DIM] a layer
    v: list[torch.Tensor] = field(default_factory=list)

    @property
    def kv_len(self) -> int:
        return self.k[0].shape[0]


def make_allocator(pool: MHATokenToKVPool | SWAKVPool, page_size: int, random: torch.Generator):
    """A server's allocator after a long day: its free pages lie in no order, and in another in either pool."""
    common = {"dtype": pool.dtype, "device": "cpu", "kvcache": pool, "need_sort": False}
    if isinstance(pool, SWAKVPool):
        allocator = SWATokenToKVPoolAllocator(pool.size, pool.size_swa, page_size, **common)
        parts = [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    elif page_size == 1:
        parts = [allocator := TokenToKVPoolAllocator(SLOTS, **common)]
    else:
        parts = [allocator := PagedTokenToKVPoolAllocator(SLOTS, page_size, **common)]
    for part in parts:
        taken = part.alloc(part.available_size()).view(-1, page_size)
        for page in torch.randperm(len(taken), generator=random):
            part.free(taken[page])
    return allocator


class World:
    """Serves steps, and checks each layer's output against dense attention over all that a request was given."""

    def __init__(self, page_size: int, blocks: list[Block] | None = None, *, hybrid: bool = False, **options) -> None:
        self.blocks = blocks or [Block(0), Block(1)]
        self.page_size = page_size
        self.pool = (two_pools if hybrid else one_pool)(self.blocks, page_size)
        self.runner = make_runner(self.blocks, page_size, pool=self.pool, **options)
        for part in (self.pool.full_kv_pool, self.pool.swa_kv_pool) if hybrid else (self.pool,):
            for buffer in part.k_buffer + part.v_buffer:
                buffer.fill_(torch.nan)  # what nobody has written must not be read
        self.runner.req_to_token_pool.req_to_token.fill_(2**31 - 1)
        self.random = torch.Generator().manual_seed(page_size)
        self.allocator = make_allocator(self.pool, page_size, self.random)
        self.backend = ATTENTION_BACKENDS["fa-cute"](self.runner)
        self.tokens = 0

    def admit(self, share: Request | None = None, prefix: int = 0) -> Request:
        """A new request, with the whole pages among the first `prefix` tokens of another in the cache."""
        self._admitted = 1 + getattr(self, "_admitted", 0)
        request = Request(self._admitted, torch.empty(0, dtype=torch.long))
        if share is None:
            request.k = request.v = [torch.empty(0, KV_HEADS, DIM) for _ in self.blocks]
        else:
            kept = prefix // self.page_size * self.page_size
            request.slots = share.slots[:kept]
            request.k, request.v = ([t[:kept] for t in of] for of in (share.k, share.v))
        return request

    def leave(self, request: Request, window: int) -> None:
        """Give the second pool's whole pages back that lie outside the window of a request's next token."""
        gone = (request.kv_len - window) // self.page_size * self.page_size
        slots = request.slots[:gone]
        rows = self.pool.translate_loc_from_full_to_swa(slots)
        self.allocator.free_swa(slots)
        for buffer in self.pool.swa_kv_pool.k_buffer + self.pool.swa_kv_pool.v_buffer:
            buffer[rows] = torch.nan

    def allocate(self, mode: ForwardMode, rows: list[tuple[Request, int]]) -> torch.Tensor:
        """Slots of a step's new tokens, from SGLang's allocator."""
        total = sum(n for _, n in rows)
        if not total:
            return torch.empty(0, dtype=torch.long)
        if self.page_size == 1:
            return self.allocator.alloc(total).long()
        old, kv_lens = (torch.tensor(lens) for lens in zip(*((r.kv_len, r.kv_len + n) for r, n in rows)))
        last = torch.tensor([int(r.slots[-1]) if len(r.slots) else -1 for r, _ in rows])
        if mode.is_decode():
            return self.allocator.alloc_decode(kv_lens, kv_lens, last).long()
        return self.allocator.alloc_extend(old, old, kv_lens, kv_lens, last, total).long()

    def forward_batch(self, mode: ForwardMode, rows: list[tuple[Request, int]], padding: int = 0) -> ForwardBatch:
        """The batch as SGLang's scheduler makes it: new tokens of each request, decode rows with one."""
        kv_lens = [r.kv_len + n for r, n in rows]
        loc = self.allocate(mode, rows)
        for (r, _), new in zip(rows, loc.split([n for _, n in rows])):
            r.slots = torch.cat([r.slots, new])
            self.runner.req_to_token_pool.write((r.index, slice(0, len(r.slots))), r.slots.to(torch.int32))
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(n for _, n in rows), dtype=torch.long),
            req_pool_indices=torch.tensor([r.index for r, _ in rows], dtype=torch.long),
            seq_lens=torch.tensor(kv_lens, dtype=torch.long),
            seq_lens_cpu=torch.tensor(kv_lens, dtype=torch.long),
            seq_lens_sum=sum(kv_lens),
            out_cache_loc=torch.cat([loc, torch.zeros(padding, dtype=torch.long)]),
        )
        if mode.is_extend():
            new, old = [n for _, n in rows], [r.kv_len for r, _ in rows]
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new, dtype=torch.int32), new
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(old, dtype=torch.int32), old
            batch.extend_num_tokens = sum(new)
        return batch

    def step(self, mode: str, *rows: tuple[Request, int], padding: int = 0, **changes: object) -> float:
        """Serve a step through all layers.

        Args:
            mode: A ForwardMode's name.
            *rows: Each request and how many new tokens it has.
            padding: Rows after the last request's.
            **changes: Set on the batch.

        Returns:
            The largest distance of an output from the reference.
        """
        batch = self.forward_batch(ForwardMode[mode], list(rows), padding)
        for name, value in changes.items():
            setattr(batch, name, value)
        self.backend.init_forward_metadata(batch)
        total = sum(n for _, n in rows)
        self.tokens += total
        old = [r.kv_len for r, _ in rows]
        worst = 0.0
        for i, block in enumerate(self.blocks):
            q = torch.randn(total + padding, Q_HEADS, DIM, generator=self.random)
            k, v = (torch.randn(total + padding, KV_HEADS, DIM, generator=self.random) for _ in range(2))
            kept = {} if block.sinks is None else {"sinks": block.sinks}
            with torch.inference_mode(), forward_context(ForwardContext(attn_backend=self.backend)):
                out = block.attn(q.flatten(1), k.flatten(1), v.flatten(1), batch, **kept)
            assert out.shape == (total + padding, Q_HEADS * DIM)
            assert not out[total:].any(), "padding rows are 0"
            at = 0
            for (r, n), before in zip(rows, old):
                mine = slice(at, at + n)
                r.k = [torch.cat([t[:before], k[mine]]) if j == i else t for j, t in enumerate(r.k)]
                r.v = [torch.cat([t[:before], v[mine]]) if j == i else t for j, t in enumerate(r.v)]
                wanted = dense(q[mine], r.k[i], r.v[i], block)
                if n:
                    far = (out[mine].view(n, Q_HEADS, DIM) - wanted).abs().nan_to_num(math.inf)  # max() drops a NaN
                    worst = max(worst, float(far.max()))
                at += n
        return worst


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    """Attention of a request's last rows over all its keys, in float64 and from the layer's own attributes."""
    layer, ratio = block.attn, q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(ratio, 1)) * layer.scaling
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    behind = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = behind < 0
    if layer.sliding_window_size >= 0:
        hidden |= behind > layer.sliding_window_size
    scores.masked_fill_(hidden, -math.inf)
    if block.sinks is not None:
        scores = torch.cat([block.sinks.double()[:, None, None].expand(-1, q.shape[0], 1), scores], -1)
    weights = torch.softmax(scores, -1)[..., -k.shape[0] :]
    return torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(ratio, 1))
