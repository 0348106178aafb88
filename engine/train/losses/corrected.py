"""The losses whose gradients are compared: the run's own, and the same with each known correction.

    own            the loss as the run has it
    none           no correction
    full           the token's ratio, old / mu of the token: its prefixes are still the sampler's
    full_sequence  the sequence's ratio: the only one without a bias, at the price of its variance
    tis, mis, mis_token, icepop    the corrections of these presets, with their levels and bounds (presets.py)

Everything else is as in the run's loss: advantages, bounds of the staleness ratio, weights, other terms.
"""

from ...config.loss_section import PRESETS, USUAL, LossConfig

_FIELDS = ("correction", "correction_level", "correction_low", "correction_high")
_NONE = {name: USUAL[name] for name in _FIELDS}
# Name -> the choices of the correction.
CORRECTED: dict[str, dict[str, object]] = {
    "none": _NONE,
    "full": _NONE | {"correction": "full"},
    "full_sequence": _NONE | {"correction": "full", "correction_level": "sequence"},
} | {
    preset: {name: PRESETS[preset][name] for name in _FIELDS}
    for preset in ("tis", "mis", "mis_token", "icepop")
}
# The names of all losses that are compared.
MEASURED = ("own", *CORRECTED)


def corrected(loss: LossConfig) -> dict[str, LossConfig]:
    """The losses that are compared, by name, in the order of MEASURED. loss: the run's own, resolved."""
    return {"own": loss} | {name: loss.model_copy(update=choices) for name, choices in CORRECTED.items()}
