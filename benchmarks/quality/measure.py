"""A run's distance from the reference, as plain arithmetic over what the two wrote."""

from __future__ import annotations

import math
import re
import statistics

PREFILL = "prefill.query_tokens."


def rows(result: dict, job: dict, reference: dict, decode: dict[str, str]) -> list[dict]:
    """Rows of the table that come of one run: its texts as they were scored, and the book cold and cached.

    Args:
        result: What a worker wrote.
        job: What it was given.
        reference: "scored", "answers" and "following" likewise, the last the reference's log-probability of each token
            that any run gave, by place and token.
        decode: The text of each answer, by name.
    """
    base = {"engine": result["engine"], "backend": job["name"], "kernel": _kernel(result)}
    theirs = [x for t in job["texts"] for x in reference["scored"][t["name"]]]
    mine = [x for t in job["texts"] for x in result["scored"][t["name"]]]
    equal = [_agreed(a, reference["answers"][name]) for name, a in result["answers"].items()]
    right = [_is_right(decode[q["name"]], q["answer"]) for q in job["questions"]]
    scored = {
        **base,
        "setting": f"chunks of {job['chunk']}",
        **_distance(mine, theirs),
        "perplexity": _perplexity(mine),
        "greedy_tokens_equal": sum(equal) / sum(map(len, result["answers"].values())),
        "gsm_symbolic": sum(right) / len(right),
    }
    made = [scored]
    for state, following in result["following"].items():
        theirs = [reference["following"][f"{n} {token}"] for n, (token, _) in zip(job["places"], following)]
        made.append(
            {**base, "setting": f"chunks of {job['chunk']}, {state}", **_distance([x for _, x in following], theirs)}
        )
    return made


def compare(rows: list[dict]) -> None:
    """Beside each row's mean distance put its ratio to FA3's in the same engine and setting, with a 95 % interval.

    The distances of one token in two runs go together, so the interval is that of their differences. Takes each row's
    "apart" away.
    """
    fa3 = {(r["engine"], r["setting"]): r["apart"] for r in rows if r["backend"] == "FA3"}
    for row in rows:
        mine, theirs = row.pop("apart"), fa3.get((row["engine"], row["setting"]))
        if theirs and row["backend"] != "FA3":
            differences = [a - b for a, b in zip(mine, theirs, strict=True)]
            middle, n = statistics.fmean(theirs), len(theirs)
            row["mean_to_fa3"] = 1 + statistics.fmean(differences) / middle
            row["mean_to_fa3_half"] = 1.96 * statistics.stdev(differences) / math.sqrt(n) / middle


def _distance(mine: list[float], theirs: list[float]) -> dict:
    apart = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    worst = max(apart) if all(map(math.isfinite, apart)) else math.nan  # max() may pass a NaN over
    mean = statistics.fmean(apart)
    return {"tokens": len(apart), "mean_abs_dlogprob": mean, "max_abs_dlogprob": worst, "apart": apart}


def _perplexity(logs: list[float]) -> float:
    return math.exp(-sum(logs) / len(logs))


def _agreed(mine: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), len(mine))


def _is_right(text: str, answer: str) -> bool:
    """Whether the last number before the next question is the answer."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text.partition("Question:")[0])
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(answer.replace(",", ""))


def _kernel(result: dict) -> str:
    counted = {k.removeprefix(PREFILL): v for k, v in result["counters"].items() if k.startswith(PREFILL) and v}
    return ", ".join(sorted(k for k in counted if "." not in k)) or "the engine's own"
