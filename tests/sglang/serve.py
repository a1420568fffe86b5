"""Run by test_engine.py in a process of its own: waves of prompts through the real engine.

python serve.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: dict) -> list[dict]:
    import sglang

    engine = sglang.Engine(**job["engine"])
    sampling = {"max_new_tokens": job["new_tokens"], "temperature": 0, "ignore_eos": True}
    answers = []
    for wave, logprobs in zip(job["waves"], job["logprobs"]):
        for answer in engine.generate(input_ids=wave, sampling_params=sampling, return_logprob=logprobs):
            meta = answer["meta_info"]
            answers.append(
                {
                    "tokens": answer["output_ids"],
                    "logprobs": [entry[0] for entry in meta.get("output_token_logprobs", ())],
                    "cached": meta["cached_tokens"],
                }
            )
    engine.shutdown()
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
