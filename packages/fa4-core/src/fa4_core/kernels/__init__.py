"""The Kernel protocol, the ordered list of kernels, select() and explain().

To try a kernel in both engines, write one class with the members below and `register()` it: the engines'
adapters know only fa4_core.prefill(), so nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from .. import settings
from ..batch import PrefillBatch
from ..errors import UnsupportedError, bad, require
from ..spec import LayerSpec
from ..target import Target
from .hopper import HopperKernel
from .reference import ReferenceKernel

if TYPE_CHECKING:
    from ..prefill import Capacity


@dataclass(frozen=True)
class Question:
    """What a kernel is asked to serve.

    Args:
        spec: The layer.
        page_size: Rows of a page, or None where it is not known yet.
        target: The device.
        invariant: Bits of a row must not depend on which other rows of its request are in the call.
    """

    spec: LayerSpec
    page_size: int | None
    target: Target
    invariant: bool = False

    def __post_init__(self) -> None:
        require("spec", self.spec, LayerSpec)
        require("target", self.target, Target)
        size = self.page_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise bad("page_size", repr(size), "None (any) or an int of at least 1")

    def __str__(self) -> str:
        page = "any page size" if self.page_size is None else f"page size {self.page_size}"
        return f"[{self.spec}; {page}{', invariant' if self.invariant else ''}] on {self.target}"


class KernelPlan(Protocol):
    """A step made ready for one kernel and one spec; shared by all layers with that spec."""

    load_path: str
    """How K and V reach the kernel, a word for the counters: "gather", "tma-page", ..."""

    num_splits: int
    """Parts that the keys of a row are split into; 1 is no split."""

    def run(
        self,
        q: torch.Tensor,  # [total_q, q_heads, d]
        k_pages: torch.Tensor,  # [pages, page_size, kv_heads, d]
        v_pages: torch.Tensor,  # [pages, page_size, kv_heads, d_v]
        *,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,  # [q_heads]
        out: torch.Tensor,  # [total_q, q_heads, d_v]
        lse: torch.Tensor | None,  # [q_heads, total_q]
    ) -> None:
        """Fill `out`, and `lse` where given, for the batch's rows. The arguments are already checked."""


@runtime_checkable
class FixedPlan(KernelPlan, Protocol):
    """A plan of a fixed size, for graphs: what it launches, and where it reads, stays the same from step to step."""

    def refresh(self, batch: PrefillBatch) -> None:
        """Write another step in place, outside any graph; it is within the capacity."""


@runtime_checkable
class FixedKernel(Protocol):
    """What a kernel has beside the members of `Kernel` where its plans can be captured in a graph and replayed."""

    def plan_within(self, batch: PrefillBatch, spec: LayerSpec, capacity: Capacity, *, invariant: bool) -> FixedPlan:
        """Make a step ready in buffers that hold any step within the capacity."""


@runtime_checkable
class Kernel(Protocol):
    """What fa4_core asks of a kernel."""

    name: str
    by_name_on: frozenset[str]
    """Device types on which the kernel runs only when asked for by name."""

    about: str
    """How it is compiled, in a few words for a server's log."""

    def refuses(self, question: Question) -> str | None:
        """Why the kernel does not serve the question, in a user's words; None when it does."""

    def workspace_bytes(self, question: Question) -> int:
        """What its plans take at most from `fa4_core.workspace`, so that a server can reserve it at its start."""

    def plan(self, batch: PrefillBatch, spec: LayerSpec, *, invariant: bool) -> KernelPlan:
        """Make a step ready. Called once a step and spec."""


@dataclass(frozen=True)
class Verdict:
    """One kernel's answer to a question.

    Args:
        kernel: The kernel's name.
        reason: Why it does not serve; None where it does.
        selected: It is the one that prefill() would run.
    """

    kernel: str
    reason: str | None
    selected: bool


