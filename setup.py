"""Maps the repository root to the package `zerokl`. pyproject.toml has everything else about the project."""

import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py


class _WithoutSetup(build_py):
    """Leaves this file out of the package, because it is not a module of the package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package without setup.py."""
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("zerokl", "setup")]


# Built elsewhere and from nothing, so that a file that is gone does not come along from the last time.
BUILD = tempfile.TemporaryDirectory()

setup(
    options={"build": {"build_base": BUILD.name}},
    package_dir={"zerokl": "."},
    packages=[
        "zerokl",
        "zerokl.cli",
        "zerokl.audit",
        "zerokl.audit.capsule",
        "zerokl.audit.conclusion",
        "zerokl.audit.engines",
        "zerokl.audit.faults",
        "zerokl.audit.faults.columns",
        "zerokl.audit.faults.draws",
        "zerokl.audit.faults.ids",
        "zerokl.audit.faults.model",
        "zerokl.audit.faults.numbers",
        "zerokl.audit.faults.operations",
        "zerokl.audit.faults.planting",
        "zerokl.audit.faults.signal",
        "zerokl.audit.figures",
        "zerokl.audit.formats",
        "zerokl.audit.frameworks",
        "zerokl.audit.hypotheses",
        "zerokl.audit.knobs",
        "zerokl.audit.logs",
        "zerokl.audit.operations",
        "zerokl.audit.page",
        "zerokl.files",
        "zerokl.kernels",
        "zerokl.kernels.cpp",
        "zerokl.pages",
        "zerokl.verify",
        "zerokl.model",
        "zerokl.model.blocks",
        "zerokl.model.families",
        "zerokl.engine",
        "zerokl.engine.config",
        "zerokl.engine.config.presets",
        "zerokl.engine.display",
        "zerokl.engine.processes",
        "zerokl.engine.rollout",
        "zerokl.engine.rollout.pool",
        "zerokl.engine.rollout.vllm",
        "zerokl.engine.runs",
        "zerokl.engine.runs.ablations",
        "zerokl.engine.runs.checks",
        "zerokl.engine.runs.report",
        "zerokl.engine.tasks",
        "zerokl.engine.train",
        "zerokl.engine.train.losses",
        "zerokl.engine.train.parallel",
        "zerokl.integrations",
        "zerokl.integrations.environments",
    ],
    package_data={
        "zerokl.kernels.cpp": ["*.cpp", "*.h"],
        "zerokl.engine.config.presets": ["*.toml"],
        "zerokl.audit.formats": ["log.schema.json"],
        "zerokl.engine.runs.report": ["static/*"],
        "zerokl.pages": ["static/*"],
    },
    cmdclass={"build_py": _WithoutSetup},
)
