"""plan() and prefill(): the one call. Validate, select, plan once a step, run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch

from . import counters, settings
from .arguments import check_results, check_tensors, check_values
from .batch import PrefillBatch
from .errors import bad, require
from .kernels import FixedKernel, FixedPlan, Kernel, KernelPlan, Question, check_plan, generation, select
from .spec import LayerSpec
from .target import Target


@dataclass(frozen=True)
class Capacity:
    """The largest step that a plan may be refreshed with. The Hopper kernel's plans then have buffers and a grid of
    fixed place and size, so that a graph which captured a run may be replayed after a refresh; for other kernels it is
    a limit alone.

    Args:
        requests: Requests of a step.
        query_tokens: Query rows of a step.
        keys: Keys of any one request.
    """

    requests: int
    query_tokens: int
    keys: int

    def __post_init__(self) -> None:
        for name in ("requests", "query_tokens", "keys"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise bad(name, repr(value), "an int of at least 0")

    def check(self, batch: PrefillBatch) -> None:
        """Raises ValueError where the batch's bounds exceed the capacity."""
        tokens = batch.query_tokens
        for name, was, limit in (
            ("requests", batch.num_requests, self.requests),
            ("query tokens", tokens, self.query_tokens),
            ("keys", batch.max_kv_len, self.keys),
        ):
            if was is None:
                raise bad("batch", f"without host lengths for its {name}", "lengths to hold against a capacity")
            if was > limit:
                raise bad("batch", f"of {was} {name}", f"at most the {limit} of the plan's capacity")


