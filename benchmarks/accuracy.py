"""How far our backend and the engines' own lie from fp32, in bf16, on the same texts through both real engines.

    python benchmarks/accuracy.py prompts --model DIR --out texts.json
    python benchmarks/accuracy.py run --model DIR --texts texts.json --python vllm=PYTHON --python sglang=PYTHON \\
        --out benchmarks/results/accuracy.json
    python benchmarks/accuracy.py tasks --url http://127.0.0.1:8000/v1/completions --model M --tasks gsm8k,mmlu_pro

Engines in bf16 do not agree with each other token by token, so equal tokens test no kernel. What tests one is the
distance of each token's log-probability from what fp32 gives it. `run` scores every token of the texts, with prefill
whole and in chunks, answers the questions, and asks for the token after many places of the book, once with an empty
prefix cache and once with what comes before in it. `tasks` is for a server that runs and for data that is at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)  # transformers looks for a package that is called as kernels.py beside this file is
WHOLE, CHUNKED = 8192, 512


@dataclass(frozen=True)
class Run:
    """One backend of one engine, in one setting.

    Args:
        engine: "vllm" or "sglang".
        name: In the table.
        backend: The engine's name for it.
        chunk: Most tokens of a step.
        settings: Environment variables.
        options: Of the engine.
    """

    engine: str
    name: str
    backend: str
    chunk: int = WHOLE
    settings: dict[str, str] = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For files and lines."""
        return f"{self.engine} {self.name} {self.chunk}".replace(" ", "-").replace(",", "")


