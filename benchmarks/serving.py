"""Time to the first token with our backend and with the engine's default, side by side on one card.

    python benchmarks/serving.py run --engine vllm --python PYTHON --tokenizer DIR \\
        --out benchmarks/results/serving-vllm.json
    python benchmarks/serving.py show benchmarks/results/serving-vllm.json --plot docs/images/serving-vllm.png

Two servers of the real engine run at once, one with ours, and the engine's own client drives one at a time, the order
turning from round to round. Each round has a second run of the default: what it differs by from the first is what
nothing differs by. The prefix caches are emptied before each run, and all three runs of a round get the same prompts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

sys.path[0] = str(Path(__file__).parents[1])  # transformers looks for a package called as kernels.py beside this is

from benchmarks.serve import engines, report, shapes  # noqa: E402
from benchmarks.serve.engines import DEFAULT, OURS  # noqa: E402
from benchmarks.serve.processes import Process, all_of, healthy, post  # noqa: E402
from benchmarks.serve.work import WORK, shrunk  # noqa: E402

PORTS = {OURS: 8123, DEFAULT: 8124}
ORDER = (OURS, DEFAULT, report.AGAIN)


@click.group()
def main() -> None:
    """The serving benchmark."""


@main.command()
@click.option("--engine", type=click.Choice(["vllm", "sglang"]), required=True)
@click.option("--python", required=True, help="The interpreter of the engine's environment, with our adapter in it.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True), required=True, help="A directory that has one."
)
@click.option("--shape", type=click.Choice(list(shapes.SHAPES)), default="llama-3-8b", show_default=True)
@click.option("--work", "names", multiple=True, type=click.Choice(list(WORK)), help="All where left out.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--pool-gib", default=32.0, show_default=True, help="KV pool of each server.")
@click.option("--seconds", default=3600, show_default=True, help="No round starts after so many; what was run counts.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: tiny work.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="A folder for the servers' logs; a temporary one without."
)
@click.option("--commit", default="", help="Kept with the result.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result rather than the tables.")
def run(
    engine: str, python: str, tokenizer: Path, shape: str, names: tuple[str, ...], rounds: int, pool_gib: float,
    seconds: int, device: str, logs: Path | None, commit: str, out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Start both servers, let the client drive them in turn, and keep each round as it ends."""
    start = time.monotonic()
    folder = logs or Path(tempfile.mkdtemp(prefix="serving-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = shapes.write(shape, tokenizer, folder)
    asked = [WORK[name] if device == "cuda" else shrunk(WORK[name]) for name in names or WORK]
    settings = {**engines.SETTINGS[engine], "HF_HUB_OFFLINE": "1", "FA4_STATS_DIR": str(folder / "counters")}
    servers = {
        backend: Process(
            f"the server with {backend}", engines.server(engine, python, model, port, backend, pool_gib, device),
            folder / f"server-{port}.log", settings,
        )
        for backend, port in PORTS.items()
    }  # fmt: skip
    talk = [python, str(Path(__file__).parent / "serve" / "client.py"), engine]
    client = Process("the client", talk, folder / "client.log", settings, talks=True)
    kept = {"device": _device(device), "engine": engine, "versions": _versions(python, engine), "commit": commit}
    kept |= {"shape": shapes.SHAPES[shape], "pool_gib": pool_gib, "works": [asdict(w) for w in asked], "runs": []}
    with all_of([*servers.values(), client]), Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=rounds * len(asked) * len(ORDER))
        client.hear()
        while not all(healthy(port) for port in PORTS.values()):
            for server in servers.values():
                server.alive()
            if time.monotonic() - start > seconds:
                raise click.ClickException(f"a server did not answer within {seconds} s; logs are in {folder}")
            time.sleep(1)
        kept["start_s"] = round(time.monotonic() - start)
        for backend, port in PORTS.items():  # the first requests of a server compile, and touch memory
            for w in asked:
                progress.update(bar, description=f"warm-up, {backend}")
                _drive(client, engine, model, port, replace(w, prompts=2), seed=0)
        for i in range(rounds):
            for w in asked:
                if time.monotonic() - start > seconds:
                    progress.console.print(f"stopped after {seconds} s, in round {i + 1}")
                    break
                for backend in ORDER[i % 3 :] + ORDER[: i % 3]:
                    progress.update(bar, description=f"{w.name}, {backend}")
                    port = PORTS.get(backend, PORTS[DEFAULT])
                    post(port, engines.RESET[engine])
                    found = _drive(client, engine, model, port, w, seed=i + 1)
                    kept["runs"].append({"work": w.name, "round": i, "backend": backend, "measures": found})
                    progress.advance(bar)
                _keep(kept, out)
    click.echo(json.dumps(kept, indent=1)) if as_json else report.show(kept)


@main.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ratios into this file.")
def show(result: Path, plot: Path | None) -> None:
    """Print a kept result's tables."""
    kept = json.loads(result.read_text())
    kept["rows"] = report.rows(kept["runs"])
    report.show(kept)
    if plot:
        report.draw(kept, plot)


def _drive(client: Process, engine: str, model: Path, port: int, work: engines.Work, seed: int) -> dict[str, float]:
    client.say(engines.client(engine, model, port, work, seed))
    answer = client.hear()
    if "error" in answer:
        raise click.ClickException(f"{work.name} at port {port}: {answer['error']}")
    return engines.measures(engine, answer["result"])


def _keep(kept: dict, out: Path) -> None:
    kept["rows"] = report.rows(kept["runs"])
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_suffix(".part")
    fresh.write_text(json.dumps(kept, indent=1) + "\n")
    fresh.replace(out)


def _device(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def _versions(python: str, engine: str) -> dict[str, str | None]:
    import subprocess

    code = f"""
import json
from importlib import metadata
def of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps({{n: of(n) for n in ("{engine}", "fa4-core", "fa4-{engine}", "torch")}}))
"""
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
