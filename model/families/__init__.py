"""The families of models: each file of this folder has one, as FAMILY."""

from importlib import import_module
from pkgutil import iter_modules

from ..family import Family

# By the model_type in config.json, which is the name of the file.
MODEL_TYPES: dict[str, Family] = {
    file.name: import_module(f"{__name__}.{file.name}").FAMILY for file in iter_modules(__path__)
}
# By the architecture in config.json.
FAMILIES: dict[str, Family] = {family.architecture: family for family in MODEL_TYPES.values()}
