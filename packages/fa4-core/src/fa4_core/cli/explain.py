"""fa4 explain: which kernel would serve a layer, and why each other one would not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from ..errors import UnsupportedError
from ..kernels import Question, Verdict
from ..kernels import explain as ask
from ..model_config import layers_of
from ..spec import FLOATS, LayerSpec
from ..target import Target
from .show import as_json, print_json, print_table

DTYPES = {str(d).removeprefix("torch."): d for d in FLOATS}


def this_machine() -> Target:
    """The first GPU where torch sees one, else the CPU."""
    return Target.of(torch.device("cuda", 0)) if torch.cuda.is_available() else Target("cpu")


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="A config.json, or its directory.")
@click.option("--tp", default=1, show_default=True, help="With --model: ranks that share the heads.")
@click.option("--q-heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--head-dim-v", type=int, help="Of value heads.  [default: --head-dim]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bfloat16, or the model's]")
@click.option("--causal/--full", default=True, show_default=True)
@click.option("--window", type=int, help="Keys before its own that a query sees.  [default: all]")
@click.option("--softcap", is_flag=True, help="The layer caps its scores.")
@click.option("--sinks", is_flag=True, help="The layer has sinks.")
@click.option("--page-size", type=int, help="Rows of a page.  [default: any]")
@click.option("--target", help="cpu, or a compute capability such as sm_90.  [default: this machine]")
@click.option("--invariant", is_flag=True, help="Ask for the batch-invariant setting.")
@click.option("--kernel", help="Ask for this kernel by name.")
@as_json
def explain(
    model: Path | None,
    tp: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str | None,
    causal: bool,
    window: int | None,
    softcap: bool,
    sinks: bool,
    page_size: int | None,
    target: str | None,
    invariant: bool,
    kernel: str | None,
    as_json: bool,
) -> None:
    """Which kernel would serve a layer, and why each other one would not.

    Describe the layer by the options, or name a model's config to ask for each kind of layer that it has. The exit
    status is 1 where a layer is served by no kernel.
    """
    described = ("q_heads", "kv_heads", "head_dim", "head_dim_v", "causal", "window", "softcap", "sinks")
    context = click.get_current_context()
    given = [
        n for n in (described if model else ("tp",)) if context.get_parameter_source(n) is ParameterSource.COMMANDLINE
    ]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{words} {'with' if model else 'without'} --model, which says what the layers are")
    try:
        if model is not None:
            layers = layers_of(model, tensor_parallel=tp, dtype=DTYPES[dtype] if dtype else None)
        else:
            layer = LayerSpec(
                q_heads,
                kv_heads,
                head_dim,
                head_dim if head_dim_v is None else head_dim_v,
                dtype=DTYPES[dtype or "bfloat16"],
                causal=causal,
                window=(window, None),
                softcap=softcap,
                sinks=sinks,
            )
            layers = {layer: 1}
        where = Target.parse(target) if target is not None else this_machine()
        answers = {
            Question(spec, page_size, where, invariant): ask(Question(spec, page_size, where, invariant), kernel)
            for spec in layers
        }
    except UnsupportedError as error:
        raise click.ClickException(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        print_json([_as_data(q, layers[q.spec], verdicts) for q, verdicts in answers.items()])
    else:
        for question, verdicts in answers.items():
            title = str(question) if model is None else f"{layers[question.spec]} layers {question}"
            rows = [(v.kernel, "serves" if v.selected else "no", v.reason or "") for v in verdicts]
            print_table(title, ("kernel", "", "why not"), rows)
    if not all(any(v.selected for v in verdicts) for verdicts in answers.values()):
        raise SystemExit(1)


def _as_data(question: Question, count: int, verdicts: list[Verdict]) -> dict[str, Any]:
    spec = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in asdict(question.spec).items()
    }
    return {
        "layers": count,
        "spec": spec,
        "page_size": question.page_size,
        "target": str(question.target),
        "invariant": question.invariant,
        "kernel": next((v.kernel for v in verdicts if v.selected), None),
        "kernels": [asdict(v) for v in verdicts],
    }
