"""LayerSpec: what an attention layer is, apart from any step and any tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import bad

Window = tuple[int | None, int | None]
"""(left, right): how many keys before and after a query's own position it sees; None is unbounded."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer is. Hashable; holds no tensor, no length and no scale.

    A query at position p of its request sees key j when ``j - p`` lies in ``[-left, right]``. Positions are
    aligned at the end: the last query stands at the last key. `causal` means ``right == 0``; the two spellings
    compare equal, and ``window`` always holds what is in force.

    Args:
        q_heads: Query heads on this rank, a multiple of `kv_heads` (any ratio).
        kv_heads: Key and value heads on this rank.
        head_dim: Elements of a query or key head.
        head_dim_v: Elements of a value head; None means `head_dim`.
        dtype: Of q and out: bfloat16, float16 or float32.
        kv_dtype: Of the pages; None means `dtype`.
        causal: No query sees a key after its own position.
        window: (left, right) in keys, None unbounded. An engine's -1 is spelled None here.
        softcap: Scores pass through ``softcap * tanh(score / softcap)``; the value is an argument of prefill().
        sinks: A learned logit a head joins the softmax's denominator; the values are an argument of prefill().

    Raises:
        ValueError: A value outside the above, named.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = None  # type: ignore[assignment]  # likewise
    causal: bool = True
    window: Window = (None, None)
    softcap: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # frozen: this is the only place that writes
        if self.head_dim_v is None:
            set_(self, "head_dim_v", self.head_dim)
        if self.kv_dtype is None:
            set_(self, "kv_dtype", self.dtype)
        for name in ("q_heads", "kv_heads", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(name, repr(value), "an int of at least 1")
        if self.q_heads % self.kv_heads:
            raise bad("q_heads", self.q_heads, f"a multiple of kv_heads ({self.kv_heads})")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in FLOATS:
                raise bad(name, getattr(self, name), ", ".join(map(str, FLOATS)))
        for name in ("causal", "softcap", "sinks"):
            if not isinstance(getattr(self, name), bool):
                raise bad(name, repr(getattr(self, name)), "True or False (values go to prefill())")
        self._settle_window()

    def _settle_window(self) -> None:
        window = self.window
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise bad("window", repr(window), "a pair (left, right)")
        for name, side in zip(("window left", "window right"), window):
            if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
                raise bad(name, repr(side), "None (unbounded) or an int of at least 0")
        # Lengths are int32, so a longer side is no bound; and kernels may add a side to a position.
        left, right = (None if side is None or side >= 2**31 - 1 else side for side in window)
        if self.causal and right not in (None, 0):
            raise bad("window right", right, "None or 0 in a causal layer")
        if self.causal:
            right = 0
        object.__setattr__(self, "window", (left, right))
        object.__setattr__(self, "causal", right == 0)

    @property
    def ratio(self) -> int:
        """Query heads that share one key head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        left, right = self.window
        mask = "causal" if self.causal else "full" if right is None else f"right {right}"
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        kinds = str(self.dtype).removeprefix("torch.")
        if self.kv_dtype != self.dtype:
            kinds += f", kv {str(self.kv_dtype).removeprefix('torch.')}"
        parts = [f"{self.q_heads}/{self.kv_heads} heads", f"d {dims}", kinds, mask]
        if left is not None:
            parts.append(f"window {left}")
        parts += ["softcap"] * self.softcap + ["sinks"] * self.sinks
        return ", ".join(parts)
