"""The real engine over a small Llama with real weights, held against transformers token by token."""

from __future__ import annotations

import gc
import re

import pytest
import stub_ops
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from fa4_core import counters
from fa4_vllm import compat

LAYERS, VOCABULARY, NEW_TOKENS, CHUNK = 2, 512, 8, 128
WORDS = torch.randint(3, VOCABULARY, (400,), generator=torch.Generator().manual_seed(0)).tolist()
# Each wave is sent at once, after the one before has been answered: its prompts find what those before left behind.
WAVES = [
    [WORDS[:20], WORDS[:300], WORDS[300:390], [17]],  # the second takes chunks while the first is decoding
    [WORDS[:300] + [7, 8, 9], WORDS[:150] + [5] * 40, [400] * 33, WORDS[300:380] + [11] * 200],
    [WORDS[:300], WORDS[:64], [9] * 15, WORDS[100:380]],
]
PROMPTS = [prompt for wave in WAVES for prompt in wave]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="settings are those of a CPU")


def serve(model, backend, page_size, **more):
    """Answers, what was found in the prefix cache, and every step's tokens by request, from the scheduler itself."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=CHUNK, block_size=page_size, enable_prefix_caching=True, enforce_eager=True,
        attention_backend=backend, compilation_config={"custom_ops": ["none"]} if stub_ops.NEEDED else {}, **more,
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


def assert_close(answers, expected):
    """The same tokens, and log-probabilities within 1e-4."""
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert max(abs(a - b) for (_, x), (_, y) in zip(answers, expected) for a, b in zip(x, y)) < 1e-4


def decode_rows(steps):
    """Of each step that has any, the rows of requests that are not new and have one token."""
    seen, rows = set(), []
    for step in steps:
        rows.append(sum(tokens == 1 and name in seen for name, tokens in step.items()))
        seen |= set(step)
    return [n for n in rows if n]


@pytest.mark.parametrize(("page_size", "layout"), [(16, "HND"), (64, "NHD"), (1, None)])
def test_ours_is_transformers_token_by_token(llama, greedy, page_size, layout, caplog, monkeypatch):
    if layout:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    caplog.set_level("INFO", "fa4")
    split_kv_cache, strides = compat.split_kv_cache, set()

    def watched(*args):
        pages = split_kv_cache(*args)
        strides.update(p.stride()[1:3] for p in pages)  # of rows and of heads
        return pages

    monkeypatch.setattr(compat, "split_kv_cache", watched)
    answers, cached, steps = serve(llama, "CUSTOM", page_size)
    assert_close(answers, greedy(PROMPTS, NEW_TOKENS))
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
    if page_size > 1:
        assert [row < head for row, head in strides] == [layout == "HND"]


def test_decode_rows_through_the_stock_backend(llama, greedy, split):
    """As on CUDA, in the real engine: its runner orders the rows, its own backend's impl takes those of decode."""
    answers, _, steps = serve(llama, "CUSTOM", 16)
    assert_close(answers, greedy(PROMPTS, NEW_TOKENS))
    counted, scheduled = counters.stats(), sum(sum(step.values()) for step in steps)
    assert split == [n for n in decode_rows(steps) for _ in range(LAYERS)]
    assert sum(split) == LAYERS * (scheduled - counted["vllm.scheduled_tokens"])
    assert counted["prefill.query_tokens.reference"] == LAYERS * counted["vllm.scheduled_tokens"]


@pytest.mark.skipif(stub_ops.NEEDED, reason="a CUDA wheel has no CPU backend")
def test_the_engines_own_cpu_backend(llama):
    """It says the same, and does not come through us."""
    theirs, _, _ = serve(llama, None, 32)  # the smallest page that it serves
    assert not any(name.startswith("prefill.") for name in counters.stats())
    ours, _, _ = serve(llama, "CUSTOM", 32)
    assert_close(ours, theirs)


def test_the_engines_own_cuda_backend(llama, split, monkeypatch):
    """FLASH_ATTN itself, its kernels in plain torch, says the same, and does not come through us."""
    path = AttentionBackendEnum.FLASH_ATTN.get_path()
    monkeypatch.setattr("fa4_vllm.platform.CpuPlatform.get_attn_backend_cls", classmethod(lambda *args, **kw: path))
    theirs, _, steps = serve(llama, "FLASH_ATTN", 16)
    assert sum(split) == LAYERS * sum(sum(step.values()) for step in steps)
    assert not any(name.startswith("prefill.") for name in counters.stats())
    monkeypatch.undo()
    ours, _, _ = serve(llama, "CUSTOM", 16)
    assert_close(ours, theirs)
