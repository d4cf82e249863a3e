"""The pages of the documentation, of this very version: `millpond docs TOPIC` prints one."""

from __future__ import annotations

from pathlib import Path

from millpond.errors import UsageError


def pages() -> dict[str, Path]:
    """Return the file of each page by its topic, the file's name without its ending.

    Raises:
        UsageError: the installation has no pages.
    """
    here = Path(__file__)
    # A wheel brings a copy along (setup.py); an editable installation reads the source tree's own.
    folders = [folder for folder in (here.with_name("docs"), here.parents[2] / "docs") if folder.is_dir()]
    found = {path.stem: path for folder in folders[:1] for path in sorted(folder.rglob("*.md"))}
    if not found:
        raise UsageError("This installation has no documentation.", action="Install millpond from its wheel.")
    return dict(sorted(found.items()))


def title(page: Path) -> str:
    """Return the heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def page(topic: str) -> str:
    """Return the text of a page, as Markdown.

    Args:
        topic: as `pages` has it; the path of the page below `docs/` is understood, too.

    Raises:
        UsageError: there is no such page.
    """
    found = pages()
    path = found.get(Path(topic).name.removesuffix(".md").lower())
    if path is None:
        raise UsageError(f"There is no page {topic!r}.", action=f"There are: {', '.join(found)}.")
    return path.read_text(encoding="utf-8")
