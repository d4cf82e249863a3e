"""What nobody is to read: it is taken out of what clients say."""

from __future__ import annotations

from collections.abc import Collection


def hidden(text: str, secrets: Collection[str]) -> str:
    """A text without secrets."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def hide(error: BaseException, secrets: Collection[str]) -> None:
    """Take secrets out of an error, and out of those that it comes from: they are shown with it."""
    chain: BaseException | None = error
    while chain is not None:
        chain.args = tuple(hidden(one, secrets) if isinstance(one, str) else one for one in chain.args)
        chain = chain.__cause__ or chain.__context__
