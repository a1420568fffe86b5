"""The two errors that a caller of fa4_core can meet.

A bad value is a plain ``ValueError``; `bad` gives all of them one form. A good request that no kernel
serves is an `UnsupportedError`. Both are raised before anything is written.
"""

from __future__ import annotations


class UnsupportedError(ValueError):
    """No kernel serves this layer on this device.

    Args:
        what: The request, in words.
        reasons: Kernel name to its reason, in order of preference.
    """

    def __init__(self, what: str, reasons: dict[str, str]) -> None:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no kernel serves {what}{lines}")
        self.what = what
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, str]]]:
        # Engines send errors between processes; the default would replay the message as `what`.
        return type(self), (self.what, self.reasons)


def bad(argument: str, was: object, allowed: str) -> ValueError:
    """A ValueError that names the argument, what it was and what is allowed."""
    return ValueError(f"{argument} was {was}; allowed: {allowed}")


def require(argument: str, value: object, kind: type) -> None:
    """Raises the ValueError of `bad` where value is not of a kind; for the doors of the public interface."""
    if not isinstance(value, kind):
        raise bad(argument, f"a {type(value).__name__}", f"a {kind.__name__}")
