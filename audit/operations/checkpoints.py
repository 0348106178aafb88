"""Two checkpoints beside each other: the fields of their configs, and their weights."""

from dataclasses import fields

from ...files.bitwise import count_unequal
from ..sections import CheckpointsDifference, TensorDifference
from .operation_errors import rms
from .operations import Checkpoint

# Fields that decide the shapes. Where one differs, no operation of the two can be compared by its values.
SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
# Tensors of a report. A fine-tuned model differs in all of them.
_LISTED = 20


def compare_checkpoints(a: Checkpoint, b: Checkpoint) -> CheckpointsDifference:
    """The differences of two checkpoints. The weights are compared in their compute dtype."""
    names = [f.name for f in fields(a.config) if f.name != "raw"]
    config = {
        name: [getattr(a.config, name), getattr(b.config, name)]
        for name in names
        if getattr(a.config, name) != getattr(b.config, name)
    }
    unequal = [row for name in a.weights if name in b.weights and (row := _difference(name, a, b))]
    return CheckpointsDifference(
        config=config,
        tensors=len(a.weights.keys() & b.weights.keys()),
        tensors_unequal=len(unequal),
        unequal=unequal[:_LISTED],
        only_first=[name for name in a.weights if name not in b.weights],
        only_second=[name for name in b.weights if name not in a.weights],
    )


def _difference(name: str, a: Checkpoint, b: Checkpoint) -> TensorDifference | None:
    """How one tensor differs; None where it does not."""
    x, y = a.weights[name].cpu(), b.weights[name].cpu()
    if x.shape != y.shape:
        return TensorDifference(name, [list(x.shape), list(y.shape)])
    if x.dtype == y.dtype and not count_unequal(x, y):
        return None
    unequal = int((x.double() != y.double()).sum())
    if not unequal:
        return None
    relative = rms(x.double() - y.double()) / max(rms(y.double()), 1e-300)
    return TensorDifference(name, None, x.numel(), unequal, relative)
