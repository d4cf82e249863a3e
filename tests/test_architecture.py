"""The rooms of the code: how large they are, who imports whom, what they say of themselves, and what they cite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.architecture_graph import PAGE, cyclic_imports, graph, modules, page, rooms

ROOT = Path(__file__).parents[1]

MOST_MODULES = 12

CITED = re.compile(r"§((?:\d+(?:\.\d+)*)|(?:[IVX]+(?:-[A-Z])?))(?:–(\d+(?:\.\d+)*))?")


def test_the_picture_shows_the_code_as_it_is() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_rooms_are_small() -> None:
    large = {room: len(names) for room, names in rooms().items() if len(names) > MOST_MODULES}
    assert not large, "divide these rooms, or move what does not belong there"


def test_rooms_of_a_floor_import_each_other_one_way() -> None:
    assert not cyclic_imports(graph())


def test_modules_say_what_they_are() -> None:
    silent = [
        name or "millpond"
        for name, path in modules().items()
        if not name.rpartition(".")[2].startswith("_") and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_a_cycle_is_found(tmp_path: Path) -> None:
    for name, text in {
        "__init__": "",
        "a/__init__": '"""A."""',
        "a/one": "from millpond.a.inner.two import X\nfrom millpond.b import three",
        "a/inner/__init__": "",
        "a/inner/two": "def f():\n    import millpond.a.one",
        "b/__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from millpond.a import one",
        "b/three": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert graph(tmp_path) == {
        "": frozenset(),
        "a": {"a.inner", "b"},
        "a.inner": {"a"},
        "b": frozenset(),
    }
    assert cyclic_imports(graph(tmp_path)) == {"a": {"a.inner"}, "a.inner": {"a"}}


def test_sections_that_are_cited_stand_among_the_references() -> None:
    known = dict(_references())
    lost = []
    folders = ("src", "tests", "benchmarks", "docs")
    for path in [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]:
        if path.suffix not in {".py", ".md"} or path.name in {"references.md", Path(__file__).name}:
            continue
        text = " ".join(path.read_text().split())
        for found in CITED.finditer(text):
            before = text[: found.start()].rstrip()
            sections = next((known[name] for name in known if before.endswith(name)), set())
            if not {section for section in found.groups() if section} <= sections:
                lost.append(f"{path.relative_to(ROOT)}: {before[-30:]} {found[0]}")
    assert not lost, "cite as docs/references.md does: a heading, then §"


def _references() -> Iterator[tuple[str, set[str]]]:
    """The names of the papers, each with the sections that `docs/references.md` lists."""
    for part in (ROOT / "docs" / "references.md").read_text().split("\n## ")[1:]:
        yield part.partition("\n")[0], {found[1] for found in CITED.finditer(part)}


def test_what_the_references_name_is_there() -> None:
    text = (ROOT / "docs" / "references.md").read_text()
    places = re.findall(r"`((?:plan|stores|kernels|operators|checkpoint|files|benchmarks)/[^`]*)`", text)
    assert places
    lost = [at for at in places if not (ROOT / "src/millpond" / at).exists() and not (ROOT / at).exists()]
    assert not lost
