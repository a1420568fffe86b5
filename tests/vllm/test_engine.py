"""The real engine over a small Llama with real weights, held against transformers token by token."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from fa4_core import counters

LAYERS, VOCABULARY, NEW_TOKENS, CHUNK = 2, 512, 8, 128
WORDS = torch.randint(3, VOCABULARY, (400,), generator=torch.Generator().manual_seed(0)).tolist()
# Each wave is sent at once, after the one before has been answered: its prompts find what those before left behind.
WAVES = [
    [WORDS[:20], WORDS[:300], WORDS[300:390], [17]],  # the second takes chunks while the first is decoding
    [WORDS[:300] + [7, 8, 9], WORDS[:150] + [5] * 40, [400] * 33, WORDS[300:380] + [11] * 200],
]
PROMPTS = [prompt for wave in WAVES for prompt in wave]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="settings are those of a CPU")


def serve(model, backend, page_size):
    """Answers, what was found in the prefix cache, and every step's tokens by request, from the scheduler itself."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=CHUNK, block_size=page_size, enable_prefix_caching=True, enforce_eager=True,
        attention_backend=backend,
    )  # fmt: skip
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            steps.append(dict(output.num_scheduled_tokens))
        return output

    scheduler.schedule = watched
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    answers, cached = [], []
    for wave in WAVES:
        for output in llm.generate([{"prompt_token_ids": p} for p in wave], sampling, use_tqdm=False):
            tokens = list(output.outputs[0].token_ids)
            logs = [at[token].logprob for token, at in zip(tokens, output.outputs[0].logprobs)]
            answers.append((tokens, logs))
            cached.append(output.num_cached_tokens)
    del llm, scheduler
    gc.collect()
    return answers, cached, steps


@pytest.mark.parametrize("page_size", [16, 64, 1])
def test_ours_is_transformers_token_by_token(llama, greedy, page_size, caplog):
    caplog.set_level("INFO", "fa4")
    answers, cached, steps = serve(llama, "CUSTOM", page_size)
    expected = greedy(PROMPTS, NEW_TOKENS)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert max(abs(a - b) for (_, x), (_, y) in zip(answers, expected) for a, b in zip(x, y)) < 1e-4
    assert cached[4] == 300 // page_size * page_size, "a whole prompt's pages were found again"
    assert cached[5] == 150 // page_size * page_size
    assert max(sum(step.values()) for step in steps) <= CHUNK < len(PROMPTS[1])
    assert any(1 in step.values() and max(step.values()) > 1 for step in steps), "decode rows beside prefill rows"
    counted, scheduled = counters.stats(), sum(sum(step.values()) for step in steps)
    assert counted["vllm.scheduled_tokens"] == scheduled
    assert counted["prefill.query_tokens.reference"] == LAYERS * scheduled
    assert counted["prefill.calls.reference"] == LAYERS * len(steps)
    lines = re.findall(r"fa4-core .* in vllm .*: reference for \[.*page size (\d+)", caplog.text)
    assert lines == [str(page_size)], "one line, once"


def test_the_engines_own_backend_does_not_come_through_us(llama):
    serve(llama, None, 32)  # the smallest that it serves
    assert not any(name.startswith("prefill.") for name in counters.stats())
