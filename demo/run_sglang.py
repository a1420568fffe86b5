"""Runs in SGLang's environment: the prompts through one attention backend of the real engine.

    python run_sglang.py JOB.json RESULT.json

The scheduler is a process of its own. What it scheduled is read from the lines that it logs for every prefill, and
what fa4_core counted there from the counters that it published.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

PAGE_SIZE = 1  # the engine's default


def main(job: dict) -> dict:
    """Serve the job's prompts; what came out, and the engine's own account of it."""
    import sglang
    import torch

    began = time.perf_counter()
    engine = sglang.Engine(
        model_path=job["model"],
        skip_tokenizer_init=True,
        device=job["device"],
        dtype=job["dtype"],
        context_length=job["longest"],
        max_total_tokens=3 * job["longest"] + 4096,
        max_running_requests=16,
        chunked_prefill_size=job["chunk"],
        page_size=PAGE_SIZE,
        disable_cuda_graph=True,
        random_seed=0,
        log_level="info",
        **job["backends"],
    )
    print(f"demo: up after {time.perf_counter() - began:.0f} s", flush=True)
    sampling = {"max_new_tokens": job["new_tokens"], "temperature": 0, "ignore_eos": True}
    outputs, began = [], time.perf_counter()
    for i, wave in enumerate(job["waves"]):
        print(f"demo: wave {i + 1} of {len(job['waves'])}", flush=True)
        answers = engine.generate(input_ids=[p["tokens"] for p in wave], sampling_params=sampling, return_logprob=True)
        for prompt, answer in zip(wave, answers):
            meta = answer["meta_info"]
            logs = [entry[0] for entry in meta["output_token_logprobs"]]
            cached = meta["cached_tokens"]
            outputs.append({"name": prompt["name"], "tokens": answer["output_ids"], "logprobs": logs, "cached": cached})
    seconds = time.perf_counter() - began
    engine.shutdown()
    return {
        "engine": "SGLang",
        "version": sglang.__version__,
        "torch": torch.__version__,
        "backend": " + ".join(dict.fromkeys(job["backends"].values())),
        "layers": json.loads((Path(job["model"]) / "config.json").read_text())["num_hidden_layers"],
        "page_size": PAGE_SIZE,
        "seconds": seconds,
        "outputs": outputs,
        "counters": counted(),
    }


def counted() -> dict[str, int]:
    """What the engine's processes published, added up; they share one folder that is this run's own."""
    from fa4_core.counters import read_published

    total: dict[str, int] = {}
    for process in read_published():
        for name, value in process.counters.items():
            total[name] = total.get(name, 0) + value
    return total


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
