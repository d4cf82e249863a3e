"""Makes `docs/command-line.md` from the `millpond` command itself: `python -m docs.command_line`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from millpond.cli import app

PAGE = Path(__file__).with_name("command-line.md")


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "Made by `make docs` from the command itself; a test compares them. Each command has `--help`. Errors are"
    yield "printed without a traceback, and the exit status is 1 then, 2 for arguments that are not understood."
    yield ""
    yield from _command("millpond", get_command(app))


def _command(name: str, command: Any) -> Iterator[str]:
    """A command and those below it; `command` is of click, as typer brings it along."""
    below = getattr(command, "commands", {})
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    if name.count(" ") or not below:
        yield f"## `{name}`"
        yield ""
    yield from (line.strip() for line in command.help.splitlines())
    yield ""
    if parameters:
        yield "| argument | default | meaning |"
        yield "|---|---|---|"
        yield from map(_row, parameters)
        yield ""
    for part, one in below.items():
        yield from _command(f"{name} {part}", one)


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if option else str(parameter.metavar or parameter.name).upper()
    given = parameter.default is not None and parameter.default is not False
    default = "required" if parameter.required else f"`{parameter.default}`" if given else ""
    return f"| `{name}` | {default} | {parameter.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
