"""The kernel as the Kernel protocol wants it: what is refused, and from where compiled variants come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ... import counters, settings
from ...batch import PrefillBatch
from ...spec import LayerSpec
from . import dsl
from .config import BOX, TILES, Config, name_of
from .objects.load import find
from .prepared import DTYPES, HopperPlan

if TYPE_CHECKING:
    from ...prefill import Capacity
    from .. import Question

Function = Callable[..., None]
_functions: dict[Config | str, Function] = {}


def function_of(key: Config | str) -> Function:
    """A variant, or a helper kernel by name: loaded where FA4_HOPPER_OBJECTS has it, else compiled; kept for good."""
    found = _functions.get(key)
    if found is None:
        found = find(name_of(key))
        if found is None:
            from . import build

            found = build.compile_helper(key) if isinstance(key, str) else build.compile_variant(key)
            counters.add("compiles.hopper")
        _functions[key] = found
    return found


def provide(key: Config | str, function: Function) -> None:
    """Use a kernel that was compiled elsewhere."""
    _functions[key] = function


class HopperKernel:
    """Ours, for sm_90; the one that is selected there."""

    name = "hopper"
    by_name_on: frozenset[str] = frozenset()
    about = f"compiled at first use, workspace up to {settings.WORKSPACE_MIB}"

    def refuses(self, question: Question) -> str | None:
        """As the protocol says."""
        spec, target = question.spec, question.target
        if target.capability is None or target.capability[0] != 9:
            return f"is for sm_90, not {target}"
        if spec.dtype not in DTYPES:
            return f"has no {spec.dtype}, only bfloat16 and float16"
        if spec.kv_dtype != spec.dtype:
            return f"has no kv dtype {spec.kv_dtype} for {spec.dtype} queries"
        if (spec.head_dim, spec.head_dim_v) not in TILES:
            dims = ", ".join(f"{d}" if d == d_v else f"{d}/{d_v}" for d, d_v in TILES)
            return f"has no head dims {spec.head_dim}/{spec.head_dim_v}, only {dims}"
        return dsl.refusal(spec.head_dim, spec.head_dim_v or spec.head_dim, DTYPES[spec.dtype], spec.softcap)

    def workspace_bytes(self, question: Question) -> int:
        """As the protocol says: for keys gathered from slots and for results of splits, and so for neither none."""
        slots = question.page_size is None or question.page_size % BOX != 0
        return settings.workspace_bytes() if slots or not question.invariant else 0

    def plan(self, batch: PrefillBatch, spec: LayerSpec, *, invariant: bool) -> HopperPlan:
        """As the protocol says."""
        # Tiles start at key 0 and rescaling is a row's own decision: without splits nothing else is needed.
        return HopperPlan(batch, spec, function_of, split=not invariant)

    def plan_within(self, batch: PrefillBatch, spec: LayerSpec, capacity: Capacity, *, invariant: bool) -> HopperPlan:
        """As the protocol says."""
        return HopperPlan(batch, spec, function_of, split=not invariant, capacity=capacity)
