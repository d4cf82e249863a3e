"""The pages of the documentation of the installed version: `millpond docs TOPIC` prints one."""

from __future__ import annotations

from pathlib import Path

from millpond.errors import UsageError


def pages() -> dict[str, Path]:
    """Return the file of each page by topic: the name of the file without its extension.

    Raises:
        UsageError: the installation has no pages.
    """
    here = Path(__file__)
    # A wheel contains a copy of the pages (setup.py); an editable installation reads those of the source tree.
    folders = [folder for folder in (here.with_name("docs"), here.parents[2] / "docs") if folder.is_dir()]
    files = {path.stem: path for folder in folders[:1] for path in sorted(folder.rglob("*.md"))}
    if not files:
        raise UsageError("This installation has no documentation.", action="Install millpond from its wheel.")
    return dict(sorted(files.items()))


def title(page: Path) -> str:
    """Return the heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def page(topic: str) -> str:
    """Return the text of a page, as Markdown.

    Args:
        topic: a key of `pages`, or the path of the page below `docs/`.

    Raises:
        UsageError: the page does not exist.
    """
    topics = pages()
    path = topics.get(Path(topic).name.removesuffix(".md").lower())
    if path is None:
        raise UsageError(f"There is no page {topic!r}.", action=f"There are: {', '.join(topics)}.")
    return path.read_text(encoding="utf-8")