class Plan:
    """A step made ready for one spec. Made by `plan()`; shared by every layer with that spec."""

    def __init__(
        self, batch: PrefillBatch, spec: LayerSpec, kernel: Kernel, invariant: bool, capacity: Capacity | None
    ) -> None:
        self.spec, self.kernel, self.invariant, self.capacity = spec, kernel, invariant, capacity
        self.batch: PrefillBatch = None  # type: ignore[assignment]  # refresh() sets both
        self._plan: KernelPlan = None  # type: ignore[assignment]
        self.refresh(batch)

    def refresh(self, batch: PrefillBatch) -> None:
        """Point the plan at another step, outside any graph, on the stream that will run or replay it.

        With a capacity, kernels that have plans of a fixed size (`FixedKernel`) write the step in place: a graph that
        captured `run()` reads it at its next replay. The query rows of the new step must be within the q that was
        captured.

        Args:
            batch: The new step, on the same device and page size. Where there is a capacity, with host lengths.

        Raises:
            ValueError: The batch exceeds the plan's capacity, or has no lengths to hold against it.
        """
        require("batch", batch, PrefillBatch)
        if self.capacity is not None:
            self.capacity.check(batch)
        if self.batch is not None and (batch.page_size, batch.device) != (self.batch.page_size, self.batch.device):
            was = f"of page size {batch.page_size} on {batch.device}"
            raise bad("batch", was, f"page size {self.batch.page_size} on {self.batch.device}, as planned")
        if self.batch is not None and self.capacity is not None and isinstance(self._plan, FixedPlan):
            self._plan.refresh(batch)
        else:
            planned = self._make(batch)
            check_plan(self.kernel.name, planned)
            self._plan = planned
        self.batch, self._tokens = batch, batch.query_tokens
        self._checked: object = None  # the geometry of the tensors that were held against this batch last

    def _make(self, batch: PrefillBatch) -> KernelPlan:
        if self.capacity is not None and isinstance(self.kernel, FixedKernel):
            return self.kernel.plan_within(batch, self.spec, self.capacity, invariant=self.invariant)
        return self.kernel.plan(batch, self.spec, invariant=self.invariant)

    @overload
    def run(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, *, scale: float | None = ...,
            softcap: float = ..., sinks: torch.Tensor | None = ..., out: torch.Tensor | None = ...,
            lse: torch.Tensor | None = ..., return_lse: Literal[False] = ...) -> torch.Tensor: ...  # fmt: skip

    @overload
    def run(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, *, scale: float | None = ...,
            softcap: float = ..., sinks: torch.Tensor | None = ..., out: torch.Tensor | None = ...,
            lse: torch.Tensor | None = ...,
            return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One layer's attention; the arguments are those of `prefill()`."""
        batch, spec = self.batch, self.spec
        geometry = [(t.shape, t.stride(), t.dtype, t.device) for t in (q, k_pages, v_pages) if torch.is_tensor(t)]
        if geometry != self._checked:  # layers of a step look alike
            check_tensors(q, k_pages, v_pages, batch, spec)
            self._checked = geometry
        scale = spec.head_dim**-0.5 if scale is None else scale
        check_values(spec, scale, softcap, sinks, q.device)
        check_results(q, k_pages, v_pages, sinks, spec, out, lse)
        if out is None:
            out = q.new_empty((q.shape[0], spec.q_heads, spec.head_dim_v))
        if lse is None and return_lse:
            lse = q.new_empty((spec.q_heads, q.shape[0]), dtype=torch.float32)
        self._plan.run(q, k_pages, v_pages, scale=float(scale), softcap=float(softcap), sinks=sinks, out=out, lse=lse)
        tokens = self._tokens
        counters.count_call(
            self.kernel.name, self._plan.load_path, q.shape[0] if tokens is None else tokens, self._plan.num_splits
        )
        if return_lse:
            assert lse is not None  # made above
            return out, lse
        return out


def plan(
    batch: PrefillBatch,
    spec: LayerSpec,
    *,
    capacity: Capacity | None = None,
    kernel: str | None = None,
    invariant: bool = False,
) -> Plan:
    """Select a kernel for a layer and make a step ready for it.

    Args:
        batch: The step.
        spec: The layer.
        capacity: Fix buffers and grid for steps up to this size (graph capture); None fits this step alone.
        kernel: Run this kernel and no other; None picks the best one.
        invariant: Bits of a row depend on its query, its keys and this setting alone, not on which other rows of
            its request are in the call: cold, cached and chunked prefill agree bitwise.

    Returns:
        A plan whose `run()` serves every layer with this spec.

    Raises:
        UnsupportedError: No kernel serves the layer on this device; each kernel's reason is listed.
        ValueError: The batch exceeds the capacity, or no kernel has that name.
    """
    require("batch", batch, PrefillBatch)
    require("spec", spec, LayerSpec)
    require("invariant", invariant, bool)
    if capacity is not None:
        require("capacity", capacity, Capacity)
    question = Question(spec, batch.page_size, Target.of(batch.device), invariant)
    return Plan(batch, spec, select(question, kernel), invariant, capacity)


@overload
def prefill(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PrefillBatch, spec: LayerSpec, *,
            scale: float | None = ..., softcap: float = ..., sinks: torch.Tensor | None = ...,
            out: torch.Tensor | None = ..., lse: torch.Tensor | None = ..., return_lse: Literal[False] = ...,
            kernel: str | None = ..., invariant: bool = ...) -> torch.Tensor: ...  # fmt: skip


@overload
def prefill(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PrefillBatch, spec: LayerSpec, *,
            scale: float | None = ..., softcap: float = ..., sinks: torch.Tensor | None = ...,
            out: torch.Tensor | None = ..., lse: torch.Tensor | None = ..., return_lse: Literal[True],
            kernel: str | None = ..., invariant: bool = ...) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PrefillBatch,
    spec: LayerSpec,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a step's queries over paged keys and values.

    Scores are ``scale * q.k``, then ``softcap * tanh(s / softcap)`` where the layer has one, then the mask, then a
    softmax in fp32 with the sink in its denominator where the layer has one. Any request may have no query or no
    key, and more queries than keys. A row that sees no key gives out 0 and lse -inf, with a sink lse = the sink.
    The step is planned at the first call and the plan kept on the batch for the layers that follow.

    Args:
        q: [total_q, q_heads, head_dim], spec.dtype; rows past cu_seqlens_q[-1] are ignored. Here and below the last
            dimension is contiguous and every other stride is free.
        k_pages: [pages, page_size, kv_heads, head_dim], spec.kv_dtype. Rows that hold no key of the step, or that no
            query sees, may hold anything, NaN included.
        v_pages: [pages, page_size, kv_heads, head_dim_v], spec.kv_dtype.
        batch: The step.
        spec: The layer.
        scale: Of the scores; None is ``head_dim ** -0.5``.
        softcap: Above 0 exactly where spec.softcap is on.
        sinks: [q_heads], bfloat16 or float32, exactly where spec.sinks is on.
        out: [total_q, q_heads, head_dim_v], spec.dtype, not overlapping the inputs; None makes one. Rows past
            cu_seqlens_q[-1] are left as they are.
        lse: float32 [q_heads, total_q], natural logarithm; None makes one where `return_lse` is set.
        return_lse: Return (out, lse).
        kernel: Run this kernel and no other; None picks the best one.
        invariant: As for `plan()`.

    Returns:
        out, or (out, lse).

    Raises:
        ValueError: An argument is not as above: named, with what it was and what is allowed. Nothing is written then.
        UnsupportedError: No kernel serves the layer on this device; each kernel's reason is listed.
    """
    require("batch", batch, PrefillBatch)
    require("spec", spec, LayerSpec)
    require("invariant", invariant, bool)
    if kernel is not None:
        require("kernel", kernel, str)
    # What select() would answer may change between calls: by another kernel registered, or another one asked for.
    key = (spec, kernel if kernel is not None else settings.kernel(), invariant, generation())
    ready = batch._plans.get(key)
    if ready is None:
        ready = batch._plans[key] = plan(batch, spec, kernel=kernel, invariant=invariant)
    run: Plan = ready
    if return_lse:
        return run.run(
            q, k_pages, v_pages, scale=scale, softcap=softcap, sinks=sinks, out=out, lse=lse, return_lse=True
        )
    return run.run(q, k_pages, v_pages, scale=scale, softcap=softcap, sinks=sinks, out=out, lse=lse)
