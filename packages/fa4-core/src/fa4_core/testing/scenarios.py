"""Small services of a layer that any engine can play: who comes when, with how many tokens, sharing whose keys.

Parity between engines is tested with them, bit for bit. An engine decides where keys lie and how a step is described;
the numbers are the scenario's, and so is what the answer should be.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from ..batch import PrefillBatch
from ..spec import LayerSpec
from .oracle import attention

SHARED_PAGE = 64
"""Shared prefixes are multiples of it, so that they are whole pages of every page size up to it that divides it."""


@dataclass(frozen=True)
class Row:
    """New tokens of a request in a step.

    Args:
        request: Its name.
        tokens: How many; 0 is a request that waits.
        shares: In a request's first row, whose cached keys it begins with.
        prefix: How many of them, a multiple of SHARED_PAGE.
    """

    request: str
    tokens: int
    shares: str | None = None
    prefix: int = 0


@dataclass(frozen=True)
class Part:
    """A row as an engine meets it: `tokens` new ones behind `before` cached ones."""

    request: str
    before: int
    tokens: int


class Player(Protocol):
    """One engine's real classes over one layer."""

    def admit(self, request: str, length: int, shares: str | None, prefix: int) -> None:
        """A request begins that will have `length` tokens, the first `prefix` of them in the cache of another."""

    def step(self, parts: list[Part], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v of the parts' tokens, [tokens, kv_heads, d], and give out for q: [tokens, q_heads, d_v]."""

    def slots(self, request: str) -> torch.Tensor:
        """Where the request's keys lie, int64 [tokens]: page * page_size + row."""


@dataclass(frozen=True)
class Scenario:
    """A layer and the steps that it serves.

    Args:
        name: Of both.
        spec: The layer.
        steps: Of each, its rows in order.
        softcap: Above 0 where spec.softcap is on.
    """

    name: str
    spec: LayerSpec
    steps: tuple[tuple[Row, ...], ...]
    softcap: float = 0.0
    _numbers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Tokens that each request has in the end."""
        lengths: dict[str, int] = {}
        for row in (row for step in self.steps for row in step):
            lengths[row.request] = lengths.get(row.request, row.prefix) + row.tokens
        return lengths

    @cached_property
    def sinks(self) -> torch.Tensor | None:
        """float32 [q_heads], or None."""
        return torch.randn(self.spec.q_heads, generator=self._random("sinks")) if self.spec.sinks else None

    def numbers(self, request: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of all tokens of a request, [length, heads, d] each, the same in whatever batch it is served."""
        made = self._numbers.get(request)
        if made is None:
            spec, random, n = self.spec, self._random(request), self.lengths[request]

            def draw(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
                return torch.randn(n, heads, dim, generator=random).to(dtype)

            made = (
                draw(spec.q_heads, spec.head_dim, spec.dtype),
                draw(spec.kv_heads, spec.head_dim, spec.kv_dtype),
                draw(spec.kv_heads, spec.head_dim_v, spec.kv_dtype),
            )
            first = next(row for step in self.steps for row in step if row.request == request)
            if first.shares is not None:
                for mine, theirs in zip(made[1:], self.numbers(first.shares)[1:]):
                    mine[: first.prefix] = theirs[: first.prefix]
            self._numbers[request] = made
        return made

    def digest(self) -> str:
        """SHA-256 of the steps and of every number."""
        sha = hashlib.sha256(repr((self.name, self.spec, self.steps, self.softcap)).encode())
        tensors = [t for request in self.lengths for t in self.numbers(request)]
        for t in tensors + ([] if self.sinks is None else [self.sinks]):
            sha.update(t.contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def play(self, player: Player) -> torch.Tensor:
        """Serve all steps.

        Returns:
            out of all rows of all steps, one after the other: [tokens, q_heads, d_v].
        """
        outs, known = [], set()
        for step, parts in zip(self.steps, self._parts()):
            for row in step:
                if row.request not in known:
                    known.add(row.request)
                    player.admit(row.request, self.lengths[row.request], row.shares, row.prefix)
            outs.append(player.step(parts, *(self._rows(parts, i) for i in range(3))))
        return torch.cat(outs)

    def oracle(self) -> torch.Tensor:
        """What `play()` should give, in float64."""
        outs = []
        for parts in self._parts():
            lens = [part.before + part.tokens for part in parts]
            keys, values = (
                torch.nn.utils.rnn.pad_sequence([self.numbers(p.request)[i] for p in parts], batch_first=True)
                for i in (1, 2)
            )
            batch = PrefillBatch(
                torch.tensor([0, *(p.tokens for p in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                torch.tensor(lens, dtype=torch.int32),
                torch.arange(len(parts), dtype=torch.int32)[:, None],
                keys.shape[1],  # a page a request
            )
            out, _ = attention(
                self._rows(parts, 0), keys, values, batch, self.spec, softcap=self.softcap, sinks=self.sinks
            )
            outs.append(out)
        return torch.cat(outs)

    def _parts(self) -> Iterator[list[Part]]:
        cached: dict[str, int] = {}
        for step in self.steps:
            parts = [Part(row.request, cached.get(row.request, row.prefix), row.tokens) for row in step]
            cached.update((part.request, part.before + part.tokens) for part in parts)
            yield parts

    def _rows(self, parts: list[Part], of: int) -> torch.Tensor:
        return torch.cat([self.numbers(p.request)[of][p.before : p.before + p.tokens] for p in parts])

    def _random(self, of: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name}/{of}".encode()))


STORIES: dict[str, tuple[tuple[Row, ...], ...]] = {
    "cold": ((Row("a", 300), Row("b", 70), Row("c", 1)),),
    "prefix hit": (
        (Row("a", 320), Row("b", 40)),
        (Row("c", 50, "a", 256), Row("d", 200, "a", 64)),
    ),
    "chunked": ((Row("a", 100),), (Row("a", 100), Row("b", 128)), (Row("a", 77), Row("b", 129))),
    "mixed with decode": (
        (Row("a", 200), Row("b", 63)),
        (Row("a", 1), Row("b", 1), Row("c", 150)),
        (Row("c", 1), Row("a", 1), Row("d", 33), Row("b", 1)),
    ),
    "decode alone": ((Row("a", 190), Row("b", 65)), *(((Row("a", 1), Row("b", 1)),) * 3)),
    "empty rows": ((Row("a", 200), Row("b", 0), Row("c", 90)), (Row("b", 130), Row("a", 0), Row("c", 1))),
    "shared pages": (
        (Row("a", 250),),
        (Row("b", 9, "a", 192), Row("a", 1), Row("c", 100, "a", 192), Row("d", 1, "a", 192)),
        (Row("d", 1), Row("c", 1), Row("a", 70), Row("b", 1)),
    ),
    "long behind long": ((Row("a", 257), Row("b", 300)), (Row("b", 200), Row("a", 255))),
}
"""Steps by name. Each story's requests come to four pages of 64 and more, so that a page table can be out of order."""

_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
LAYERS: dict[str, tuple[LayerSpec, float]] = {
    "6/2 d32": (LayerSpec(6, 2, 32, dtype=_F32), 0.0),
    "2/2 d64 window 17": (LayerSpec(2, 2, 64, dtype=_F32, window=(17, None)), 0.0),
    "4/1 d64 window 127": (LayerSpec(4, 1, 64, dtype=_F32, window=(127, None)), 0.0),
    "6/2 d32 softcap": (LayerSpec(6, 2, 32, dtype=_F32, softcap=True), 5.0),
    "4/2 d32 sinks": (LayerSpec(4, 2, 32, dtype=_F32, sinks=True), 0.0),
    "9/3 d64 bf16": (LayerSpec(9, 3, 64, dtype=_BF16), 0.0),
    "4/1 d128 fp16": (LayerSpec(4, 1, 128, dtype=_F16), 0.0),
    "4/1 d64 bf16 window 63 sinks": (LayerSpec(4, 1, 64, dtype=_BF16, window=(63, None), sinks=True), 0.0),
}
"""Layers for a CPU, and the softcap of each, by name."""

CUDA_LAYERS: dict[str, tuple[LayerSpec, float]] = {
    **{name: layer for name, layer in LAYERS.items() if layer[0].dtype != _F32},
    "8/1 d128 bf16": (LayerSpec(8, 1, 128, dtype=_BF16), 0.0),
    "5/1 d128 bf16 softcap": (LayerSpec(5, 1, 128, dtype=_BF16, softcap=True), 5.0),
    "12/1 d64 fp16 window 17": (LayerSpec(12, 1, 64, dtype=_F16, window=(17, None)), 0.0),
    "6/2 d96 bf16 sinks": (LayerSpec(6, 2, 96, dtype=_BF16, sinks=True), 0.0),
    "4/2 d256 bf16": (LayerSpec(4, 2, 256, dtype=_BF16), 0.0),
}
"""Layers for a GPU, whose kernels serve neither float32 nor a head dim of 32."""


def scenarios(device: str = "cpu") -> list[Scenario]:
    """Every story over every layer that the kernels of a kind of device serve."""
    layers = CUDA_LAYERS if device == "cuda" else LAYERS
    return [
        Scenario(f"{story}, {name}", spec, steps, softcap)
        for name, (spec, softcap) in layers.items()
        for story, steps in STORIES.items()
    ]
