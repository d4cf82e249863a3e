"""Draws which room imports which, by the code itself, into `docs/rooms.md`: `python -m docs.architecture_graph`.

A *room* is a package of the code, or a module that stands alone beside the packages. The first room of a path is a
*floor*: `stores` is the floor of `stores.rmw`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "millpond"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
PAGE = Path(__file__).with_name("rooms.md")

FLOORS = (
    *(
        "cli",
        "top",
        "demo",
        "compactor",
        "query",
        "testing",
        "plan",
        "worker",
        "slot",
        "state_reader",
        "tasks",
        "operators",
        "lookup",
    ),
    *("stores", "checkpoint", "files", "kernels", "spec"),
)
"""The floors that the picture shows, from the top; what all use (errors, settings, layouts) would hide the rest."""

Graph = Mapping[str, frozenset[str]]
"""For each room, the rooms that it imports."""


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """The modules by their dotted names below the package, `""` being the package itself."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def rooms(source: Path = SOURCE) -> dict[str, list[str]]:
    """The modules of each package, `__init__` left out; the package itself is `""`."""
    found = defaultdict(list)
    for name, path in modules(source).items():
        if path.name != "__init__.py":
            found[name.rpartition(".")[0]].append(name)
    return dict(found)


def room_of(name: str, known: Mapping[str, Path]) -> str:
    """The room of a module or of a name in one: its package, or the module itself if it stands on no floor."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    if not name or known[name].name == "__init__.py":
        return name
    return name.rpartition(".")[0] or name


def imports(path: Path) -> Iterator[str]:
    """The names below the package that a module imports, wherever in it; what is for type checkers only left out."""
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(PACKAGE + "."):
                yield name.removeprefix(PACKAGE + ".")


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _executed(other)
            continue
        yield child
        yield from _executed(child)


def graph(source: Path = SOURCE) -> Graph:
    """Which room imports which."""
    known = modules(source)
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        room = room_of(name, known)
        found[room] |= {room_of(each, known) for each in imports(path)} - {room, ""}
    return {room: frozenset(found[room]) for room in sorted(found)}


def floor_of(room: str) -> str:
    """The floor that a room is on."""
    return room.partition(".")[0]


def cyclic_imports(edges: Graph) -> dict[str, set[str]]:
    """For each room the rooms of its floor that it imports and that import it, perhaps through others of the floor."""
    found = {}
    for room in edges:
        needing = {other for other in edges[room] if floor_of(other) == floor_of(room)}
        needing = {other for other in needing if room in _reached(other, edges)}
        if needing:
            found[room] = needing
    return found


def _reached(room: str, edges: Graph) -> set[str]:
    """The rooms of the same floor that a room imports, directly or through others of the floor."""
    reached: set[str] = set()
    ahead = [room]
    while ahead:
        for other in edges.get(ahead.pop(), frozenset()):
            if floor_of(other) == floor_of(room) and other not in reached:
                reached.add(other)
                ahead.append(other)
    return reached


def page(source: Path = SOURCE) -> str:
    """The text of `docs/rooms.md`."""
    edges = graph(source)
    floors = {floor: sorted(room for room in edges if floor_of(room) == floor) for floor in FLOORS}
    between = sorted(
        {
            (floor_of(room), floor_of(other))
            for room, others in edges.items()
            for other in others
            if floor_of(room) in floors and floor_of(other) in floors and floor_of(room) != floor_of(other)
        },
        key=lambda pair: (FLOORS.index(pair[0]), FLOORS.index(pair[1])),
    )
    lines = [
        "# Rooms",
        "",
        "Made by `make docs` from the code's imports. An arrow says: imports.",
        "",
        "## Floors",
        "",
        *_mermaid(FLOORS, between),
    ]
    for floor, names in floors.items():
        inside = [(room, other) for room in names for other in sorted(edges[room]) if other in names]
        if inside:
            lines += ["", f"## {floor}", "", *_mermaid(names, inside)]
    return "\n".join(lines) + "\n"


def _mermaid(names: tuple[str, ...] | list[str], arrows: list[tuple[str, str]]) -> list[str]:
    """A figure of some rooms; nodes are numbered, since a name may be a word of Mermaid's own."""
    numbers = {name: f"n{number}" for number, name in enumerate(names)}
    nodes = [f'    {numbers[name]}["{name}"]' for name in names]
    return ["```mermaid", "graph TD", *nodes, *(f"    {numbers[a]} --> {numbers[b]}" for a, b in arrows), "```"]


if __name__ == "__main__":
    PAGE.write_text(page())
