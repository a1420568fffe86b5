"""Runs in SGLang's environment: the texts through one attention backend of the real engine, in bf16, as it is served.

python run_sglang.py JOB.json RESULT.json
"""

from __future__ import annotations

from answers import counted, worker


def main(job: dict) -> dict:
    """Score the texts, answer the questions, continue the book."""
    import sglang
    import torch

    backends = {"attention_backend": job["backend"]}
    if job["backend"] == "fa-cute":  # as it is served: decode stays with the engine's own
        backends = {"prefill_attention_backend": "fa-cute", "decode_attention_backend": "fa3"}
    engine = sglang.Engine(
        model_path=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=8192,
        max_total_tokens=65536,  # other engines share the card
        mem_fraction_static=0.9,
        max_running_requests=64,
        chunked_prefill_size=job["chunk"],
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=0,
        log_level="info",
        **backends,
        **job.get("options", {}),
    )

    def ask(prompts: list[list[int]], new_tokens: int, **more: object) -> list:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True, **more)

    scored = {}
    for text in job["texts"]:
        (answer,) = ask([text["tokens"]], 1, logprob_start_len=0)
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        assert [e[1] for e in entries] == text["tokens"][1:]
        scored[text["name"]] = [e[0] for e in entries]
    answers = ask([q["tokens"] for q in job["questions"]], job["answer_tokens"])
    book, following, cached = job["texts"][-1]["tokens"], {}, 0
    for state in ("cold", "cached"):
        following[state] = []
        for n in job["places"]:
            if state == "cold":
                engine.flush_cache()
            (answer,) = ask([book[:n]], 1)
            ((logprob, token, *_),) = answer["meta_info"]["output_token_logprobs"]
            following[state].append([token, logprob])
            cached += answer["meta_info"]["cached_tokens"] * (1 if state == "cached" else -len(book))
    engine.shutdown()
    return {
        "engine": "sglang",
        "version": sglang.__version__,
        "torch": torch.__version__,
        "scored": scored,
        "answers": {q["name"]: list(a["output_ids"]) for q, a in zip(job["questions"], answers)},
        "following": following,
        "cached_tokens": cached,
        "counters": counted(),
    }


if __name__ == "__main__":
    worker(main)
