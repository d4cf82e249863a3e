"""Names on the pages are those of the code: settings, codes, commands, log lines, snippets."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from docs import command_line, metrics, settings
from typer.testing import CliRunner

import millpond.files.backends.filesystem  # its errors are looked for
from millpond.cli import app
from millpond.conf import PREFIX, SETTINGS, Settings
from millpond.errors import MillpondError
from millpond.plan.reading.reasons import REASONS
from millpond.plan.wrong_in_spark import SHAPES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
GUIDES = ROOT / "docs" / "guides"


def section(page: str, title: str) -> str:
    """The text below a heading of the second level, up to the next."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (GUIDES / page).read_text(), re.DOTALL | re.M)
    return str(found)


def kinds(kind: type[MillpondError] = MillpondError) -> set[type[MillpondError]]:
    """The class and all below it."""
    return {kind}.union(*map(kinds, kind.__subclasses__()))


def test_settings_are_up_to_date() -> None:
    assert settings.PAGE.read_text() == settings.page(), "run `make docs`"


def test_metrics_are_up_to_date() -> None:
    assert metrics.PAGE.read_text() == metrics.page(), "run `make docs`"


def test_the_command_line_is_up_to_date() -> None:
    assert command_line.PAGE.read_text() == command_line.page(), "run `make docs`"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_that_is_shown_is_what_setting_it_gives(name: str) -> None:
    setting = SETTINGS[name]
    value = getattr(Settings(), setting.field)
    if value is None:
        assert setting.default
    else:
        assert setting.parse(settings.default(setting).strip("`")) == value


def test_there_is_a_setting_for_each_field() -> None:
    assert sorted(setting.field for setting in SETTINGS.values()) == sorted(Settings.__struct_fields__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_pages_name_are_there(page: Path) -> None:
    named = set(re.findall(rf"{re.escape(PREFIX)}([a-z][\w.]*\w)", page.read_text()))
    assert named <= SETTINGS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_are_python(page: Path) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M):
        whole = f"writer{snippet}" if snippet.startswith(".") else snippet
        ast.parse("\n".join(line.split("  #")[0] for line in whole.splitlines()))


def test_every_error_is_told() -> None:
    told = section("troubleshooting.md", "Errors")
    ours = [kind for kind in kinds() if kind.__module__.startswith("millpond.") and "code" in vars(kind)]
    codes = {kind.code: kind.__name__ for kind in ours}
    assert len(codes) == len(ours)
    del codes[MillpondError.code]
    assert set(re.findall(r"^### (\S+)$", told, re.M)) == codes.keys()
    assert dict(re.findall(r"^\| \[`(\S+)`\]\(\S+\) \| `(\w+)` \|", told, re.M)) == codes


def test_every_reason_is_told() -> None:
    told = section("troubleshooting.md", "Reasons to stay on Spark")
    assert re.findall(r"^\| `(MP-[A-Z-]+)` \| .+ \| .+ \|$", told, re.M) == list(REASONS)


def test_every_shape_for_which_spark_is_wrong_is_told() -> None:
    told = section("troubleshooting.md", "Shapes for which Spark is wrong")
    defaults = dict(re.findall(r"^\| `(MP-[A-Z-]+)` \| (\w+) \| .+ \| .+ \|$", told, re.M))
    assert defaults == {code: "refused" if shape.certain else "warning" for code, shape in SHAPES.items()}


def test_every_reason_is_given() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "reasons.py")
    assert [code for code in REASONS if f'"{code}"' not in source] == []


def test_log_lines_are_logged() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    lines = re.findall(r"^\| `(.+?)` \|", section("alerts.md", "Log lines"), re.M)
    assert lines
    for line in lines:
        pattern = ".*".join(re.escape(part) for part in re.split("…", line))
        assert re.search(pattern, source), line


def test_figures_are_reported() -> None:
    from millpond.metrics import (
        ADAPTIVE_METRICS,
        COMPACTION_METRICS,
        HOST_METRICS,
        LIST_METRICS,
        LOOKUP_METRICS,
        OPERATOR_METRICS,
        TIER_METRICS,
    )

    told = re.findall(r"^\| (.+?) \|", section("alerts.md", "Figures"), re.M)
    named = {name for cell in told for name in re.findall(r"`(\w+)`", cell)}
    assert named
    assert named <= {
        *OPERATOR_METRICS,
        *LOOKUP_METRICS,
        *LIST_METRICS,
        *ADAPTIVE_METRICS,
        *TIER_METRICS,
        *COMPACTION_METRICS,
        *HOST_METRICS,
    }


def test_the_version_is_that_of_the_project() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert millpond.__version__ == declared, "install the project anew (`make setup`)"
    assert CliRunner().invoke(app, ["--version"]).output == f"millpond {declared}\n"
    assert re.search(rf"^## (\[)?{re.escape(declared)}", (ROOT / "CHANGELOG.md").read_text(), re.M)
