"""A value is told by a known name only where its error allows for that, and never as more than near."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from zerokl.audit.knobs.dictionary import meaning
from zerokl.audit.knobs.knob import Knob, Turn
from zerokl.audit.knobs.knob_fit import Fitted
from zerokl.audit.knobs.module_places import Place

CONFIG = SimpleNamespace(head_dim=16, hidden_size=96, num_attention_heads=6)
LAYERS = {0: torch.nn.Linear(2, 2), 1: torch.nn.Linear(2, 2)}


def told(what: str, value: float, error: float, place: Place | None = None, step: float = 0.05) -> str:
    place = place or Place("self_attn", LAYERS)
    turn = Turn(Knob(place, what, 1.0, step=step), value, place.layers)
    return meaning(Fitted((turn,), 0.0, np.empty(0), error), CONFIG, "lm_head")


def test_a_factor_22_errors_from_yarns_is_not_told_as_it():
    assert told("scores", 1.604, 0.0013) == ""
    assert told("scores", 1.630, 0.0013) == "near 1.631, YaRN's attention factor for a scaling of 16, squared"
    assert told("scores", 1.5, 0.5) == "", "a large error gives room for 2% at most"


@pytest.mark.parametrize("value", [1.15, 1.3, 1.45, 1.6, 1.8, 2.0])
def test_a_round_factor_is_not_told_as_yarns(value):
    assert told("scores", value, 0.0005) == ""


def test_a_value_that_is_searched_without_a_slope_is_known_as_far_as_the_search_goes():
    assert told("epsilon", 1.01e-5, 0.0, step=0.0) == "near 1e-05, a usual one of other families"
    assert told("epsilon", 1.1e-5, 0.0, step=0.0) == ""


def test_nothing_is_told_as_left_out_by_its_error():
    assert told("scale", 0.0, 0.0) == "left out"
    assert told("scale", 0.003, 0.002) == "near 0, left out"
    assert told("scale", 0.05, 0.02) == ""


def test_a_temperature_is_of_the_logits_alone_and_other_than_1():
    head, last_norm = (Place(x, {-1: torch.nn.Linear(2, 2)}) for x in ("lm_head", "norm"))
    assert told("scale", 1.25, 0.001, head) == "as a temperature of 0.8 is"
    assert told("scale", 1.25, 0.001, last_norm) == ""
    assert told("scale", 1.002, 0.001, head) == ""
