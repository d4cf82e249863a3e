"""Conversion of setting texts to typed values."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

Size = Annotated[int, Meta(extra={"size": True})]
"""Bytes, written as `512m` or `1g`."""

Location = Annotated[str, Meta(extra={"location": True})]
"""A URL or a path that other processes can open."""

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)i?b?", re.IGNORECASE)


def parse_value(text: str, type_: Any) -> Any:
    """Convert a setting's text.

    Args:
        text: as the user wrote it.
        type_: the type of the value, with its bounds in `msgspec.Meta`.

    Raises:
        ValueError: the text is not valid; the message describes valid texts.
    """
    text = text.strip()
    if _has(type_, "location"):
        return _location(text)
    value = parse_size(text) if _has(type_, "size") else text.lower()
    try:
        return msgspec.convert(value, type_, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(_wanted(type_)) from error


def parse_size(text: str) -> int:
    """Parse a size such as `512`, `64k`, `100 MB` or `1g` to bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 512m or 1g")
    return int(match[1]) * _UNITS[match[2].lower()]


def _location(text: str) -> str:
    """Return a URL as it is and a path as absolute: slots have other working directories than this process."""
    scheme, colon, _ = text.partition(":")
    if not text or scheme == "memory":
        raise ValueError("a path, or a URL that other processes can reach: file:, s3:, gs:, az: or hdfs:")
    return text if colon and "/" not in scheme else os.path.abspath(text)


def _parts(type_: Any) -> list[Any]:
    """Return a type and all types and annotations within it."""
    return [type_, *(part for inner in get_args(type_) for part in _parts(inner))]


def _metas(type_: Any) -> list[Meta]:
    return [meta for part in _parts(type_) for meta in getattr(part, "__metadata__", ())]


def _has(type_: Any, mark: str) -> bool:
    return any(mark in (meta.extra or {}) for meta in _metas(type_))


def _choices(type_: Any) -> list[str]:
    return [part for part in _parts(type_) if isinstance(part, str)]


def _wanted(type_: Any) -> str:
    """Describe the valid texts of a setting, for its error."""
    parts, metas = _parts(type_), _metas(type_)
    least = max((meta.ge for meta in metas if meta.ge is not None), default=None)
    most = min((meta.le for meta in metas if meta.le is not None), default=None)
    if choices := _choices(type_):
        return " or ".join(choices)
    if bool in parts:
        return "true or false"
    if _has(type_, "size"):
        return f"a size of at least {int(least or 0) >> 20}m"
    kind = "a whole number" if int in parts else "a number" if float in parts else "a text"
    if most is not None:
        return f"{kind} from {least} to {most}"
    return kind if least is None else f"{kind}, {least} or more"
