"""Runs in vLLM's environment: the prompts through one attention backend of the real engine, in this process.

python run_vllm.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(job: dict) -> dict:
    """Serve the job's prompts; what came out, what was scheduled, and what fa4_core counted."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    options = {"attention_backend": "CUSTOM"} if job["ours"] else {}
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["longest"],
        max_num_seqs=16,
        max_num_batched_tokens=job["chunk"],
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
        **options,
    )
    print(f"demo: up after {time.perf_counter() - began:.0f} s", flush=True)
    core = llm.llm_engine.engine_core.engine_core
    steps = watch(core.scheduler)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["new_tokens"], logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs, began = [], time.perf_counter()
    for i, wave in enumerate(job["waves"]):
        print(f"demo: wave {i + 1} of {len(job['waves'])}", flush=True)
        answers = llm.generate([{"prompt_token_ids": p["tokens"]} for p in wave], sampling, use_tqdm=False)
        for prompt, answer in zip(wave, answers):
            tokens = list(answer.outputs[0].token_ids)
            logs = [position[token].logprob for token, position in zip(tokens, answer.outputs[0].logprobs)]
            cached = answer.num_cached_tokens
            outputs.append({"name": prompt["name"], "tokens": tokens, "logprobs": logs, "cached": cached})
    seconds = time.perf_counter() - began
    runner = core.model_executor.driver_worker.model_runner
    layers = [m for m in runner.model.modules() if type(m).__name__ == "Attention"]
    return {
        "engine": "vLLM",
        "version": vllm.__version__,
        "torch": torch.__version__,
        "backend": layers[0].attn_backend.get_name(),
        "layers": len(layers),
        "page_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "seconds": seconds,
        "outputs": outputs,
        "prefill_chunks": chunks(steps),
        "largest_step": max(sum(s.values()) for s in steps),
        "scheduled": sum(sum(s.values()) for s in steps),
        "counters": counted(),
    }


def watch(scheduler: object) -> list[dict[str, int]]:
    """Every step's tokens by request, as the engine's own scheduler hands them out; filled while it runs."""
    steps: list[dict[str, int]] = []
    original = scheduler.schedule

    def schedule(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        if output.num_scheduled_tokens:
            steps.append(dict(output.num_scheduled_tokens))
        return output

    scheduler.schedule = schedule
    return steps


def chunks(steps: list[dict[str, int]]) -> list[int]:
    """In how many steps each request's prompt was taken in, the largest first."""
    counts: dict[str, int] = {}
    for step in steps:
        for request, tokens in step.items():
            counts[request] = counts.get(request, 0) + (tokens > 1)
    return sorted(counts.values(), reverse=True)


def counted() -> dict[str, int]:
    """What fa4_core counted in this process; nothing where it was never imported."""
    core = sys.modules.get("fa4_core")
    return core.stats() if core else {}


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
