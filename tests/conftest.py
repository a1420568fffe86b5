"""What the suites share: counters of a test's own, a small model on disk, and what transformers makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fa4_core import counters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-to", type=Path, help="keep what the engines answered to the parity scenarios here")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the parity scenarios are played")


@pytest.fixture(scope="session")
def device(request) -> str:
    """cpu, or cuda where the tests that know it play their scenarios on a GPU."""
    return request.config.getoption("--device")


Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def _own_counters(tmp_path, monkeypatch):
    """Counters that start at zero and are published to a folder of the test's own."""
    monkeypatch.setenv("FA4_STATS_DIR", str(tmp_path / "counters"))
    monkeypatch.setattr(counters, "_counts", counters._Counts())


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A Llama of two layers with random weights large enough that attention decides the tokens.

    The engines' own dummy weights are within a thousandth of zero, and a test over those is blind.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=512, max_position_embeddings=2048, initializer_range=0.15,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def greedy(llama) -> Callable[[list[list[int]], int], Answers]:
    """greedy(prompts, n): the n most likely tokens after each prompt and their log-probabilities, in fp32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager").eval()

    def answer(prompts: list[list[int]], n: int) -> Answers:
        answers = []
        with torch.inference_mode():
            for prompt in prompts:
                tokens, logprobs = list(prompt), []
                for _ in range(n):
                    logs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].double(), -1)
                    tokens.append(int(logs.argmax()))
                    logprobs.append(float(logs.max()))
                answers.append((tokens[len(prompt) :], logprobs))
        return answers

    return answer
