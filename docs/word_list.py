"""Check the words of code and pages: `python -m docs.word_list`, a part of `make lint`.

The list stands in `pyproject.toml`, with a plain alternative for each pattern. Checked are all pages, and comments,
docstrings and other texts in the code (in tests, whose other texts are data, comments and docstrings only). `openings`
are only looked for where a docstring begins.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("src", "tests", "benchmarks", "docs", "examples")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def words() -> tuple[re.Pattern[str], re.Pattern[str], dict[str, str]]:
    """Patterns that match any word of the list, and any opening; and the alternatives by word."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["millpond"]["words"]
    openings = listed.pop("openings")
    every = "|".join(f"(?P<w{number}>{word})" for number, word in enumerate(listed))
    return re.compile(rf"\b(?:{every})\b", re.I), re.compile(rf"(?:{openings})\b"), listed


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line numbers, texts, and whether each is a docstring; of code its comments and strings, of pages each line."""
    if path.suffix == ".md":
        yield from ((number, line, False) for number, line in enumerate(path.read_text().splitlines(), 1))
        return
    source = path.read_text()
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if docstring or token.type == tokenize.COMMENT or (token.type == tokenize.STRING and "tests" not in path.parts):
            yield token.start[0], token.string, docstring


def found(path: Path) -> Iterator[str]:
    """A line for each word of the list in a file."""
    every, openings, alternatives = words()
    for number, text, docstring in texts(path):
        if docstring and openings.match(text.strip("rbuf\"' \n")):
            yield f"{path.relative_to(ROOT)}:{number}: the docstring opens with a subject clause; name the thing first"
        for match in every.finditer(text):
            line = number + text[: match.start()].count("\n")
            hit = next(name for name, group in match.groupdict().items() if group)
            yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {list(alternatives.values())[int(hit[1:])]}"


def files() -> Iterator[Path]:
    """All files that are checked."""
    for folder in CODE:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py"))
    for place in PAGES:
        path = ROOT / place
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path] if path.exists() else []


if __name__ == "__main__":
    lines = [line for path in files() for line in found(path)]
    print(*lines, sep="\n")
    sys.exit(bool(lines))
