"""The families of models: each file of this folder has one, as FAMILY."""

from importlib import import_module
from pkgutil import iter_modules

from ..family import Family

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
# By the architecture in config.json.
FAMILIES: dict[str, Family] = {file.FAMILY.architecture: file.FAMILY for file in _FILES}
