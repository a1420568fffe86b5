"""What is asked of the servers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Work:
    """One run of an engine's client.

    Args:
        name: In the table.
        prompts: How many.
        input: Tokens of a prompt, a shared prefix left out.
        output: Tokens of an answer.
        rate: Requests a second, arriving as a Poisson process; None sends them as `concurrency` allows.
        concurrency: Most requests under way; None is no limit.
        prefix: Tokens that all prompts begin with.
        spread: Lengths differ by up to this part of themselves.
    """

    name: str
    prompts: int
    input: int
    output: int
    rate: float | None = None
    concurrency: int | None = None
    prefix: int = 0
    spread: float = 0.0


WORK = {
    w.name: w
    for w in (
        Work("32768 in, 2 out", 16, 32768, 2, concurrency=4),
        Work("16384 in, 2 out", 16, 16384, 2, concurrency=4),
        Work("2048 in, 128 out, 8 a second", 48, 2048, 128, rate=8.0),
        Work("mixed, a shared prefix, 8 a second", 48, 3072, 64, rate=8.0, prefix=2048, spread=0.9),
    )
}


def shrunk(work: Work) -> Work:
    """The same for a CPU, where only whether it runs is seen."""
    return replace(
        work, prompts=4, input=max(work.input // 512, 8), output=min(work.output, 4), prefix=work.prefix // 64
    )