RUNS = [
    run
    for chunk in (WHOLE, CHUNKED)
    for run in (
        Run("vllm", "fa4", "CUSTOM", chunk),
        Run("vllm", "FA3", "FLASH_ATTN", chunk),
        Run("vllm", "Triton", "TRITON_ATTN", chunk),
        Run("sglang", "fa4", "fa-cute", chunk),
        Run("sglang", "FA3", "fa3", chunk),
        Run("sglang", "Triton", "triton", chunk),
    )
] + [
    Run("vllm", "fa4, V1 runner", "CUSTOM", settings={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    Run("vllm", "fa4, invariant", "CUSTOM", settings={"VLLM_BATCH_INVARIANT": "1"}),
    Run("sglang", "fa4, invariant", "fa-cute", options={"enable_deterministic_inference": True}),
]


@click.group()
def main() -> None:
    """The accuracy of both engines with our backend and with their own."""


@main.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True, help="For its tokenizer.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def prompts(model: Path, out: Path) -> None:
    """Write the texts as token ids. Needs reasoning-gym and transformers."""
    from benchmarks.quality import texts

    made = texts.make(model)
    out.write_text(json.dumps(made))
    click.echo(f"{len(made['questions'])} questions, {sum(len(t['tokens']) - 1 for t in made['texts'])} scored tokens")


@main.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--texts", type=click.Path(path_type=Path, exists=True), required=True, help="What `prompts` wrote.")
@click.option("--python", "pythons", multiple=True, required=True, help="vllm=PATH or sglang=PATH: its environment's.")
@click.option("--only", default="", help="A part of the labels of the runs to make, such as vllm-fa4.")
@click.option("--jobs", default=1, show_default=True, help="Engines at once on the card, about 8 GB each.")
@click.option("--limit", default=900, show_default=True, help="Seconds that an engine may take.")
@click.option("--device", default="cuda", show_default=True, help="Where the reference runs.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("accuracy-runs"), show_default=True)
@click.option("--commit", default="", help="Kept with the result.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result rather than the table.")
def run(
    model: Path, texts: Path, pythons: tuple[str, ...], only: str, jobs: int, limit: int, device: str, folder: Path,
    commit: str, out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Run every backend of the engines given, then the reference, and hold one against the other."""
    where = _pythons(pythons)
    asked = json.loads(texts.read_text())
    chosen = [r for r in RUNS if r.engine in where and only in r.label]
    if not chosen:
        raise click.BadParameter(f"was {only!r}; allowed: a part of one of {', '.join(r.label for r in RUNS)}")
    results: dict[str, tuple[dict, dict]] = {}
    failed: dict[str, str] = {}
    lock = threading.Lock()

    def one(r: Run) -> None:
        job = {**asked, "model": str(model.resolve()), "backend": r.backend, "name": r.name, "chunk": r.chunk}
        job["options"] = r.options
        try:
            result = _kept(job, folder / r.label) or _work(r, where[r.engine], job, folder / r.label, limit)
            with lock:
                results[r.label] = (job, result)
            click.echo(f"{r.label}: done", err=True)
        except RuntimeError as error:
            failed[r.label] = str(error)
            click.echo(f"{r.label}: {error}", err=True)

    with ThreadPoolExecutor(jobs + 1) as pool:
        reference = pool.submit(_reference, model, device, asked)
        list(pool.map(one, chosen))
    rows = _rows(model, asked, [results[r.label] for r in chosen if r.label in results], *reference.result())
    kept = {"device": _device(device), "commit": commit, "scored": sum(len(t["tokens"]) - 1 for t in asked["texts"])}
    kept |= {"versions": sorted({f"{x['engine']} {x['version']}, torch {x['torch']}" for _, x in results.values()})}
    kept |= {"failed": failed, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(kept, indent=1) + "\n")
    click.echo(json.dumps(kept, indent=1)) if as_json else _show(kept)
    sys.exit(bool(failed))


@main.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the distances into this file.")
def show(result: Path, plot: Path | None) -> None:
    """Print a kept result's table."""
    kept = json.loads(result.read_text())
    _show(kept)
    if plot:
        _draw(kept, plot)


@main.command()
@click.option("--url", required=True, help="The server's completions, such as http://127.0.0.1:8000/v1/completions.")
@click.option("--model", required=True, help="Its name there; also where the tokenizer is.")
@click.option("--tasks", "names", default="gsm8k,mmlu_pro", show_default=True)
@click.option("--concurrent", default=64, show_default=True, help="Requests at once.")
@click.option("--limit", type=int, help="Questions of each task; all where left out.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("lm-eval"), show_default=True)
def tasks(url: str, model: str, names: str, concurrent: int, limit: int | None, out: Path) -> None:
    """Run lm-eval's tasks against a server. Needs `pip install lm-eval[api]` and the tasks' data."""
    options = f"model={model},base_url={url},num_concurrent={concurrent},tokenized_requests=False"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", options]
    command += ["--tasks", names, "--output_path", str(out), *(["--limit", str(limit)] if limit else [])]
    sys.exit(subprocess.run(command, check=False).returncode)


def _pythons(given: tuple[str, ...]) -> dict[str, str]:
    where = dict(item.partition("=")[::2] for item in given)
    for engine, path in where.items():
        if engine not in ("vllm", "sglang") or not Path(path).exists():
            raise click.BadParameter(
                f"--python was {engine}={path}; allowed: vllm= or sglang= and an interpreter's path"
            )
    return where


def _kept(job: dict, folder: Path) -> dict | None:
    """What the same job gave in an earlier run into the same folder."""
    asked, result = folder / "job.json", folder / "result.json"
    if not result.exists() or json.loads(asked.read_text()) != job:
        return None
    return json.loads(result.read_text())


def _work(run: Run, python: str, job: dict, folder: Path, limit: int) -> dict:
    """Run a worker to its end; RuntimeError with the end of its log where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    settings = {**os.environ, **run.settings, "FA4_STATS_DIR": str((folder / "counters").resolve())}
    command = [python, str(HERE / "quality" / f"run_{run.engine}.py"), "job.json", "result.json"]
    with (folder / "log").open("w") as log:
        try:
            done = subprocess.run(command, cwd=folder, env=settings, stdout=log, stderr=log, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took more than {limit} s; its log is {folder / 'log'}") from None
    if done.returncode or not (folder / "result.json").exists():
        tail = (folder / "log").read_text(errors="replace").splitlines()[-12:]
        raise RuntimeError(f"ended with status {done.returncode}; {folder / 'log'} ends:\n" + "\n".join(tail))
    return json.loads((folder / "result.json").read_text())


def _reference(model: Path, device: str, asked: dict) -> tuple[dict, torch.Tensor]:
    """What fp32 makes of the texts and questions, and its log-probabilities after each of the book's places."""
    from benchmarks.quality.reference import Reference

    reference = Reference(model, device)
    known = {"scored": {t["name"]: reference.score(t["tokens"]) for t in asked["texts"]}}
    known["answers"] = {q["name"]: reference.greedy(q["tokens"], asked["answer_tokens"]) for q in asked["questions"]}
    # The token after the first n is what row n - 1 says.
    return known, reference.logs(asked["texts"][-1]["tokens"])[[n - 1 for n in asked["places"]]].cpu()


def _rows(model: Path, asked: dict, results: list[tuple[dict, dict]], known: dict, after: torch.Tensor) -> list[dict]:
    from transformers import AutoTokenizer

    from benchmarks.quality import measure

    tokenizer = AutoTokenizer.from_pretrained(model)
    known["following"] = {
        f"{n} {token}": float(logs[token])
        for _, result in results
        for following in result["following"].values()
        for n, logs, (token, _) in zip(asked["places"], after, following)
    }
    rows = []
    for job, result in results:
        words = {name: tokenizer.decode(tokens) for name, tokens in result["answers"].items()}
        rows += measure.rows(result, job, known, words)
    measure.compare(rows)
    own = {name: tokenizer.decode(tokens) for name, tokens in known["answers"].items()}
    fp32 = {"engine": "transformers", "version": "", "counters": {}, **known}
    fp32["following"] = {}
    last = measure.rows(fp32, {**asked, "name": "fp32", "chunk": WHOLE}, known, own)
    measure.compare(last)
    return rows + last


def _device(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def _show(kept: dict) -> None:
    columns = (
        "engine",
        "backend",
        "setting",
        "tokens",
        "mean",
        "max",
        "to FA3",
        "perplexity",
        "greedy",
        "gsm_symbolic",
    )
    table = Table(*columns)
    for r in kept["rows"]:
        more = [f"{r[key]:.4g}" if key in r else "" for key in ("perplexity", "greedy_tokens_equal", "gsm_symbolic")]
        far = [f"{r['mean_abs_dlogprob']:.5f}", f"{r['max_abs_dlogprob']:.3f}"]
        beside = f"{r['mean_to_fa3']:.3f} ± {r['mean_to_fa3_half']:.3f}" if "mean_to_fa3" in r else ""
        table.add_row(r["engine"], r["backend"], r["setting"], str(r["tokens"]), *far, beside, *more)
    Console(width=150).print(table)


def _draw(kept: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in kept["rows"] if "perplexity" in r and r["engine"] != "transformers"]
    fig, ax = plt.subplots(figsize=(10, 5))
    ax.barh([f"{r['engine']} {r['backend']}, {r['setting']}" for r in rows], [r["mean_abs_dlogprob"] for r in rows])
    ax.set_xlabel("mean distance of a token's log-probability from fp32")
    ax.invert_yaxis()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
