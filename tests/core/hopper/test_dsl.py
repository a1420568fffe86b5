"""Where kernels come from: a folder of compiled ones, the installed DSL, or nowhere, and then select() says why."""

import json
import sys
import types
from importlib import metadata

import pytest
import torch

from fa4_core import LayerSpec, Question, Target, UnsupportedError, counters, select
from fa4_core.kernels.hopper import launch
from fa4_core.kernels.hopper.config import all_kernels
from fa4_core.kernels.hopper.objects import load, versions

HOPPER = Target("cuda", (9, 0))


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("FA4_HOPPER_OBJECTS", raising=False)
    monkeypatch.setattr(launch, "_functions", {})
    load._checked.cache_clear()


@pytest.fixture
def dsl(monkeypatch):
    """Sets the version of the DSL that is installed; None is none."""
    real = metadata.version

    def install(version):
        def found(name):
            if name != versions.DSL:
                return real(name)
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)
        versions.installed.cache_clear()

    yield install
    versions.installed.cache_clear()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder that FA4_HOPPER_OBJECTS names, with a kernel for each name, made from the sources that are named."""

    def make(names=(), source=None):
        for name in names:
            (tmp_path / f"{name}.so").touch()
        (tmp_path / "objects.json").write_text(json.dumps({"source": source or versions.source()}))
        monkeypatch.setenv("FA4_HOPPER_OBJECTS", str(tmp_path))
        return tmp_path

    return make


def asked(**layer):
    spec = LayerSpec(32, 8, layer.pop("d", 128), dtype=torch.bfloat16, **layer)
    return Question(spec, 16, HOPPER)


@pytest.mark.parametrize("version", ["4.5.2", "4.6.0", "4.6.2", "4.8.0", "4.9.0.dev1", "4.10.1"])
def test_the_engines_pins_and_newer_ones_compile(dsl, version):
    dsl(version)
    assert select(asked(), "hopper").name == "hopper"


@pytest.mark.parametrize(
    ("version", "have"),
    [("4.5.1", "nvidia-cutlass-dsl 4.5.1"), ("5.0.0.dev0", "nvidia-cutlass-dsl 5.0.0.dev0"), (None, "no nvidia-")],
)
def test_another_version_is_refused_with_its_reason(dsl, version, have):
    dsl(version)
    with pytest.raises(UnsupportedError) as error:
        select(asked(), "hopper")
    reason = error.value.reasons["hopper"]
    assert f"cannot be compiled with {have}" in reason
    assert reason.endswith("only with 4.5.2 to below 5, and FA4_HOPPER_OBJECTS names no folder")


def test_compiled_kernels_serve_where_the_dsl_does_not(dsl, folder):
    dsl("4.4.0")
    bf16 = [name for name in all_kernels() if "d128_bf16" in name and "softcap" not in name]
    where = folder([*bf16, "fa4_hopper_find_runs", "fa4_hopper_gather"])
    with pytest.raises(UnsupportedError, match="objects|has no fa4_hopper_combine_bf16_128"):
        select(asked(), "hopper")
    (where / "fa4_hopper_combine_bf16_128.so").touch()
    assert select(asked(), "hopper").name == "hopper"
    for other in ({"softcap": True}, {"d": 64}):
        with pytest.raises(UnsupportedError, match="has no fa4_hopper_"):
            select(asked(**other), "hopper")


@pytest.mark.parametrize("source", ["0123456789ab", None])
def test_a_folder_of_other_sources_is_refused_whatever_the_dsl(dsl, folder, source):
    dsl("4.8.0")
    where = folder(source=source or "x")
    if source is None:
        (where / "objects.json").unlink()
    made = "made from sources 0123456789ab" if source else "without a readable objects.json"
    with pytest.raises(UnsupportedError) as error:
        select(asked(), "hopper")
    reason = error.value.reasons["hopper"]
    assert f"FA4_HOPPER_OBJECTS was '{where}', {made}; allowed: a folder made from" in reason
    with pytest.raises(ValueError, match="allowed: a folder made from sources"):
        load.find("fa4_hopper_gather")


def test_a_kernel_is_loaded_before_any_is_compiled(folder, monkeypatch):
    folder(["fa4_hopper_gather"])
    modules = types.SimpleNamespace(load_module=lambda path: {"fa4_hopper_gather": path})
    monkeypatch.setitem(sys.modules, "tvm_ffi", modules)
    build = types.SimpleNamespace(compile_helper=lambda key: f"compiled {key}")
    monkeypatch.setitem(sys.modules, "fa4_core.kernels.hopper.build", build)
    assert launch.function_of("gather").endswith("fa4_hopper_gather.so")
    assert counters.stats() == {}
    assert launch.function_of("find_runs") == "compiled find_runs"
    assert counters.stats() == {"compiles.hopper": 1}


def test_the_digest_is_of_what_is_compiled(monkeypatch, tmp_path):
    (tmp_path / "objects").mkdir()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "objects" / "versions.py"))
    for name in ("forward.py", "launch.py"):
        (tmp_path / name).write_text("one")
    first = versions.source()
    (tmp_path / "launch.py").write_text("two")
    assert versions.source() == first
    (tmp_path / "forward.py").write_text("two")
    assert versions.source() != first


def test_a_step_does_not_look_on_the_disk_for_the_dsl_again(dsl, monkeypatch):
    dsl("4.8.0")
    question = Question(LayerSpec(8, 2, 128), 16, HOPPER)
    select(question)
    monkeypatch.setattr(metadata, "version", lambda name: pytest.fail(f"{name} was looked up"))
    assert select(question).name == "hopper"
