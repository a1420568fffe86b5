"""Runs in vLLM's environment: the texts through one attention backend of the real engine, in bf16, as it is served.

python run_vllm.py JOB.json RESULT.json
"""

from __future__ import annotations

from answers import counted, worker


def main(job: dict) -> dict:
    """Score the texts, answer the questions, continue the book."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=job["chunk"],
        kv_cache_memory_bytes=2 << 30,  # other engines share the card, which this is held against at the start
        gpu_memory_utilization=0.05,
        enable_prefix_caching=True,
        attention_backend=job["backend"],
        seed=0,
        **job.get("options", {}),
    )

    def ask(prompts: list[list[int]], **sampling: object) -> list:
        inputs = [{"prompt_token_ids": p} for p in prompts]
        chosen = SamplingParams(temperature=0.0, detokenize=False, **sampling)
        return llm.generate(inputs, chosen, use_tqdm=False)

    def step(entry: dict, token: int) -> float:
        return entry[token].logprob

    scored = {}
    for text, answer in zip(job["texts"], ask([t["tokens"] for t in job["texts"]], max_tokens=1, prompt_logprobs=0)):
        scored[text["name"]] = [step(e, t) for e, t in zip(answer.prompt_logprobs[1:], text["tokens"][1:], strict=True)]
    questions = [q["tokens"] for q in job["questions"]]
    answers = ask(questions, max_tokens=job["answer_tokens"], ignore_eos=True)
    book, following, cached = job["texts"][-1]["tokens"], {}, 0
    for state in ("cold", "cached"):
        following[state] = []
        for n in job["places"]:
            if state == "cold":
                llm.reset_prefix_cache()
            (answer,) = ask([book[:n]], max_tokens=1, logprobs=0)
            (token,) = answer.outputs[0].token_ids
            following[state].append([token, step(answer.outputs[0].logprobs[0], token)])
            cached += (answer.num_cached_tokens or 0) * (1 if state == "cached" else -len(book))
    return {
        "engine": "vllm",
        "version": vllm.__version__,
        "torch": torch.__version__,
        "scored": scored,
        "answers": {q["name"]: list(a.outputs[0].token_ids) for q, a in zip(job["questions"], answers)},
        "following": following,
        "cached_tokens": cached,
        "counters": counted(),
    }


if __name__ == "__main__":
    worker(main)
