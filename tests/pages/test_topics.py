"""Messages at run time lead to pages that a user who installed Millpond from a wheel can read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import millpond
from millpond.cli import app
from millpond.documentation import pages, title
from millpond.errors import UsageError

PACKAGE = Path(millpond.__file__).parent
DOCS = PACKAGE.parents[1] / "docs"


def texts() -> Iterator[tuple[Path, str]]:
    """The texts in the code, docstrings left out; parts that stand side by side are one text to Python."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield path, node.value


def test_no_text_names_a_file_of_the_source_tree() -> None:
    named = re.compile(r"\bdocs/|\b(README|CHANGELOG|CONTRIBUTING)\b|\b[\w-]+\.md\b")
    links = re.compile(r"\]\([^)]*\)")  # the meanings of settings are Markdown, for the page that has them
    assert [(path.name, text) for path, text in texts() if named.search(links.sub("", text))] == []


def test_the_topics_that_texts_name_are_there() -> None:
    named = {topic for _, text in texts() for topic in re.findall(r"millpond docs ([a-z\w-]+)", text)}
    assert len(named) > 5
    assert named <= pages().keys()


def test_errors_of_files_do_not_guess_which_setting_led_there() -> None:
    """A place may be set by checkpointLocation as well: errors name the place itself."""
    rooms = ("files", "checkpoint", "stores", "slot", "operators")
    asked_for = {"reader.py"}  # what the command line is given: it says what is wanted
    found = [
        (path.name, text)
        for path, text in texts()
        if path.relative_to(PACKAGE).parts[0] in rooms and "spark.millpond.state.location" in text
    ]
    assert [one for one in found if one[0] not in asked_for] == []


def test_every_page_has_a_topic_of_its_own() -> None:
    assert sorted(pages().values()) == sorted(DOCS.rglob("*.md"))


def test_the_command_prints_pages() -> None:
    listed = CliRunner().invoke(app, ["docs"])
    assert listed.exit_code == 0
    for topic, path in pages().items():
        assert re.search(rf"{topic} .*{re.escape(title(path))}", listed.stdout)
    for topic in ("troubleshooting", "docs/guides/troubleshooting.md"):
        printed = CliRunner().invoke(app, ["docs", topic])
        assert printed.stdout == (DOCS / "guides/troubleshooting.md").read_text()


def test_a_page_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no page 'nonsense'.*architecture, .*troubleshooting"):
        CliRunner().invoke(app, ["docs", "nonsense"], catch_exceptions=False)
