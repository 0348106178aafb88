"""The bias of the gradient in words and rows: for the terminal, and for audit.html."""

from collections.abc import Mapping
from functools import partial

from ...verify.bias_figures import Bias, DrawnBias
from .numbers import estimate

Row = tuple[str, ...]
_shown = partial(estimate, digits=3)
# Headings of the losses, and what the figures are (verify/bias_figures.py).
LOSSES = ("correction", "bias", "length", "cosine", "noise of a step", "cosine of a step")
LEGEND = (
    "bias: the squared distance of the expected gradient from the exact one, in units of the exact one's "
    "square; 0 without a bias, and an estimate may be negative. length: along the exact gradient, 1 without "
    "a bias. ± is the standard error over draws (jackknife)."
)


def loss_rows(losses: Mapping[str, Bias]) -> list[Row]:
    """The figures of the whole model, by loss."""
    return [
        (name, *map(_shown, (x.bias, x.length, x.cosine, x.noise, x.draws_cosine)))
        for name, x in losses.items()
    ]


def layer_headings(bias: DrawnBias) -> Row:
    """Headings of the layers: the losses."""
    return "bias of", *bias.losses


def layer_rows(bias: DrawnBias) -> list[Row]:
    """The bias of each layer, by loss."""
    return [(layer, *(_shown(x.bias) for x in losses.values())) for layer, losses in bias.layers.items()]


def drawn_from(bias: DrawnBias) -> str:
    """What was drawn, and what exact draws show of each other."""
    floor = bias.exact
    return (
        f"{bias.draws} draws of {bias.sampler} and {bias.draws} exact ones after step {bias.step}, each "
        f"of {bias.prompts} prompts x {bias.num_generations} completions. The exact ones have noise "
        f"{_shown(floor.noise)}, and two of them the cosine {_shown(floor.draws_cosine)}: the floor."
    )
