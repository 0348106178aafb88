"""Builds the wheel zerokl-audit from the repository's files (see pyproject.toml), with no fault's plants."""

import os
import re
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from shipped import DATA, ROOT, shipped, text  # noqa: E402

FILES = shipped()
PACKAGES = sorted(name for name, file in FILES.items() if file.name == "__init__.py")


class _Shipped(build_py):
    """Takes the shipped modules of a package, and not all that lie in its folder."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package that are shipped."""
        shipped_files = {str(file.resolve()) for file in FILES.values()}
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if os.path.realpath(module[2]) in shipped_files]

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy a module, and cut the plants out of the copy."""
        outfile, copied = super().build_module(module, module_file, package)
        Path(outfile).write_text(text(Path(module_file).resolve()), encoding="utf-8")
        return outfile, copied


def _version() -> str:
    """The version of zerokl: both wheels have one."""
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


# Built elsewhere and from nothing, so that a file that is gone does not come along from the last time.
BUILD = tempfile.TemporaryDirectory()

setup(
    options={"build": {"build_base": BUILD.name}},
    version=_version(),
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    package_dir={"zerokl": os.path.relpath(ROOT, HERE)},
    packages=[f"zerokl.{name}".rstrip(".") for name in PACKAGES],
    package_data={f"zerokl.{name}": patterns for name, patterns in DATA.items()},
    include_package_data=False,
    cmdclass={"build_py": _Shipped},
)
