"""How a twin says no: one line, at construction or at the call, never by ignoring an argument."""

from __future__ import annotations


class NotSupportedError(ValueError):
    """An argument, or a combination of them, that a twin does not compute or on which TE's own backends disagree."""


def require(condition: bool, message: str) -> None:
    """Go on only if ``condition`` holds.

    Raises:
        NotSupportedError: it does not; ``message`` says what is not supported.
    """
    if not condition:
        raise NotSupportedError(message)
