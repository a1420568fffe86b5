"""PrefillBatch: what a step is. One for each page table of a step, shared by all layers that read it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from .errors import bad

HostLengths = Sequence[int] | np.ndarray | torch.Tensor
"""Lengths that the host knows, one a request: a sequence of ints, a numpy array or a CPU tensor."""


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """The requests of one step: which query rows are whose, how many keys each has, and where those lie.

    The device tensors are the truth: masks, key bounds and row counts come from them. The host's lengths are
    upper bounds that size and order the work; give them where the engine has them, since a plan made without
    them costs more. Nothing here is written after construction, and a new page table is a new batch.

    Args:
        cu_seqlens_q: int32 [B + 1], contiguous. Rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of q are request i's.
        kv_lens: int32 [B], contiguous. Keys of each request, cached and new together.
        page_table: int32 [B, P], last stride 1. Pages of each request in order. Entries past
            ``ceil(kv_lens[i] / page_size)``, and those of pages outside every query's window, may hold anything.
        page_size: Rows of a page, at least 1.
        host_q_lens: Upper bounds of the query lengths, [B], or None.
        host_kv_lens: Upper bounds of kv_lens, [B], or None.
        max_q_len: Upper bound of any query length; None takes it from `host_q_lens` where given.
        max_kv_len: Upper bound of any kv_len; None takes it from `host_kv_lens`, else from the table's width.

    Raises:
        ValueError: A wrong shape, dtype, device or value, named. Values of device tensors are only checked when
            they lie on the CPU: reading them elsewhere would stall the stream.
    """

    cu_seqlens_q: torch.Tensor  # [B + 1]
    kv_lens: torch.Tensor  # [B]
    page_table: torch.Tensor  # [B, P]
    page_size: int
    host_q_lens: HostLengths | None = None
    host_kv_lens: HostLengths | None = None
    max_q_len: int | None = None
    max_kv_len: int | None = None
    _plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.page_size, int) or isinstance(self.page_size, bool) or self.page_size < 1:
            raise bad("page_size", repr(self.page_size), "an int of at least 1")
        for name, dims in (("cu_seqlens_q", 1), ("kv_lens", 1), ("page_table", 2)):
            self._check_tensor(name, dims)
        n = self.kv_lens.shape[0]
        if self.cu_seqlens_q.shape[0] != n + 1:
            raise bad("cu_seqlens_q", f"of shape {list(self.cu_seqlens_q.shape)}", f"[{n + 1}], one more than kv_lens")
        if self.page_table.shape[0] != n:
            raise bad("page_table", f"of shape {list(self.page_table.shape)}", f"{n} rows, one a request of kv_lens")
        self._take_host_lengths("q", None)
        self._take_host_lengths("kv", self.page_table.shape[1] * self.page_size)
        if self.device.type == "cpu":
            self._check_values()

    def _check_tensor(self, name: str, dims: int) -> None:
        t = getattr(self, name)
        if not isinstance(t, torch.Tensor):
            raise bad(name, type(t).__name__, "a torch.Tensor")
        if t.dtype != torch.int32 or t.dim() != dims:
            raise bad(name, f"{t.dtype} of shape {list(t.shape)}", f"int32 with {dims} dimension{'s' * (dims > 1)}")
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise bad(name, f"of strides {t.stride()}", "a last dimension that is contiguous")
        if t.device != self.cu_seqlens_q.device:
            raise bad(name, f"on {t.device}", f"{self.cu_seqlens_q.device}, where cu_seqlens_q is")

    def _take_host_lengths(self, side: str, bound: int | None) -> None:
        """Normalise host_<side>_lens to a read-only int64 array and settle max_<side>_len."""
        lens, top = getattr(self, f"host_{side}_lens"), getattr(self, f"max_{side}_len")
        if isinstance(lens, torch.Tensor) and lens.device.type != "cpu":
            raise bad(f"host_{side}_lens", f"on {lens.device}", "a CPU tensor, an array or a sequence of ints")
        if lens is not None:
            # A copy: engines reuse their pinned buffers for the next step while this one still runs.
            lens = _as_int64(f"host_{side}_lens", lens)
            if lens.shape != (self.num_requests,):
                raise bad(f"host_{side}_lens", f"of shape {list(lens.shape)}", f"[{self.num_requests}]")
            if lens.size and lens.min() < 0:
                raise bad(f"host_{side}_lens", f"{lens.min()} for request {int(lens.argmin())}", "at least 0")
            lens.flags.writeable = False
            bound = int(lens.max(initial=0))
        if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 0):
            raise bad(f"max_{side}_len", repr(top), "None or an int of at least 0")
        object.__setattr__(self, f"host_{side}_lens", lens)
        object.__setattr__(self, f"max_{side}_len", bound if top is None else top)

    def _check_values(self) -> None:
        # int64, in which no difference of two int32 wraps.
        cu, kv = (t.detach().numpy().astype(np.int64) for t in (self.cu_seqlens_q, self.kv_lens))
        q = np.diff(cu)
        if cu[0] != 0:
            raise bad("cu_seqlens_q[0]", cu[0], "0")
        if (q < 0).any():
            raise bad("cu_seqlens_q", f"decreasing after request {int((q < 0).argmax())}", "non-decreasing values")
        if (kv < 0).any():
            i = int((kv < 0).argmax())
            raise bad(f"kv_lens[{i}]", kv[i], "at least 0")
        pages = self.page_table.shape[1]
        room = pages * self.page_size
        if (kv > room).any():
            i = int((kv > room).argmax())
            raise bad(f"kv_lens[{i}]", kv[i], f"at most {room}: page_table has {pages} pages a request")
        for side, lens in (("q", q), ("kv", kv)):
            bounds, top = getattr(self, f"host_{side}_lens"), getattr(self, f"max_{side}_len")
            if bounds is not None and (lens > bounds).any():
                i = int((lens > bounds).argmax())
                raise bad(f"host_{side}_lens[{i}]", bounds[i], f"an upper bound of the request's {lens[i]}")
            if top is not None and (lens > top).any():
                raise bad(f"max_{side}_len", top, f"an upper bound of every request, the longest has {lens.max()}")

    @property
    def device(self) -> torch.device:
        """Where the step's tensors lie, and so where it runs."""
        return self.cu_seqlens_q.device

    @property
    def num_requests(self) -> int:
        """B, empty requests counted."""
        return self.kv_lens.shape[0]

    @property
    def query_tokens(self) -> int | None:
        """Query rows of the step: exact on a CPU, the host's upper bound elsewhere, None where the host knows none."""
        if self.device.type == "cpu":
            return int(self.cu_seqlens_q[-1])
        return None if self.host_q_lens is None else int(np.sum(self.host_q_lens))

    def with_pages(self, page_table: torch.Tensor, page_size: int | None = None) -> PrefillBatch:
        """The same requests over another page table (another KV-cache group); plans are not carried over.

        Args:
            page_table: int32 [B, P'].
            page_size: Of the new table; None keeps this batch's.

        Raises:
            ValueError: As the constructor.
        """
        size = self.page_size if page_size is None else page_size
        # A bound that came from the old table's width says nothing of the new one.
        derived = self.host_kv_lens is None and self.max_kv_len == self.page_table.shape[1] * self.page_size
        bound = None if derived else self.max_kv_len
        return replace(self, page_table=page_table, page_size=size, max_kv_len=bound)


def _as_int64(name: str, lens: HostLengths) -> np.ndarray:
    """A copy of lengths in any of their forms. Raises ValueError where they are no integers."""
    try:
        found = np.array(lens.detach().numpy() if isinstance(lens, torch.Tensor) else lens)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = np.array(None)
    if found.dtype == np.uint64 or (found.size and found.dtype.kind not in "iu"):
        raise bad(name, f"a {type(lens).__name__} of {found.dtype}", "integers, one a request")
    return found.astype(np.int64)
