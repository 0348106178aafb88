"""The matrices of all layers in fp8 e4m3 or int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ....model.quantisation import Quantisation
from ....model.sampler_weights import quantised_weights
from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_weights
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Sizes of the blocks with one scale each.
_BLOCKS = (128, 64, 32)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """A scale for each matrix, row or block; rounded from the model's weights, or from these in bf16."""
    model = evidence.scorer.model()
    for words, format in {"fp8 e4m3": "float8_e4m3fn", "int8": "int8"}.items():
        for part, size in {"matrix": 0, "row": 1, **{f"block of {n} x {n}": n for n in _BLOCKS}}.items():
            for source in (torch.float32, torch.bfloat16):
                if format == "int8" and size > 1:
                    continue
                how = Quantisation(format, size)
                flat = quantised_weights(model.layout, model.flat.detach(), how, source)
                rounded_before = "" if source == torch.float32 else ", from bf16"
                what = (
                    f"the sampler's weights are quantised to {words}, one scale for each {part}"
                    f"{rounded_before}"
                )
                decoder = with_weights(evidence, flat)
                yield Prediction(what, decoder_scores(decoder, evidence), decoder=decoder)


def _quantised(kind: str, by: str, through_bf16: bool = False):
    """A change of weights in plain torch: fp8 or int8 with a scale for each tensor, row or block of 32."""

    def change(name: str, w: torch.Tensor):
        if "proj" not in name or w.dim() != 2:  # a bias is not quantised
            return None
        x = w.bfloat16().float() if through_bf16 else w.float()
        rows, columns = (n + -n % 32 for n in x.shape)
        shaped = {"tensor": x.reshape(1, -1), "row": x}.get(by)
        if shaped is None:
            wide = torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))
            shaped = wide.reshape(rows // 32, 32, columns // 32, 32).transpose(1, 2).reshape(-1, 1024)
        most = 448.0 if kind == "fp8" else 127.0
        scale = (shaped.abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
        small = shaped / scale
        small = small.to(torch.float8_e4m3fn).float() if kind == "fp8" else small.round()
        back = small * scale
        if by == "block":
            back = back.reshape(rows // 32, columns // 32, 32, 32).transpose(1, 2).reshape(rows, columns)
            return back[: x.shape[0], : x.shape[1]]
        return back.reshape(x.shape)

    return change


def fp8_by_tensor(w: World) -> Log:
    """A scale for each matrix."""
    return w.sampler(w.changed(_quantised("fp8", "tensor")))


def fp8_by_row_of_bf16(w: World) -> Log:
    """A scale for each row, of weights that came in bf16."""
    return w.sampler(w.changed(_quantised("fp8", "row", True)))


def fp8_by_block(w: World) -> Log:
    """A scale for each block of 32 x 32."""
    return w.sampler(w.changed(_quantised("fp8", "block")))


def int8_by_tensor(w: World) -> Log:
    """Whole numbers with one scale for each matrix."""
    return w.sampler(w.changed(_quantised("int8", "tensor")))


def fp8_and_temperature(w: World) -> Log:
    """Weights in fp8, and another temperature than the log says."""
    model = w.changed(_quantised("fp8", "tensor"))
    return w.sampler(model, replace(w.usual, temperature=w.uniform(0.9, 1.1)))


FAULT = Predicted(
    name="weights quantised",
    order=300,
    predict=predict,
    needs_decoder=True,
    remedy="Let the trainer score with the quantised weights, or correct for it (importance sampling).",
    tries="fp8 e4m3 and int8, with a scale for each matrix, row or block, of the weights or of these in bf16",
    is_dimmed=True,
    is_second=True,
    perturb=("weights",),
    plants=(
        Plant(group="weights", make=fp8_by_tensor),
        Plant(group="weights", make=fp8_by_row_of_bf16),
        Plant(group="weights", make=fp8_by_block),
        Plant(group="weights", make=int8_by_tensor),
        Plant(group="composed", make=fp8_and_temperature, named=("weights quantised", "another temperature")),
    ),
)
