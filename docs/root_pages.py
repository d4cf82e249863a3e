"""The site's pages that lie outside of docs/: README, CONTRIBUTING, CHANGELOG, and the examples; run by `mkdocs`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the root of the project, and what they are called on the site."""

_OUT = re.compile(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, PAGES))})")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to what the site is made of."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, target, content=re.sub(r"\]\(([^)#:]+)", _link, text)))
    files.append(File.generated(config, "examples.md", content="\n".join(_examples())))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Have links out of docs/ lead to the pages that were added."""
    return _OUT.sub(lambda match: f"]({match[1]}{PAGES[match[2]]}", markdown)


def _link(match: re.Match[str]) -> str:
    """A link from the root of the project, as it is called from the root of the site."""
    return f"]({PAGES.get(match[1], match[1].removeprefix('docs/'))}"


def _examples() -> Iterator[str]:
    yield "# Examples"
    yield ""
    yield "Each makes its own input and runs alone: `python examples/counts.py`. The tests run all of them."
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        module = ast.parse(source)
        docstring = module.body[0]
        yield ""
        yield f"## {path.name}"
        yield ""
        yield ast.get_docstring(module) or ""
        yield ""
        yield "```python"
        yield "\n".join(source.splitlines()[docstring.end_lineno or 0 :]).strip()
        yield "```"
