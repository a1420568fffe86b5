"""Rounds of runs as a table: each figure of ours beside the baseline's, and beside the baseline against itself."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy import stats

from .engines import DEFAULT, OURS

AGAIN = "the engine's default, again"
BETTER = {"requests_per_s": 1, "input_tokens_per_s": 1, "total_tokens_per_s": 1, "concurrency": 0}  # the rest: less is


def rows(runs: list[dict]) -> list[dict]:
    """A row for each work item.

    Args:
        runs: {"work", "round", "backend", "measures"}; a round counts with all three backends in it.

    Returns:
        Means over the rounds of every figure; `ratio` = baseline / ours of the mean TTFT, with its 95 % interval over
        the rounds; `again_ratio` and its interval, the same of the baseline's second run in each round.
    """
    made = []
    for work in dict.fromkeys(r["work"] for r in runs):
        rounds: dict[int, dict[str, dict]] = {}
        for r in runs:
            if r["work"] == work:
                rounds.setdefault(r["round"], {})[r["backend"]] = r["measures"]
        whole = [found for found in rounds.values() if len(found) == 3]
        if not whole:
            continue
        row: dict = {"work": work, "backend": OURS, "baseline": DEFAULT, "rounds": len(whole)}
        for name in whole[0][OURS]:
            for backend, prefix in ((OURS, ""), (DEFAULT, "baseline_"), (AGAIN, "again_")):
                values = [found[backend].get(name) for found in whole]
                if None not in values:
                    row[prefix + name] = statistics.mean(values)
        row["ratio"], row["ratio_interval"] = interval(
            [f[DEFAULT]["ttft_mean_ms"] / f[OURS]["ttft_mean_ms"] for f in whole]
        )
        row["again_ratio"], row["again_interval"] = interval(
            [f[DEFAULT]["ttft_mean_ms"] / f[AGAIN]["ttft_mean_ms"] for f in whole]
        )
        made.append(row)
    return made


def interval(ratios: list[float]) -> tuple[float, list[float] | None]:
    """The geometric mean and Student's 95 % interval of the ratios' logarithms; None for it with a single ratio."""
    logs = [math.log(r) for r in ratios]
    middle = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(middle), None
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), [math.exp(middle - half), math.exp(middle + half)]


def show(kept: dict) -> None:
    """Print every row's figures side by side."""
    console = Console(width=110)
    for row in kept["rows"]:
        table = Table("", OURS, DEFAULT, "again", "ratio", title=f"{row['work']}, {row['rounds']} rounds")
        for name in (n for n in row if f"baseline_{n}" in row):
            ours, theirs, again = (row[prefix + name] for prefix in ("", "baseline_", "again_"))
            ratio = ours / theirs if BETTER.get(name, -1) >= 0 else theirs / ours
            table.add_row(name, *(f"{x:.2f}" for x in (ours, theirs, again)), f"{ratio:.3f}" if theirs and ours else "")
        console.print(table)
        console.print(
            f"mean TTFT, baseline / ours: {_words(row['ratio'], row['ratio_interval'])}; "
            f"baseline / itself: {_words(row['again_ratio'], row['again_interval'])}"
        )


def draw(kept: dict, path: Path) -> None:
    """The ratios with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 1 + 0.8 * len(kept["rows"])))
    for key, words, colour, shift in (("ratio", OURS, "C0", -0.12), ("again", "the default, again", "C7", 0.12)):
        at = [i + shift for i in range(len(kept["rows"]))]
        middle = [r["ratio" if key == "ratio" else "again_ratio"] for r in kept["rows"]]
        bounds = [r[f"{key}_interval"] or [m, m] for r, m in zip(kept["rows"], middle)]
        error = [[m - b[0] for m, b in zip(middle, bounds)], [b[1] - m for m, b in zip(middle, bounds)]]
        ax.errorbar(middle, at, xerr=error, fmt="o", capsize=4, color=colour, label=words)
    ax.axvline(1, color="k", lw=0.8)
    ax.set_yticks(range(len(kept["rows"])), [r["work"] for r in kept["rows"]])
    ax.invert_yaxis()
    ax.set_xlabel(f"mean TTFT of {kept['engine']}'s default / this, with 95 % intervals; right of 1 is faster")
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def _words(ratio: float, bounds: list[float] | None) -> str:
    return f"{ratio:.4f}" + (f" [{bounds[0]:.4f}, {bounds[1]:.4f}]" if bounds else "")
