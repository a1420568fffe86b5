"""The command that compiles kernels into a folder: what it asks for, what it calls wrong. The compiler is not run."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa4_core.kernels.hopper.config import SMEM_LIMIT, Config
from fa4_core.kernels.hopper.objects import __main__ as command
from fa4_core.kernels.hopper.objects import link
from fa4_core.kernels.hopper.objects.make import Made, problems
from fa4_core.kernels.hopper.objects.usage import Usage

D64 = Config(64, 64, "bf16", "boxes", softcap=True)
GOOD = Usage(registers=128, threads=512, shared=D64.smem_bytes + 304, local=0, spills=0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with a compiler that gives what `results` holds by name, else a good kernel."""
    results, asked = {}, []

    def make_all(kernels, out, jobs):
        asked.append((list(kernels), jobs))
        for name in reversed(kernels):
            problem = results.get(name)
            if problem == "dies":
                yield name, "its process died"
            else:
                spills = 6 if problem == "spills" else 0
                usage = Usage(128, 512, 180528, 8 if spills else 0, spills)
                yield Made(name, usage, 1.0, 1000, ("spills: 6",) if spills else ())

    monkeypatch.setattr(command, "make_all", make_all)
    monkeypatch.setattr(command, "provenance", lambda: {"cutlass_dsl": "4.8.0", "cuda": "13.4"})
    monkeypatch.setattr(command, "compiler", lambda: "gcc")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def invoke(*words):
        return CliRunner().invoke(command.main, ["--out", str(tmp_path / "objects"), *words])

    return invoke, results, asked, tmp_path / "objects" / command.SUMMARY


def test_all_kernels_or_those_that_match(run):
    invoke, _, asked, summary = run
    assert invoke("--jobs", "3").exit_code == 0
    assert len(asked[0][0]) == 58
    assert asked[0][1] == 3
    assert invoke("--variants", "*_d256_fp16_*", "--variants", "*gather").exit_code == 0
    names = ["fa4_hopper_d256_fp16_boxes", "fa4_hopper_d256_fp16_boxes_softcap", "fa4_hopper_d256_fp16_slots",
             "fa4_hopper_d256_fp16_slots_softcap", "fa4_hopper_gather"]  # fmt: skip
    assert asked[1][0] == names
    report = json.loads(summary.read_text())
    assert [k["name"] for k in report["kernels"]] == names  # in the order of the list, not of their making
    assert report["kernels"][0]["usage"]["registers"] == 128


def test_a_spill_fails_unless_expected_and_an_expectation_must_hold(run):
    invoke, results, _, _ = run
    results[D64.name] = "spills"
    result = invoke("--variants", "*_d64_*")
    assert result.exit_code == 1
    assert f"problem: {D64.name}: spills: 6" in result.output
    assert invoke("--variants", "*_d64_*", "--expect-spill", D64.name).exit_code == 0
    results.clear()
    result = invoke("--variants", "*_d64_*", "--expect-spill", D64.name)
    assert result.exit_code == 1
    assert "spills no longer" in result.output


def test_one_that_does_not_compile_fails_and_the_rest_are_made(run):
    invoke, results, _, summary = run
    results["fa4_hopper_gather"] = "dies"
    result = invoke("--json")
    assert result.exit_code == 1
    assert "fa4_hopper_gather was not made: its process died" in result.output
    report = json.loads(summary.read_text())
    assert report["failed"] == {"fa4_hopper_gather": "its process died"}
    assert len(report["kernels"]) == 57


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--variants", "*d80*"], 2, "--variants was '*d80*'; allowed: a pattern that matches one of fa4_hopper_d64"),
        (["--jobs", "0"], 2, "0 is not in the range"),
        (["--expect-spill", "d64"], 2, "--expect-spill was d64; allowed: names of kernels"),
    ],
)
def test_nonsense_is_refused(run, words, status, message):
    result = run[0](*words)
    assert result.exit_code == status
    assert message in " ".join(result.output.replace("│", " ").split())


def test_what_is_missing_is_named(run, monkeypatch):
    for module, package in (("cutlass", "nvidia-cutlass-dsl[cu13]"), ("tvm_ffi", "apache-tvm-ffi")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, gone=module: None if name == gone else object())
        result = run[0]()
        assert result.exit_code == 1
        assert f"{package} is not installed: pip install '{package}'" in result.output
    monkeypatch.setattr(command, "compiler", link.compiler)
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = run[0]()
    assert result.exit_code == 2
    assert "gcc was not found on PATH" in " ".join(result.output.split())


def test_a_failed_link_shows_what_the_linker_said(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "runtime", lambda: tmp_path / "none.a")
    refused = subprocess.CompletedProcess([], 1, "", "cannot find none.a")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: refused)
    monkeypatch.setattr(link, "compiler", lambda: "gcc")
    with pytest.raises(ValueError, match="status 1: cannot find none.a"):
        link.link(tmp_path / "kernel.o", tmp_path / "kernel.so")
    assert not (tmp_path / "kernel.so").exists()


def test_symbols_that_nothing_brings():
    known = ["cudaFree U", "TVMFFIEnvGetStream U", "abort@GLIBC_2.2.5 U", "__gmon_start__ w"]
    assert link.unknown("\n".join(f"{line}         " for line in known)) == []
    assert link.unknown("\n".join([*known, "CuteDSLRT_New U", "printf U"])) == ["CuteDSLRT_New", "printf"]


def test_a_library_that_asks_for_such_a_symbol_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "runtime", lambda: tmp_path / "empty.a")
    monkeypatch.setattr(link, "compiler", lambda: "gcc")

    def answer(command, **kwargs):
        if command[0] == "gcc":
            Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, 0, "CuteDSLRT_New U\n" if command[0] == "nm" else "", "")

    monkeypatch.setattr(subprocess, "run", answer)
    with pytest.raises(ValueError, match="kernel.so asks for symbols that nothing brings: CuteDSLRT_New"):
        link.link(tmp_path / "kernel.o", tmp_path / "kernel.so")
    assert not (tmp_path / "kernel.so").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"local": 8, "spills": 6}, "spills: 6 loads and stores, 8 bytes of local memory a thread"),
        ({"registers": 129}, "512 threads of 129 registers exceed 65536"),
        ({"shared": D64.smem_bytes - 1}, "bytes of shared memory, expected"),
        ({"shared": D64.smem_bytes + 3000}, "bytes of shared memory, expected"),
    ],
)
def test_bounds(change, problem):
    assert problems(D64, GOOD) == ()
    [found] = problems(D64, Usage(**{**GOOD.__dict__, **change}))
    assert problem in found


def test_a_small_kernel_may_take_any_shared_memory_that_there_is():
    assert problems("gather", Usage(58, 256, 0, 0, 0)) == ()
    assert problems("gather", Usage(58, 256, SMEM_LIMIT + 1, 0, 0)) != ()
