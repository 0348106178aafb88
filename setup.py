"""The repository root is the package `zerokl`; everything else about the project stands in pyproject.toml."""

from setuptools import setup

setup(
    package_dir={"zerokl": "."},
    packages=["zerokl", "zerokl.kernels", "zerokl.verify", "zerokl.model", "zerokl.engine", "zerokl.engine.tasks", "zerokl.engine.presets"],
    package_data={"zerokl.engine.presets": ["*.toml"]},
)
