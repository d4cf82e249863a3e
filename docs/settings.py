"""Makes `docs/settings.md` from the settings that are read: `python -m docs.settings`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millpond.conf import PREFIX, SETTINGS, Setting, Settings

PAGE = Path(__file__).with_name("settings.md")


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "All are Spark settings, read when a query starts. An unknown or malformed one is an error that lists the"
    yield "known ones. Made by `make docs` from the settings that are read; a test compares them."
    yield ""
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for name, setting in SETTINGS.items():
        yield f"| `{PREFIX}{name}` | {default(setting)} | {setting.meaning} |"
    yield ""
    yield "Spark's own limit of bytes in an Arrow batch (`spark.sql.execution.arrow.maxBytesPerBatch`) is lifted for"
    yield "the query, because Spark adds up the sizes of all columns after each row to watch it. Set it yourself if"
    yield "rows average more than half a megabyte."
    yield ""
    yield "`local[N]` never tries a failed task again, so a slot that dies ends the query; `local[N,4]` retries."


def default(setting: Setting) -> str:
    """A setting's default in Markdown: a text that could be set, or the rule that decides."""
    value = getattr(Settings(), setting.field)
    if value is None:
        return setting.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 30:  # nothing but sizes is as large
        return f"`{value >> 30}g`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
