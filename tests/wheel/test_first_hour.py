"""`pip install`, then the README's example: what somebody does who has no clone, in an environment of their own.

Run by `make wheel`: it installs everything from scratch, which takes minutes.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)  # the first test waits for the installation

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that has the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    # By way of the source distribution, which has to have all that a wheel is made of.
    run(sys.executable, "-m", "venv", folder / "builder")
    builder = folder / "builder/bin/python"
    run(builder, "-m", "pip", "install", "-q", "--disable-pip-version-check", "setuptools>=77")
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    run(builder, "-c", build, cwd=ROOT)
    (source,) = folder.glob("millpond-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "dist", source)
    (wheel,) = (folder / "dist").glob("millpond-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    found = folder / "venv/bin/python"
    run(found, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    return found


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command as a user's shell would, without what this one's environment says of Python and Spark."""
    ours = ("PYTHON", "PYSPARK", "VIRTUAL_ENV", "SPARK_HOME")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def example() -> str:
    """The first example of the README, ended after its first batches."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    waiting = "query.awaitTermination()"
    assert waiting in code
    until = "import time\nwhile len(query.recentProgress) < 3: time.sleep(0.1)\nquery.stop()"
    return str(code.replace(waiting, until))


def test_the_pages_come_with_the_wheel(python: Path, tmp_path: Path) -> None:
    """All of them, and from the wheel: the environment knows nothing of the source tree."""
    printed = run(python.with_name("millpond"), "docs", "troubleshooting", cwd=tmp_path)
    assert printed == (ROOT / "docs/guides/troubleshooting.md").read_text()
    listed = run(python.with_name("millpond"), "docs", cwd=tmp_path)
    assert [page.stem for page in (ROOT / "docs").rglob("*.md") if page.stem not in listed] == []


def test_the_readmes_example_runs_from_a_wheel_in_another_folder(python: Path, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example())
    begun = time.monotonic()
    printed = run(python, "example.py", cwd=tmp_path)
    print(f"three batches after {time.monotonic() - begun:.0f} s")
    assert "Batch: 0" in printed
    assert printed.count("compiles what this query needs") == 1
    assert "compiles" not in run(python, "example.py", cwd=tmp_path)
    assert re.search(r"\d+ kernels, ", run(python, "-m", "millpond.kernels.compile"))
    (checkpoint,) = (path.parent for path in tmp_path.rglob("offsets") if path.parent.name != "millpond")
    assert "generation" in run(python.with_name("millpond"), "state", "ls", checkpoint)


def test_the_demo_runs_from_a_wheel(python: Path, tmp_path: Path) -> None:
    """On a few rows, with the package for the report; NEXMark is in the source tree alone."""
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "matplotlib")
    code = "from millpond.demo.jobs import Size; from millpond.demo.run import run_demo; import sys;"
    printed = run(python, "-c", f"{code} sys.exit(run_demo(size=Size(2_000, 5, 2, 600.0)))", cwd=tmp_path)
    assert re.search(r"all [\d,]{3,} result rows equal", printed)
    assert len(list((tmp_path / "millpond-demo").glob("*.html"))) == 1
    refused = "from millpond.demo.jobs import find\ntry: find('q17')\nexcept Exception as error: print(error)"
    assert "Millpond's source tree, which this installation does not come from" in run(python, "-c", refused)
