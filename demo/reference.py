"""The reference: transformers in fp32, one prompt at a time, its own attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Reference:
    """A model that answers greedily, and that says how likely it finds another's answer.

    Args:
        model: Directory of the model.
    """

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # there is one of ours
        self._torch = torch
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._model = loaded.eval()
        self._known: dict[tuple, list[float]] = {}

    def greedy(self, prompts: list[list[int]], new_tokens: int, tick: Callable[[], None]) -> list[list[int]]:
        """The most likely continuation of each prompt, new_tokens long."""
        answers = []
        for prompt in prompts:
            answers.append(self._greedy(prompt, new_tokens))
            tick()
        return answers

    def _greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        torch = self._torch
        tokens, cache, inputs = [], None, torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(new_tokens):
                step = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = step.past_key_values
                tokens.append(int(step.logits[0, -1].argmax()))
                inputs = torch.tensor([tokens[-1:]])
        return tokens

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Log-probability of each token after the prompt and the tokens before it (teacher-forced)."""
        key = (tuple(prompt), tuple(tokens))
        if key not in self._known:
            torch = self._torch
            with torch.inference_mode():
                logits = self._model(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
                logs = torch.log_softmax(logits.double(), -1)
            self._known[key] = logs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        return self._known[key]
