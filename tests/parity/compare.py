"""Whether two engines gave the same bits, and whether that means anything: same inputs, other pages, same machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

from .record import Record

FEWEST = 40
"""Scenarios that a pair must have in common."""

_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class Pair:
    """Two records held against each other.

    Args:
        left: One's name.
        right: The other's.
        scenarios: How many were compared.
        problems: What stands against parity; empty where all is well.
    """

    left: str
    right: str
    scenarios: int
    problems: list[str]

    def __str__(self) -> str:
        return f"{self.left} and {self.right}"


def compare(records: list[Record], core: str) -> list[Pair]:
    """Every two records of two engines with the same number of threads; one engine's with one thread and with more.

    Args:
        records: All that there are.
        core: The digest of fa4_core's sources as they are now.
    """
    pairs = []
    for left, right in combinations(records, 2):
        same_engine = left.who.partition("-")[0] == right.who.partition("-")[0]
        same_threads = left.environment["threads"] == right.environment["threads"]
        if same_engine != same_threads and (not same_engine or _apart_from_threads(left) == _apart_from_threads(right)):
            problems = [*_environments(left, right, core, same_threads), *_inputs(left, right)]
            common = sorted(left.outs.keys() & right.outs.keys())
            if len(common) < FEWEST:
                problems.append(f"{len(common)} scenarios in common, fewer than {FEWEST}")
            for scenario in common:
                problems += _scenario(left, right, scenario, same_engine)
            pairs.append(Pair(left.who, right.who, len(common), problems))
    return pairs


def _apart_from_threads(record: Record) -> str:
    return record.who.rpartition(",")[0]


def _environments(left: Record, right: Record, core: str, same_threads: bool) -> Iterator[str]:
    for key in sorted(left.environment.keys() | right.environment.keys()):
        one, other = left.environment.get(key), right.environment.get(key)
        if one != other and (key != "threads" or same_threads):
            yield f"{key} was {one} and {other}"
    for record in (left, right):
        if record.environment.get("fa4_core") != core:
            yield f"{record.who} was made by fa4_core {record.environment.get('fa4_core')}, which is {core} now"


def _inputs(left: Record, right: Record) -> Iterator[str]:
    if left.outs.keys() != right.outs.keys():
        yield f"only one has {', '.join(sorted(left.outs.keys() ^ right.outs.keys()))}"
    for scenario in sorted(left.inputs.keys() | right.inputs.keys()):
        if left.inputs.get(scenario) != right.inputs.get(scenario):
            yield f"{scenario}: the inputs differ"


def _scenario(left: Record, right: Record, scenario: str, same_engine: bool) -> Iterator[str]:
    for record in (left, right):
        pages = _pages(record, scenario)
        if bool((pages.diff() >= 0).all()) or bool((pages.diff() <= 0).all()):
            yield f"{scenario}: the page table of {record.who} is in order, {pages.tolist()}"
    one, other = left.slots[scenario], right.slots[scenario]
    if one.keys() != other.keys():
        yield f"{scenario}: requests {sorted(one)} and {sorted(other)}"
    elif not same_engine and all(torch.equal(one[request], other[request]) for request in one):
        yield f"{scenario}: both page tables are the same"
    yield from _bits(left.outs[scenario], right.outs[scenario], scenario)


def _pages(record: Record, scenario: str) -> torch.Tensor:
    """The pages of all requests, one after the other; a table of one page each is in order only if they all are."""
    size = record.page_size
    return torch.cat([slots[::size] // size for _, slots in sorted(record.slots[scenario].items())])


def _bits(left: torch.Tensor, right: torch.Tensor, scenario: str) -> Iterator[str]:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        yield f"{scenario}: {left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
        return
    differ = (left.view(_BITS[left.dtype]) != right.view(_BITS[right.dtype])).flatten(1).any(1)
    if differ.any():
        rows = differ.nonzero().flatten().tolist()
        yield f"{scenario}: {len(rows)} of {len(differ)} rows differ in their bits, the first is row {rows[0]}"
