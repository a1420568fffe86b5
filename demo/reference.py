"""The reference: transformers in fp32, one prompt at a time, with attention by its definition."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Reference:
    """A model that has answered every prompt greedily, and that says how likely it finds another's answer.

    Args:
        model: Directory of the model.
        prompts: Each with a name and tokens.
        new_tokens: Length of an answer.
        say: Called with each thing that begins.
    """

    def __init__(self, model: Path, prompts: list[dict], new_tokens: int, say: Callable[[str], None]) -> None:
        logging.disable_progress_bar()  # there is one already
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._model = loaded.eval()
        self._prompts = {p["name"]: p["tokens"] for p in prompts}
        self._known: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        began = time.perf_counter()
        self.answers: dict[str, list[int]] = {}
        for name, tokens in self._prompts.items():
            say(f"the reference: {name}")
            self.answers[name] = self._greedy(tokens, new_tokens)
        self.seconds = time.perf_counter() - began

    @torch.inference_mode()
    def _greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        answer, cache, inputs = [], None, torch.tensor([prompt])
        for _ in range(new_tokens):
            step = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = step.past_key_values
            answer.append(int(step.logits[0, -1].argmax()))
            inputs = torch.tensor([answer[-1:]])
        return answer

    def logprobs(self, outputs: list[dict]) -> dict[str, list[float]]:
        """Log-probability of each generated token after its prompt and the tokens before it (teacher-forced).

        Args:
            outputs: Each with the name of a prompt and the tokens generated for it.
        """
        return {o["name"]: self._logprobs(o["name"], tuple(o["tokens"])) for o in outputs}

    @torch.inference_mode()
    def _logprobs(self, name: str, tokens: tuple[int, ...]) -> list[float]:
        if (name, tokens) not in self._known:
            inputs = torch.tensor([[*self._prompts[name], *tokens]])
            logits = self._model(inputs, logits_to_keep=len(tokens) + 1).logits[0, :-1]
            logs = torch.log_softmax(logits.double(), -1)
            self._known[name, tokens] = logs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        return self._known[name, tokens]
