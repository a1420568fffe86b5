"""What an engine answered to the parity scenarios, kept in a file for the session that compares them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fa4_core
from fa4_core import counters
from fa4_core.testing.scenarios import Player, Scenario, scenarios

SUFFIX = ".safetensors"
PAGE_SIZES = {"vllm": (16,), "sglang": (1, 64)}
ON = {"cpu": ("1 thread", "2 threads"), "cuda": ("a GPU",)}
KERNEL = {"cpu": "reference", "cuda": "hopper"}


@dataclass(frozen=True)
class Record:
    """One engine version on one page size with a number of threads.

    Args:
        who: Such as "vllm-0.32.0, pages of 16, 2 threads" or ".., a GPU"; also the file's name.
        page_size: Rows of a page.
        environment: What must be the same on both sides for the same bits.
        inputs: Of each scenario, the digest of its steps and numbers.
        outs: Of each scenario, [tokens, q_heads, d_v].
        slots: Of each scenario and request, int64 [tokens].
    """

    who: str
    page_size: int
    environment: dict[str, str]
    inputs: dict[str, str]
    outs: dict[str, torch.Tensor]
    slots: dict[str, dict[str, torch.Tensor]]


def name(engine: str, version: str, page_size: int, on: str) -> str:
    """A record's name; `on` is one of ON's."""
    return f"{engine}-{version}, pages of {page_size}, {on}"


def expected(engine: str, version: str, device: str = "cpu") -> list[str]:
    """The records that an engine's session leaves on a kind of device."""
    return [name(engine, version, size, on) for size in PAGE_SIZES[engine] for on in ON[device]]


def core_digest() -> str:
    """Of fa4_core's own sources, installed or not: a record of another state of them proves nothing."""
    root = Path(fa4_core.__file__).parent
    sha = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        sha.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:16]


@contextmanager
def threads(on: str) -> Iterator[None]:
    """As many threads for torch as one of ON's says, until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if on == "2 threads" else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def play_all(make: Callable[[Scenario], Player], who: str, page_size: int, device: str) -> Record:
    """Play every scenario and hold each answer against the oracle: equal bits of two wrong answers are no parity.

    Args:
        make: A player of a scenario.
        who: The record's name.
        page_size: Rows of a page.
        device: "cpu" or "cuda".
    """
    outs, slots, inputs = {}, {}, {}
    counter = f"prefill.query_tokens.{KERNEL[device]}"
    for scenario in scenarios(device):
        before = counters.stats().get(counter, 0)
        player = make(scenario)
        out = scenario.play(player)
        through_us = counters.stats()[counter] - before
        assert through_us == len(out), f"{scenario.name}: {through_us} of {len(out)} tokens came through prefill()"
        close = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[out.dtype]
        torch.testing.assert_close(out.double(), scenario.oracle(), atol=close, rtol=close)
        outs[scenario.name] = out
        slots[scenario.name] = {request: player.slots(request) for request in scenario.lengths}
        inputs[scenario.name] = scenario.digest()
    environment = {
        "torch": torch.__version__,
        "torch build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "processor": torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "fa4_core": core_digest(),
    }
    return Record(who, page_size, environment, inputs, outs, slots)


def write(record: Record, folder: Path) -> Path:
    """Keep a record; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"out|{scenario}": out for scenario, out in record.outs.items()}
    for scenario, requests in record.slots.items():
        tensors |= {f"slots {request}|{scenario}": t for request, t in requests.items()}
    about = {
        "who": record.who, "page_size": str(record.page_size), "environment": json.dumps(record.environment),
        "inputs": json.dumps(record.inputs),
    }  # fmt: skip
    file = folder / (record.who + SUFFIX)
    save_file({key: t.contiguous() for key, t in tensors.items()}, file, metadata=about)
    return file


def read(file: Path) -> Record:
    """A record that `write()` kept."""
    outs: dict[str, torch.Tensor] = {}
    slots: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(file, "pt") as kept:
        about = kept.metadata()
        for key in kept.keys():  # noqa: SIM118 - it is no mapping
            what, scenario = key.split("|")
            if what == "out":
                outs[scenario] = kept.get_tensor(key)
            else:
                slots.setdefault(scenario, {})[what.removeprefix("slots ")] = kept.get_tensor(key)
    return Record(
        about["who"],
        int(about["page_size"]),
        json.loads(about["environment"]),
        json.loads(about["inputs"]),
        outs,
        slots,
    )
