"""What differs between the engines: how a server starts, what its client is told, and what that calls things."""

from __future__ import annotations

from pathlib import Path

from .work import Work

OURS, DEFAULT = "fa4", "the engine's default"
TOKENS = 2048  # more than a prompt and its answer, for a chat template or a special token
MOST = 32768 + TOKENS


def server(engine: str, python: str, model: Path, port: int, backend: str, pool_gib: float, device: str) -> list[str]:
    """The command that serves.

    Args:
        engine: "vllm" or "sglang".
        python: Its environment's interpreter.
        model: The model's directory.
        port: Where it listens.
        backend: OURS or DEFAULT.
        pool_gib: Of the KV pool, the same for both servers.
        device: "cuda" or "cpu".
    """
    common = ["--load-format", "dummy", "--dtype", "bfloat16", "--port", str(port)]
    if engine == "vllm":
        # The command line asks for the version of "vllm", which a build for CPUs is not called.
        serve = (
            ["vllm.entrypoints.cli.main", "serve"]
            if device == "cuda"
            else ["vllm.entrypoints.openai.api_server", "--model"]
        )
        command = [python, "-m", *serve, str(model), *common, "--max-model-len", str(MOST)]
        command += ["--kv-cache-memory-bytes", str(int(pool_gib * 2**30))]
        if device == "cuda":
            command += ["--gpu-memory-utilization", "0.4"]
        else:
            command += ["--enforce-eager"]  # compiling takes a CPU minutes
        return command + (["--attention-backend", "CUSTOM"] if backend == OURS else [])
    tokens = int(pool_gib * 2**30) // _bytes_of_a_token(model)
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *common, "--context-length", str(MOST)]
    command += ["--max-total-tokens", str(tokens), "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    if device == "cpu":
        ours = ["--attention-backend", "fa-cute"] if backend == OURS else ["--attention-backend", "torch_native"]
        return [*command, "--device", "cpu", "--disable-overlap-schedule", *ours]
    return command + (["--prefill-attention-backend", "fa-cute"] if backend == OURS else [])


def client(engine: str, model: Path, port: int, work: Work, seed: int) -> list[str]:
    """Arguments of the engine's own client."""
    common = ["--model", str(model), "--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(work.prompts)]
    common += ["--seed", str(seed), "--disable-tqdm", "--ready-check-timeout-sec", "0"]
    common += ["--request-rate", str(work.rate or "inf")]
    if work.concurrency:
        common += ["--max-concurrency", str(work.concurrency)]
    lengths = ["--random-input-len", str(work.input), "--random-output-len", str(work.output)]
    if engine == "vllm":
        more = ["--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "random", *lengths]
        more += ["--random-range-ratio", str(work.spread), "--random-prefix-len", str(work.prefix)]
        more += ["--temperature", "0", "--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "50,95,99"]
        return common + more
    more = ["--backend", "sglang", "--warmup-requests", "0"]
    if not work.prefix:
        # Here 1 is no spread and 0 any length up to the given.
        return [*common, *more, "--dataset-name", "random-ids", *lengths, "--random-range-ratio", str(1 - work.spread)]
    more += ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "1"]
    more += ["--gsp-prompts-per-group", str(work.prompts), "--gsp-system-prompt-len", str(work.prefix)]
    more += ["--gsp-question-len", str(work.input), "--gsp-output-len", str(work.output)]
    return [*common, *more, "--gsp-range-ratio", str(1 - work.spread)]


RESET = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}  # vLLM has it in its development mode alone
SETTINGS = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}, "sglang": {}}


def measures(engine: str, result: dict) -> dict[str, float]:
    """The table's figures out of what a client reports.

    Raises:
        RuntimeError: A request failed.
    """
    end = "e2el" if engine == "vllm" else "e2e_latency"
    took, done = result["duration"], result["completed"]
    if done != result["num_prompts"]:
        raise RuntimeError(f"{done} of {result['num_prompts']} requests were answered")
    found = {
        "requests_per_s": result["request_throughput"],
        "input_tokens_per_s": result["total_input_tokens"] / took,
        "total_tokens_per_s": (result["total_input_tokens"] + result["total_output_tokens"]) / took,
        "concurrency": result[f"mean_{end}_ms"] * done / took / 1000,
    }
    for name, theirs in (("ttft", "ttft"), ("itl", "itl"), ("e2e", end)):
        for which in ("mean", "median", "p95", "p99"):
            value = result.get(f"{which}_{theirs}_ms")
            if value is not None:
                found[f"{name}_{which}_ms"] = value
    return found


def _bytes_of_a_token(model: Path) -> int:
    import json

    config = json.loads((model / "config.json").read_text())
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]  # K and V, two bytes
