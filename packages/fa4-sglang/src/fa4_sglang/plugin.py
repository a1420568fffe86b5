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
    keeps the backend from loading is therefore said here, and raised again when a server asks for the name.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    broken = _reason_not_to_load()
    if broken is not None:
        logger.error("The attention backend %s cannot be used: %s", NAME, broken)

    def create(runner: ModelRunner) -> AttentionBackend:
        if broken is not None:
            raise RuntimeError(f"the attention backend {NAME} cannot be used: {broken}")
        from .backend import FA4Backend  # only here: the launcher and the detokenizer need none of it

        return FA4Backend(runner)

    ATTENTION_BACKENDS[NAME] = create
    for choices in (
        server_args.ATTENTION_BACKEND_CHOICES,  # argparse holds these very lists, so they grow in place
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in choices:
            choices.append(NAME)


def _reason_not_to_load() -> str | None:
    try:
        import fa4_core.startup  # noqa: F401

        from . import compat, cpu

        compat.require()
        cpu.adapt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
