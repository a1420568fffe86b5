"""The real engine over a small Llama with real weights, held against transformers token by token."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fa4_core.counters import read_published

LAYERS, VOCABULARY, NEW_TOKENS, CHUNK = 2, 512, 8, 128
WORDS = torch.randint(3, VOCABULARY, (400,), generator=torch.Generator().manual_seed(0)).tolist()
# Each wave is sent at once, after the one before has been answered: its prompts find what those before left behind.
WAVES = [
    [WORDS[:20], WORDS[:300], WORDS[300:390]],  # the second takes chunks while the first is decoding
    [WORDS[:300] + [7, 8, 9]],
    [WORDS[:150] + [5] * 40, WORDS[:260] + [6] * 3, [400] * 33, WORDS[300:380] + [11] * 200],
    [[17], WORDS[5:6] * 129, WORDS[:1], WORDS[:300] + [7, 8, 9]],
]
PROMPTS = [prompt for wave in WAVES for prompt in wave]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="settings are those of a CPU")


@pytest.fixture(scope="module")
def expected(greedy) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, from transformers in fp32."""
    return greedy(PROMPTS, NEW_TOKENS)


@dataclass
class Served:
    """What came of a run."""

    answers: list[dict]
    log: str
    counters: dict[str, int]

    @property
    def new_prompt_tokens(self) -> int:
        """Prompt tokens that no cache held, as the engine reports them with each answer."""
        return sum(len(prompt) - answer["cached"] for prompt, answer in zip(PROMPTS, self.answers))


def serve(model: Path, folder: Path, logprobs: list[bool], **options) -> Served:
    job = {
        "engine": {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 4096,
            "max_running_requests": 8,
            "chunked_prefill_size": CHUNK,
            "disable_cuda_graph": True,
            "log_level": "info",
            **options,
        },
        "new_tokens": NEW_TOKENS,
        "waves": WAVES,
        "logprobs": logprobs,  # asked for or not, by wave
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(Path(__file__).parent / "serve.py"), "job.json", "result.json"]
    settings = {**os.environ, "FA4_STATS_DIR": str(folder / "counters")}
    done = subprocess.run(
        command, cwd=folder, env=settings, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    counters: dict[str, int] = {}
    for process in read_published(folder / "counters"):
        assert not process.alive, "the scheduler is gone; its counters are not"
        counters |= process.counters
    return Served(json.loads((folder / "result.json").read_text()), done.stdout, counters)


def check_answers(served: Served, expected: list[tuple[list[int], list[float]]], page_size: int) -> None:
    """Whatever served them: tokens, their log-probabilities, what was found in the cache, and the chunks."""
    assert [a["tokens"] for a in served.answers] == [tokens for tokens, _ in expected]
    far = [
        abs(ours - theirs)
        for answer, (_, wanted) in zip(served.answers, expected)
        for ours, theirs in zip(answer["logprobs"], wanted)
    ]
    assert len(far) >= 5 * NEW_TOKENS
    assert max(far) < 1e-4
    whole = {prompt: len(PROMPTS[prompt]) // page_size * page_size for prompt in (1, 7)}
    assert served.answers[3]["cached"] == whole[1], "the second prompt's pages were found again"
    assert served.answers[7]["cached"] >= 80 // page_size * page_size
    chunks = [int(n) for n in re.findall(r"Prefill batch.*?#new-token: (\d+)", served.log)]
    assert max(chunks) <= CHUNK < max(map(len, PROMPTS))
    # What the engine says it scheduled: 0.5.14 counts whole pages.
    assert sum(chunks) - served.new_prompt_tokens in range(len(chunks) * (page_size - 1) + 1)


def check_ours(served: Served, page_size: int) -> None:
    """That all of it came through prefill()."""
    lines = re.findall(r"fa4-core .* in sglang .*: reference for \[.*page size (\d+)", served.log)
    assert lines == [str(page_size)], "one line, once, where the default log level shows it"
    counted = served.counters
    assert counted["prefill.query_tokens.reference"] == LAYERS * counted["sglang.scheduled_tokens"]
    assert counted["prefill.calls.reference"] == LAYERS * counted["sglang.steps"]


def test_both_phases_on_slots_of_one_token_with_mixed_batches(llama, expected, tmp_path):
    asked = [False, True, False, True]  # SGLang mixes no batch with a request that asks for logprobs
    served = serve(llama, tmp_path, asked, page_size=1, attention_backend="fa-cute", enable_mixed_chunk=True)
    check_answers(served, expected, page_size=1)
    check_ours(served, page_size=1)
    decoded = len(PROMPTS) * (NEW_TOKENS - 1)
    # Up to 0.5.20 a step is scheduled before the last one is known to have ended a request.
    ahead = served.counters["sglang.scheduled_tokens"] - served.new_prompt_tokens - decoded
    assert ahead in range(len(PROMPTS) + 1)
    # SGLang 0.5.23 hands a mixed batch to its backends as EXTEND: some of its tokens were then decode rows.
    in_prefill = sum(served.counters.get(f"sglang.scheduled_tokens.{mode}", 0) for mode in ("EXTEND", "MIXED"))
    assert in_prefill > served.new_prompt_tokens


def test_prefill_on_pages_of_16_beside_another_backends_decode(llama, expected, tmp_path):
    served = serve(
        llama, tmp_path, [True] * len(WAVES), page_size=16,
        prefill_attention_backend="fa-cute", decode_attention_backend="torch_native",
    )  # fmt: skip
    check_answers(served, expected, page_size=16)
    check_ours(served, page_size=16)
    assert served.counters["sglang.scheduled_tokens"] == served.new_prompt_tokens
    assert "sglang.scheduled_tokens.DECODE" not in served.counters


def test_the_engines_own_backend_gives_the_same(llama, expected, tmp_path):
    """If not, the others' answers are the engine's doing and none of ours."""
    served = serve(llama, tmp_path, [True] * len(WAVES), page_size=1, attention_backend="torch_native")
    check_answers(served, expected, page_size=1)
    assert served.counters == {}
