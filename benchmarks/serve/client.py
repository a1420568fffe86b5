"""Runs in an engine's environment for as long as the benchmark does: its own client, a run for each line that comes.

python client.py ENGINE < lines of {"arguments": [...], "seed": n} > lines of results

The client's import takes tens of seconds, which a process for each run would spend with the card idle.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path


def _vllm(arguments: list[str]) -> dict:
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    return serve.main(parser.parse_args(arguments))


def _sglang(arguments: list[str]) -> dict:
    from sglang.benchmark import serving

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.jsonl"
        sys.argv = ["bench_serving", *arguments, "--output-file", str(file)]
        serving.cli_main()
        result = json.loads(file.read_text().splitlines()[-1])
    return {**result, "num_prompts": int(arguments[arguments.index("--num-prompts") + 1])}


def _once(module: object, name: str) -> None:
    """Let the same arguments give the same prompts without making them again: each server gets them in every round."""
    make = getattr(module, name)
    known: dict[str, list] = {}

    def again(args: argparse.Namespace, *more: object) -> list:
        key = repr(sorted((k, repr(v)) for k, v in vars(args).items() if k not in ("base_url", "output_file")))
        if key not in known:
            known[key] = make(args, *more)
        return copy.deepcopy(known[key])

    setattr(module, name, again)


@cache
def _prepare(engine: str) -> None:
    if engine == "vllm":
        from vllm.benchmarks import serve

        _once(serve, "get_samples")
    else:
        from sglang.benchmark import serving

        _once(serving, "get_dataset")


def main() -> None:
    """Answer until the input ends."""
    engine = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the client prints goes to the log
    _prepare(engine)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = {"result": {"vllm": _vllm, "sglang": _sglang}[engine](json.loads(line))}
        except (Exception, SystemExit):
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
