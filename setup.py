"""The repository root is the package `zerokl`; everything else about the project stands in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class _WithoutSetup(build_py):
    """The root folder is a package, but this file is not a module of it."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Modules of a package, less setup.py."""
        return [m for m in super().find_package_modules(package, package_dir) if m[1] != "setup"]


setup(
    package_dir={"zerokl": "."},
    packages=[
        "zerokl",
        "zerokl.kernels",
        "zerokl.verify",
        "zerokl.model",
        "zerokl.engine",
        "zerokl.engine.commands",
        "zerokl.engine.commands.audit",
        "zerokl.engine.loss",
        "zerokl.engine.parallel",
        "zerokl.engine.presets",
        "zerokl.engine.rollout",
        "zerokl.engine.rollout.vllm",
        "zerokl.engine.runs",
        "zerokl.engine.tasks",
        "zerokl.engine.train",
    ],
    package_data={"zerokl.kernels": ["binaries.json"], "zerokl.engine.presets": ["*.toml"]},
    cmdclass={"build_py": _WithoutSetup},
)
