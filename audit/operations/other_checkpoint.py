"""Two checkpoints beside each other: the fields of their configs, and their weights."""

from collections.abc import Mapping
from typing import Any

import torch

from ...files.bitwise import count_unequal
from ...model.config import ModelConfig
from ...model.weight_files import stored_tensors
from ..engines.audited_model import AuditedModel
from ..sections import CheckpointsDifference, TensorDifference
from .operation_errors import rms
from .plain_operations import Checkpoint

# Fields that decide the shapes. Where one differs, no operation of the two can be compared by its values.
_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
_SHAPES_OF_EXPERTS = ("number", "size", "layers")
# Tensors of a report. A fine-tuned model differs in all of them.
_LISTED = 20


def compare_checkpoints(a: Checkpoint, b: Checkpoint) -> CheckpointsDifference:
    """The differences of two checkpoints. The weights are compared in their compute dtype."""
    return _compared(_values(a.config), _values(b.config), a.weights, b.weights)


def compare_folders(a: AuditedModel, b: AuditedModel) -> CheckpointsDifference:
    """As `compare_checkpoints`, of the files themselves: a family that zerokl has no decoder of."""
    weights = [{x.name: x.read() for x in stored_tensors(model.folder)} for model in (a, b)]
    return _compared(a.raw, b.raw, *weights)


def _compared(
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    a: Mapping[str, torch.Tensor],
    b: Mapping[str, torch.Tensor],
) -> CheckpointsDifference:
    """The differences of two configs x and y, and of their weights a and b."""
    config = {name: [x.get(name), y.get(name)] for name in {**x, **y} if x.get(name) != y.get(name)}
    shared = [name for name in a if name in b]
    unequal = [row for name in shared if (row := _difference(name, a[name].cpu(), b[name].cpu()))]
    return CheckpointsDifference(
        config=config,
        tensors=len(shared),
        tensors_unequal=len(unequal),
        unequal=unequal[:_LISTED],
        only_first=[name for name in a if name not in b],
        only_second=[name for name in b if name not in a],
    )


def have_one_shape(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether all operations of two models have outputs of one shape."""
    shapes = (*_SHAPES, *(f"experts.{name}" for name in _SHAPES_OF_EXPERTS))
    x, y = _values(a), _values(b)
    return all(x.get(name) == y.get(name) for name in shapes)


def _values(config: ModelConfig) -> dict[str, Any]:
    """The values of a config, those of its experts one by one."""
    values = config.values
    experts = values.pop("experts", {})
    return values | {f"experts.{name}": value for name, value in experts.items()}


def _difference(name: str, x: torch.Tensor, y: torch.Tensor) -> TensorDifference | None:
    """How one tensor differs; None where it does not."""
    if x.shape != y.shape:
        return TensorDifference(name, [list(x.shape), list(y.shape)])
    if x.dtype == y.dtype and not count_unequal(x, y):
        return None
    unequal = int((x.double() != y.double()).sum())
    if not unequal:
        return None
    relative = rms(x.double() - y.double()) / max(rms(y.double()), 1e-300)
    return TensorDifference(name, None, x.numel(), unequal, relative)
