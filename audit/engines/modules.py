"""The modules of an engine's model that show its operations (the sites of model/operations.py)."""

from typing import Any

import torch

from ...model.operation import Operation, Site
from ...model.operations import is_optional


def module_at(model: torch.nn.Module, row: Operation, site: Site) -> torch.nn.Module | None:
    """The module of a site, which is named from the model.

    None for an operation that the model, or this layer of it, lacks.

    Raises AttributeError where the model lacks what every decoder has.
    """
    try:
        return model.get_submodule(site.module)
    except AttributeError:
        if is_optional(row):
            return None
        raise


def output(out: Any, element: int = 0) -> torch.Tensor:
    """What a module returned; where that is a tuple, one element of it."""
    return out[element] if isinstance(out, tuple) else out
