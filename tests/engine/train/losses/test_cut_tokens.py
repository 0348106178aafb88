"""Drawn tokens that the trainer's top-k, top-p or min-p cuts, before an update or after it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.loss_section import LossConfig

from tests.engine.train.losses.test_loss import CHOICES, loss_and_gradient
from tests.helpers import property_settings
from tests.presets import DRAWN_PRESETS

CUT = -math.inf
LOGP = st.floats(-8, 0, width=32)
MAYBE_CUT = st.one_of(st.just(CUT), LOGP)
SEQUENCES = st.lists(st.tuples(MAYBE_CUT, MAYBE_CUT, LOGP), min_size=1, max_size=5)


@pytest.mark.parametrize("name", DRAWN_PRESETS)
@property_settings(100)
@given(SEQUENCES, st.floats(-3, 3))
def test_no_preset_has_an_infinite_gradient(name, sequence, A):
    """Otherwise log r is infinite where an update gives a token back, kimi's square where it takes one."""
    _, slope = loss_and_gradient([sequence], [A], LossConfig(preset=name))
    assert slope.isfinite().all()


@property_settings(300)
@given(CHOICES, SEQUENCES, st.floats(-3, 3))
def test_a_token_that_old_cuts_has_no_ratio(choices, sequence, A):
    """It counts as one that no update has moved, in its sequence's ratio too."""
    cfg = LossConfig(**choices | {"correction": "none"})
    _, slope = loss_and_gradient([sequence], [A], cfg)
    unmoved = [(old if old != CUT else -1.0, old if old != CUT else -1.0, mu) for _, old, mu in sequence]
    moved = [(now, old, mu) if old != CUT else unmoved[t] for t, (now, old, mu) in enumerate(sequence)]
    _, expected = loss_and_gradient([moved], [A], cfg)
    assert slope.tolist() == expected.tolist()


def test_kimis_square_leaves_out_what_an_update_cuts():
    kimi = LossConfig(preset="kimi")
    kept, cut = (-1.0, -1.5, -1.5), (CUT, -0.5, -0.5)
    _, alone = loss_and_gradient([[kept]], [0.0], kimi)
    _, beside = loss_and_gradient([[kept, cut]], [0.0], kimi)
    assert beside[0].item() == alone[0].item() == pytest.approx(kimi.square * 0.5)
