"""A matrix, or the embedding: rounded, taken from elsewhere, its bias left out, its heads moved."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ....model.operations import fused_with, input_names, operation, operation_names, split_name
from ...operations.plain_operations import Operations, Tensor, linear, weight_names
from ..changed_operation import E4M3, E5M2, SHORT, Change, ChangedOperation, ModelPlant, Traced

# Other layers whose weights are tried. A model of 80 layers would take minutes.
_NEIGHBOURS = 4


def changes(traced: Traced) -> Iterator[Change]:
    """Changes of a matrix: rounded, taken from elsewhere, its bias left out, its heads in other places."""
    op, actual, exact, lookup = traced.op, traced.actual, traced.exact, traced.lookup
    c, row = exact.checkpoint, operation(op, exact.checkpoint.config)
    name, bias = weight_names(op, c)
    w, b = c.weights[name], exact.weight(bias) if bias else None
    if row.equation is Equation.EMBEDDING:
        ids = torch.tensor([*exact.prompt, *exact.completion[:-1]], device=w.device)

        def output(weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return weight[ids].double()
    else:
        x = lookup(input_names(op, c.config)[0]).double()

        def output(weight: Tensor, bias: Tensor | None = b) -> Tensor:
            return linear(x, weight, bias)

    if row.fused == "qkv":
        yield from _moved_heads(actual, output(w), c.config.head_dim)
    for words, rounded in _roundings(w):
        yield f"{name} is rounded to {words}", output(rounded.to(w.dtype))
    if b is not None:
        yield f"{bias} is left out", output(w, None)
    for other in _siblings(op, name, exact):
        if other in c.weights and c.weights[other].shape == w.shape:
            yield f"it computes with {other}", output(c.weights[other])
    if w.dim() == 2 and w.shape[0] == w.shape[1]:
        yield f"{name} is transposed", output(w.T)


def _roundings(w: Tensor) -> Iterator[Change]:
    """A weight rounded to narrower formats, as quantised checkpoints and caches hold it."""
    wide = w.float()
    whole, rows = wide.abs().max(), wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    for name, dtype in (("fp8 e4m3", E4M3), ("fp8 e5m2", E5M2)):
        top = torch.finfo(dtype).max
        yield f"{name}, unscaled", wide.clamp(-top, top).to(dtype).float()
        for unit, largest in (("tensor", whole), ("row", rows)):
            scale = largest.clamp_min(1e-30) / top
            yield f"{name}, a scale for each {unit}", (wide / scale).to(dtype).float() * scale
    for bits in (8, 4):
        top = (1 << bits - 1) - 1
        yield f"int{bits}, a scale for each row", (wide / (rows / top)).round() * (rows / top)
    for dtype, name in SHORT.items():
        yield name, w.to(dtype).float()


def _siblings(op: str, name: str, exact: Operations) -> list[str]:
    """Weights that could be taken for this one: of the same layer, and of layers nearby."""
    prefix, kind = split_name(op)
    group = [row.name for row in fused_with(op, exact.checkpoint.config) if row.name != kind]
    same = [weight_names(prefix + other, exact.checkpoint)[0] for other in group]
    if not prefix:
        return same
    layer = int(prefix.split(".")[1])
    low, high = max(0, layer - _NEIGHBOURS), min(exact.checkpoint.config.layers, layer + _NEIGHBOURS + 1)
    others = [f"layers.{i}.{kind}" for i in range(low, high) if i != layer]
    names = {*operation_names(exact.checkpoint.config)}
    return same + [weight_names(other, exact.checkpoint)[0] for other in others if other in names]


def _moved_heads(actual: Tensor, expected: Tensor, head_dim: int) -> Iterator[Change]:
    """The heads in other places: each head of the output is compared with all heads of the checkpoint's."""
    outputs, heads = (x.reshape(len(x), -1, head_dim) for x in (actual, expected))
    places = torch.cdist(outputs.transpose(0, 1).flatten(1), heads.transpose(0, 1).flatten(1)).argmin(dim=1)
    moved = [i for i, j in enumerate(places.tolist()) if i != j]
    if moved:
        sources = [int(places[i]) for i in moved]
        yield f"heads {moved} hold the checkpoint's heads {sources}", heads[:, places].reshape(expected.shape)


# --- plants: transformers' weights, changed ---


def heads_swapped(model: torch.nn.Module) -> None:
    """Two query heads of one layer in each other's place."""
    weight = model.model.layers[2].self_attn.q_proj.weight
    heads = weight.view(-1, 16, weight.shape[1])
    heads[[0, 1]] = heads[[1, 0]]


def fp8_everywhere(model: torch.nn.Module) -> None:
    """All matrices of the layers in fp8 e4m3, with a scale for each."""
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                in_fp8(module.weight)


def in_fp8(w: torch.Tensor) -> None:
    """Round a weight to fp8 e4m3 in its place."""
    scale = w.abs().max().float() / 448
    w.copy_(((w.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(w.dtype))


class _Exchanged(torch.nn.Module):
    """An MLP whose gate and up have changed places."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj = mlp.up_proj, mlp.gate_proj
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gate_and_up_exchanged(model: torch.nn.Module) -> None:
    """A fused projection that was split the other way around."""
    model.model.layers[1].mlp = _Exchanged(model.model.layers[1].mlp)


def weight_of_another_layer(model: torch.nn.Module) -> None:
    """A loader with an index off."""
    layers = model.model.layers
    layers[3].mlp.down_proj.weight.copy_(layers[0].mlp.down_proj.weight)


def never_loaded(model: torch.nn.Module) -> None:
    """A weight of zeros."""
    model.model.layers[1].self_attn.o_proj.weight.zero_()


def transposed(model: torch.nn.Module) -> None:
    """A square matrix the other way around."""
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.copy_(weight.T.clone())


def update_that_came_twice(model: torch.nn.Module) -> None:
    """A weight a quarter larger."""
    model.model.layers[2].mlp.up_proj.weight.mul_(1.25)


CHANGED = ChangedOperation(
    equations=(Equation.EMBEDDING, Equation.LINEAR),
    changes=changes,
    plants=(
        ModelPlant(heads_swapped, "layers.2.q_proj", "heads [0, 1] hold the checkpoint's heads [1, 0]"),
        ModelPlant(fp8_everywhere, "layers.0.q_proj", "rounded to fp8 e4m3, a scale for each tensor"),
        ModelPlant(gate_and_up_exchanged, "layers.1.gate_proj", "model.layers.1.mlp.up_proj.weight"),
        ModelPlant(
            weight_of_another_layer,
            "layers.3.down_proj",
            "it computes with model.layers.0.mlp.down_proj.weight",
        ),
        ModelPlant(never_loaded, "layers.1.o_proj", "all its outputs are 0"),
        ModelPlant(transposed, "layers.1.o_proj", "is transposed"),
        ModelPlant(update_that_came_twice, "layers.2.up_proj", "its outputs are 1.25 times the checkpoint's"),
    ),
)