_KERNELS: list[Kernel] = [HopperKernel(), ReferenceKernel()]
_generation = 0


def generation() -> int:
    """Goes up whenever the list of kernels changes, and with it what select() may answer."""
    return _generation


def _word(most: int) -> re.Pattern[str]:
    return re.compile(rf"[a-z0-9_-]{{1,{most}}}")


def check_plan(kernel: str, plan: object) -> None:
    """Hold what a kernel's plan() gave against `KernelPlan`, before it can write anything.

    Raises:
        ValueError: A member is missing, or not what the counters can name.
    """
    path, splits = getattr(plan, "load_path", None), getattr(plan, "num_splits", None)
    if not callable(getattr(plan, "run", None)) or not isinstance(splits, int) or not isinstance(path, str):
        raise bad(f"the plan of kernel {kernel}", repr(plan), "an object with load_path, num_splits and run()")
    if not _word(10).fullmatch(path):
        raise bad(f"load_path of kernel {kernel}", repr(path), "up to 10 of a-z, 0-9, - and _")


def all_kernels() -> tuple[Kernel, ...]:
    """All kernels, in order of preference."""
    return tuple(_KERNELS)


def register(kernel: Kernel) -> None:
    """Put a kernel of your own before all others.

    Args:
        kernel: An object with the members of `Kernel`. One of the same name takes the old one's place.

    Raises:
        ValueError: A member is missing.
    """
    global _generation
    if isinstance(kernel, type) or not isinstance(kernel, Kernel):
        raise bad(
            "kernel", f"{kernel!r}", "an object with name, by_name_on, about, refuses(), workspace_bytes() and plan()"
        )
    if not isinstance(kernel.name, str) or not _word(24).fullmatch(kernel.name):
        raise bad("kernel.name", repr(kernel.name), "up to 24 of a-z, 0-9, - and _")
    require("kernel.by_name_on", kernel.by_name_on, AbstractSet)
    _generation += 1
    _KERNELS[:] = [kernel, *(k for k in _KERNELS if k.name != kernel.name)]


def explain(question: Question, kernel: str | None = None) -> list[Verdict]:
    """Each kernel's answer, in order of preference; at most one is selected.

    Args:
        question: What is to be served.
        kernel: Ask for this kernel by name; None asks for the best, or the one that FA4_KERNEL names.

    Raises:
        ValueError: No kernel has that name.
    """
    require("question", question, Question)
    wanted = kernel if kernel is not None else settings.kernel()
    if wanted is not None and wanted not in [k.name for k in _KERNELS]:
        source = "kernel" if kernel is not None else settings.KERNEL
        raise bad(source, repr(wanted), ", ".join(k.name for k in _KERNELS))
    verdicts, taken = [], False
    for k in _KERNELS:
        reason = k.refuses(question)
        if reason is not None and not (isinstance(reason, str) and reason):
            raise bad(f"what {k.name}.refuses() returned", repr(reason), "None, or a reason in words")
        if reason is None and wanted is None and question.target.type in k.by_name_on:
            by_name = f"kernel={k.name!r} or {settings.KERNEL}={k.name}"
            reason = f"runs on {question.target.type} only when asked for by name ({by_name})"
        if reason is None and wanted not in (None, k.name):
            reason = f"{wanted} was asked for by name"
        selected = reason is None and not taken
        taken = taken or selected
        verdicts.append(Verdict(k.name, reason, selected))
    return verdicts


def select(question: Question, kernel: str | None = None) -> Kernel:
    """The first kernel that serves the question.

    Args:
        question: What is to be served.
        kernel: As for `explain`.

    Raises:
        UnsupportedError: None serves; every kernel's reason is listed.
        ValueError: No kernel has that name.
    """
    verdicts = explain(question, kernel)
    for k, verdict in zip(_KERNELS, verdicts):
        if verdict.selected:
            return k
    raise UnsupportedError(str(question), {v.kernel: v.reason or "" for v in verdicts})
