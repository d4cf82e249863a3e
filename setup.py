"""What pyproject.toml cannot say: wheels bring the pages of docs/ along, for `millpond docs`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DOCS = Path(__file__).parent / "docs"


class BuildWithPages(build_py):
    """Copies docs/**/*.md to millpond/docs; an editable installation reads them where they are."""

    def run(self) -> None:
        """Build the package, then add the pages."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "millpond" / "docs"
        shutil.rmtree(target, ignore_errors=True)
        for page in DOCS.rglob("*.md"):
            copy = target / page.relative_to(DOCS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)


setup(cmdclass={"build_py": BuildWithPages})
