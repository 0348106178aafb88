"""The numbers that projects gate on, beside the same numbers written out with torch as those projects do."""

import math

import numpy as np
import pytest
import torch
from zerokl.audit.figures.bands import GATES, band_figures, band_lines
from zerokl.audit.figures.gates import joined


def columns(scale: float, lengths: tuple[int, ...] = (3, 40, 1)) -> tuple[list, list]:
    rng = np.random.default_rng(0)
    sampler = [-rng.exponential(2.0, n).astype(np.float32) for n in lengths]
    return [(s + rng.normal(0, scale, len(s))).astype(np.float32) for s in sampler], sampler


def gate_figures(trainer: list, sampler: list) -> dict:
    return {name: gate.judged(joined(trainer, sampler)) for name, gate in GATES.items()}


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.05, 0.5])
def test_the_figures_are_those_of_a_padded_batch(scale):
    """Frameworks have a padded batch and a mask; the figures are masked means over it."""
    trainer, sampler = columns(scale)
    t, s = (
        torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x).double() for x in side], batch_first=True)
        for side in (trainer, sampler)
    )
    mask = torch.tensor([[i < len(x) for i in range(t.shape[1])] for x in sampler]).double()
    d, n = (t - s) * mask, mask.sum()
    expected = {
        "prime-rl": ((d.exp() - 1 - d) * mask).sum() / n,
        "slime": ((d.abs() * mask).sum(1) / mask.sum(1)).mean(),
        "skyrl": (d.abs() * mask).sum() / n,
        "verl": ((t.exp() - s.exp()).abs() * mask).sum() / n,
        "nemo-rl": (d.abs().exp() * mask).sum() / n,
    }
    figures = gate_figures(trainer, sampler)
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name].value == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name


def test_each_bound_fails_beyond_itself_and_says_so():
    bounds = {"prime-rl": 0.01, "slime": 0.1, "skyrl": 0.09, "verl": 0.01, "nemo-rl": 1.05}
    for scale in (0.0, 1e-3, 0.02, 0.05, 0.2, 1.0):
        corrections = band_figures(*columns(scale))
        for name, bound in bounds.items():
            gate = corrections.gates[name]
            assert gate.holds == corrections.in_band(name) == (gate.value < bound), (scale, name)
            line = band_lines(corrections, name)[0]
            assert line.startswith(f"Band {name} {'holds' if gate.holds else 'does not hold'}: ")
    assert not any(corrections.in_band(name) for name in bounds)


@pytest.mark.parametrize("trainer_side", [-math.inf, 400.0 - 500.0])
def test_an_infinite_ratio_holds_no_bound_of_logprobs(trainer_side):
    trainer, sampler = [np.float32([-1.0, trainer_side])], [np.float32([-1.0, -500.0])]
    for side in ((trainer, sampler), (sampler, trainer)):
        gates = gate_figures(*side)
        for name in ("prime-rl", "slime", "skyrl", "nemo-rl"):
            assert gates[name].value == math.inf, name
            assert not gates[name].holds
        assert math.isfinite(gates["verl"].value)
