"""The reference: transformers in fp32, attention by its definition, one text at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """Scores texts and answers.

    Args:
        model: Directory of the model.
        device: Where it runs.
    """

    def __init__(self, model: Path, device: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._model, self._device = loaded.eval().to(device), device

    @torch.inference_mode()
    def logs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocabulary]: log-probabilities of the token after each."""
        logits = self._model(torch.tensor([tokens], device=self._device)).logits[0]
        return torch.log_softmax(logits.double(), -1).float()

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probability of every token but the first."""
        logs = self.logs(tokens)[:-1]
        return logs.gather(1, torch.tensor(tokens[1:], device=self._device)[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def greedy(self, tokens: list[int], new_tokens: int) -> list[int]:
        """The most likely continuation."""
        answer, cache, inputs = [], None, torch.tensor([tokens], device=self._device)
        for _ in range(new_tokens):
            step = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = step.past_key_values
            answer.append(int(step.logits[0, -1].argmax()))
            inputs = torch.tensor([answer[-1:]], device=self._device)
        return answer
