"""Parsers of arguments that several commands take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection

from benchmarks.nexmark.queries import QUERIES
from benchmarks.workloads.config import ENGINES
from benchmarks.workloads.dataframes import NEXMARK
from millpond.setting_values import parse_size


def size(text: str) -> int:
    """Parse a size in bytes: `512m`, `2g`, `1000000`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not {error}") from error


def count(text: str) -> int:
    """Parse a positive number: `200000`, `200k` or `5m` (thousands and millions)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower().replace("_", ""))
    number = int(float(match[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[match[2]]) if match else 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number; write it as 200000 or 200k")
    return number


def setting(text: str) -> tuple[str, str]:
    """Parse `KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    return key, value


def names(known: Collection[str], noun: str) -> Callable[[str], list[str]]:
    """Return a parser of known names, separated by commas; repeated names count once."""

    def parse(text: str) -> list[str]:
        listed = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in listed if name not in known]:
            wrong = ", ".join(map(repr, unknown))
            raise argparse.ArgumentTypeError(f"no {noun} {wrong}; there are {', '.join(known)}")
        if not listed:
            raise argparse.ArgumentTypeError(f"name at least one {noun}")
        return list(dict.fromkeys(listed))

    return parse


engines = names(ENGINES, "engine")


def queries(text: str) -> list[str]:
    """Parse names of NEXMark's queries; `all` selects every query of built-in operators."""
    return list(QUERIES) if text.strip() == "all" else names(NEXMARK, "query")(text)
