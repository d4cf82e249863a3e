"""Redaction of secrets in client error messages."""

from __future__ import annotations

from collections.abc import Collection


def redact(text: str, secrets: Collection[str]) -> str:
    """Replace the secrets in a text."""
    # The longest first: a secret may contain another.
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def redact_error(error: BaseException, secrets: Collection[str]) -> None:
    """Redact secrets in an error, and in its causes and contexts, which are shown with it."""
    chain: BaseException | None = error
    while chain is not None:
        chain.args = tuple(redact(arg, secrets) if isinstance(arg, str) else arg for arg in chain.args)
        chain = chain.__cause__ or chain.__context__
