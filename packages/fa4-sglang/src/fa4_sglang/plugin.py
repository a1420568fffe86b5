"""The entry point: SGLang calls register() in each of its processes, before arguments are parsed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "fa-cute"

logger = logging.getLogger("fa4")


def register() -> None:
    """Make "fa-cute" a name that SGLang accepts for its attention backends.

    SGLang logs what a plugin raises and goes on, so that a broken install would show as an unknown name. Whatever
    keeps the backend from loading is therefore said here, and raised when a server asks for the name.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    try:
        import fa4_core.startup  # noqa: F401

        from . import compat, cpu

        cpu.adapt()
        try:
            compat.lift_lists()
        except Exception as error:
            # Then SGLang itself refuses those models and no other.
            models = ", ".join(compat.LIFTED + compat.LIFTED_WITHOUT_IMAGES)
            logger.warning("SGLang %s keeps %s from %s: %s", compat.version(), NAME, models, _said(error))
        broken = None
    except Exception as error:
        broken = _said(error)
        logger.error("The attention backend %s cannot be used: %s", NAME, broken)

    def create(runner: ModelRunner) -> AttentionBackend:
        if broken is not None:
            raise RuntimeError(f"the attention backend {NAME} cannot be used: {broken}")
        return compat.load_backend()(runner)

    ATTENTION_BACKENDS[NAME] = create
    for choices in (
        server_args.ATTENTION_BACKEND_CHOICES,  # argparse holds these very lists, so they grow in place
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in choices:
            choices.append(NAME)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
