"""What must hold of a run, and how far it is from the reference. Plain arithmetic over the runs' results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PREFILL = "prefill.query_tokens."
FP32_LIMIT = 1e-3  # mean |dlogprob| that fp32 arithmetic alone does not reach


@dataclass
class Row:
    """One line of the table: one backend of one engine, held against the reference."""

    result: dict
    ours: bool
    equal: int  # prompts whose greedy tokens are the reference's
    mean: float  # |dlogprob| over all generated tokens, teacher-forced
    largest: float
    failures: list[str] = field(default_factory=list)

    @property
    def by_kernel(self) -> dict[str, int]:
        """Query tokens summed over layers, by kernel."""
        counters = self.result["counters"].items()
        return {k.removeprefix(PREFILL): v for k, v in counters if k.startswith(PREFILL) and k.count(".") == 2 and v}


def measure(result: dict, job: dict, greedy: dict[str, list[int]], reference: dict[str, list[float]]) -> Row:
    """Hold a run's tokens and log-probabilities against the reference's.

    Args:
        result: What a worker wrote.
        job: What it was given.
        greedy: The reference's own continuation of each prompt.
        reference: The reference's log-probability of each token that the run generated.
    """
    distances = [
        abs(a - b)
        for output in result["outputs"]
        for a, b in zip(output["logprobs"], reference[output["name"]], strict=True)
    ]
    equal = sum(output["tokens"] == greedy[output["name"]] for output in result["outputs"])
    worst = max(distances) if all(map(math.isfinite, distances)) else math.nan  # max() may pass a NaN over
    return Row(result, job["ours"], equal, sum(distances) / len(distances), worst)


def judge(row: Row, own: Row, job: dict) -> None:
    """Note what does not hold of a run in row.failures; `own` is the run of the engine's own backend."""
    fail = row.failures.append
    if not math.isfinite(row.largest):
        fail("a log-probability is not a finite number")
    result, outputs = row.result, row.result["outputs"]
    wanted = [p["name"] for wave in job["waves"] for p in wave]
    if [o["name"] for o in outputs] != wanted or any(len(o["tokens"]) != job["new_tokens"] for o in outputs):
        fail(f"not every prompt got its {job['new_tokens']} tokens")
        return
    _judge_scheduling(row, job)
    counted = sum(row.by_kernel.values())
    if not row.ours and counted:
        fail(f"the engine's own backend sent {counted} tokens through prefill()")
    if row.ours:
        expected = result["layers"] * result["through_us"]
        if counted != expected:
            fail(f"{counted} tokens went through prefill(), {expected} were scheduled ({result['layers']} layers)")
        if not row.mean <= 2 * own.mean:  # NaN fails, too
            fail(f"mean |dlogprob| {row.mean:.2e} is over twice {own.mean:.2e}, the engine's own")
        if job["dtype"] == "float32" and not row.mean <= FP32_LIMIT:
            fail(f"mean |dlogprob| {row.mean:.2e} is over {FP32_LIMIT} in fp32")
    if job["device"] == "cpu" and job["dtype"] == "float32" and row.equal != len(outputs):
        fail(f"only {row.equal} of {len(outputs)} prompts got the reference's greedy tokens")


def _judge_scheduling(row: Row, job: dict) -> None:
    """Prefix hits and chunks: a run without them would not have tried what it claims."""
    result = row.result
    lengths = {p["name"]: len(p["tokens"]) for wave in job["waves"] for p in wave}
    owed = sum(lengths[o["name"]] - o["cached"] for o in result["outputs"])
    if result["scheduled_prefill"] != owed:
        row.failures.append(
            f"{result['scheduled_prefill']} prompt tokens were scheduled, the answers account for {owed}"
        )
    followers = [p["name"] for p in job["waves"][1]]
    cached = {o["name"]: o["cached"] for o in result["outputs"]}
    # A hit ends at a whole page, and a page that the prefixes share only in part is not one.
    least = job["shared_tokens"] - result["page_size"]
    for name in followers:
        if not least < cached[name] <= job["shared_tokens"]:
            row.failures.append(f"{name} found {cached[name]} tokens in the prefix cache, not {job['shared_tokens']}")
    steps = -(-max(lengths.values()) // job["chunk"])
    if result["prefill_chunks"][0] < steps:
        row.failures.append(f"the longest prompt came in {result['prefill_chunks'][0]} chunks, not {steps} or more")
    if result["largest_step"] > job["chunk"]:
        row.failures.append(f"a step held {result['largest_step']} tokens, over the limit of {job['chunk']}")
