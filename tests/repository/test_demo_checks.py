"""What the demo calls a failure. Each case breaks one thing of a run in which all holds."""

import copy
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo import checks, workers

NEW, CHUNK, SHARED, PAGE = 3, 8, 12, 4
LENGTHS = {"short": 5, "long": 20, "follower": 20}
JOB = {
    "waves": [
        [{"name": n, "tokens": [1] * LENGTHS[n]} for n in ("short", "long")],
        [{"name": "follower", "tokens": [1] * 20}],
    ],
    "new_tokens": NEW,
    "chunk": CHUNK,
    "shared_tokens": SHARED,
    "device": "cpu",
    "dtype": "float32",
}
ANSWERS = {name: [7, 8, 9] for name in LENGTHS}
LOGS = {name: [-1.0, -2.0, -3.0] for name in LENGTHS}
DECODED = len(LENGTHS) * (NEW - 1)


def run(ours=True, off=1e-6):
    cached = {"short": 0, "long": 0, "follower": SHARED}
    outputs = [
        {"name": n, "tokens": list(ANSWERS[n]), "logprobs": [x + off for x in LOGS[n]], "cached": cached[n]}
        for n in LENGTHS
    ]
    prefilled = sum(LENGTHS.values()) - SHARED
    tokens = 2 * (prefilled + DECODED)
    return {
        "engine": "E", "layers": 2, "page_size": PAGE, "outputs": outputs,
        "prefill_chunks": [3, 1], "largest_step": CHUNK, "scheduled_prefill": prefilled,
        "through_us": prefilled + DECODED,
        "counters": {"prefill.query_tokens.k": tokens, "prefill.query_tokens.k.gather": tokens} if ours else {},
    }  # fmt: skip


def judged(result, own=None, ours=True):
    own = checks.measure(own or run(False), JOB | {"ours": False}, ANSWERS, LOGS)
    row = checks.measure(result, JOB | {"ours": ours}, ANSWERS, LOGS)
    checks.judge(row, own, JOB)
    return row


def test_a_run_in_which_all_holds():
    row = judged(run())
    assert row.failures == []
    assert (row.equal, row.by_kernel) == (3, {"k": 2 * (45 - SHARED + DECODED)})
    assert row.mean == pytest.approx(1e-6, rel=1e-3)
    assert judged(run(False), ours=False).failures == []


def broken(path, value):
    result = copy.deepcopy(run())
    *way, last = path
    at = result
    for key in way:
        at = at[key]
    at[last] = value
    return result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (broken(["counters"], {}), "0 tokens went through prefill.., 78 were scheduled"),
        (broken(["counters", "prefill.query_tokens.k"], 77), "77 tokens went through"),
        (broken(["outputs", 0, "tokens", 1], 5), "only 2 of 3 prompts got the reference's greedy tokens"),
        (broken(["outputs", 2, "cached"], 0), "follower found 0 tokens in the prefix cache"),
        (broken(["outputs"], run()["outputs"][:2]), "not every prompt got its 3 tokens"),
        (broken(["prefill_chunks"], [2, 1]), "the longest prompt came in 2 chunks, not 3"),
        (broken(["largest_step"], 9), "a step held 9 tokens"),
        (broken(["scheduled_prefill"], 30), "30 prompt tokens were scheduled, the answers account for 33"),
        (run(off=float("nan")), "a log-probability is not a finite number"),
        (run(off=2.5e-6), "over twice .*, the engine's own"),
        (run(off=2e-3), "over 0.001 in fp32"),
    ],
)
def test_what_fails(result, message):
    assert any(re.search(message, failure) for failure in judged(result).failures)


def test_an_engines_own_run_that_counts_is_no_baseline():
    assert "through prefill()" in judged(run(True), ours=False).failures[0]


def test_sglangs_lines_are_read():
    line = "[2026] Prefill batch, #new-seq: 2, #new-token: {}, #cached-token: 0, token usage: 0.00\n"
    found = workers._sglang_steps([line.format(512), "Decode batch. #running-req: 3\n", line.format(31)])
    assert found == {"prefill_chunks": [2], "largest_step": 512, "scheduled_prefill": 543}


def test_a_worker_that_dies_shows_its_log(tmp_path):
    fake = workers.Run("dead", "vllm", True)
    (tmp_path / "python").write_text("#!/bin/sh\necho what went wrong; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(workers.WorkerError, match="(?s)ended with status 3.*what went wrong"):
        workers.work(fake, tmp_path / "python", JOB, tmp_path / "run", print)
