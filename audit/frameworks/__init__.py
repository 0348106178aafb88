"""The frameworks whose rollouts zerokl reads or records: a file each, found by listing this folder."""

from importlib import import_module
from pkgutil import iter_modules

from ..formats.framework import Framework, Log


def _listed() -> tuple[Framework, ...]:
    """The frameworks by name, zerokl first: a line of ours may have another's fields beside ours."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return tuple(sorted((m.FRAMEWORK for m in modules), key=lambda f: (f.name != "zerokl", f.name)))


FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in _listed()}
# The order decides which log is tried first.
LOGS: dict[str, Log] = {log.name: log for framework in FRAMEWORKS.values() for log in framework.logs}
# The names of `--format`, ours first.
NAMES = tuple(sorted(LOGS.keys() | FRAMEWORKS, key=lambda name: (name != "zerokl", name)))
