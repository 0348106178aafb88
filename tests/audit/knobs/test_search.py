"""The search over one column: what it tells beside one knob, and what it does not."""

import copy

import numpy as np
import pytest
import torch
from zerokl.audit.hypotheses.noise import Noise, weight
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.knobs import search
from zerokl.audit.knobs.forward import Tokens
from zerokl.audit.knobs.knob import Turn
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.audit.knobs.search import Knobs
from zerokl.audit.knobs.swaps import swaps_of
from zerokl.engine.rollout.hf import load_model

from tests.audit.families import write_family


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_family("GPTNeoX", tmp_path_factory.mktemp("m") / "m"), torch.float32, "eager")


def tokens_of(model, *turned: tuple[str, str, float, tuple[int, ...] | None], noise: float) -> Tokens:
    """Tokens whose column is that of some knobs, with noise."""
    draws, x = np.random.default_rng(0), np.full(24, np.nan, np.float32)
    ids = [tuple(map(int, draws.integers(5, 250, 30))) for _ in range(8)]
    lines = [Line(i, row[:6], row[6:], x, x) for i, row in enumerate(ids)]
    tokens, known = Tokens(model, lines), list(knobs_of(places_of(model), 30, False))
    turns = []
    for name, what, value, layers in turned:
        k = next(x for x in known if (x.name, x.what) == (name, what))
        turns.append(Turn(k, value, layers or k.place.layers))
    column = tokens.scores(turns)
    column = column + noise * weight(column) * draws.standard_normal(len(column))
    return Tokens(
        model,
        [
            Line(i, x.prompt_ids, x.completion_ids, y, x.scored)
            for i, (x, y) in enumerate(zip(lines, tokens.by_line(column), strict=True))
        ],
    )


def answers(tokens: Tokens, size: float):
    return Knobs(tokens, tokens, places_of(tokens.model), lambda _: Noise("bfloat16", size)).answer()[0]


SCORES = ("attention's scores", "scores", 1.828, None)


@pytest.mark.full
def test_a_second_knob_that_explains_nothing_is_not_told(model):
    """What the first one leaves is noise that no knob explains, and more than the dtype rounds."""
    told = answers(tokens_of(model, SCORES, noise=0.01), 0.004)
    assert told[0].fit.last.knob.name == "attention's scores"
    assert all(len(x.fit.turns) == 1 for x in told), [x.fit.turns for x in told]


def test_a_second_knob_that_explains_is_told(model):
    second = ("mlp.dense_4h_to_h", "scale", 0.7, (1,))
    told = answers(tokens_of(model, SCORES, second, noise=0.001), 0.001)
    assert len(told[0].fit.turns) == 2
    assert told[0].fits
    assert {x.knob.name for x in told[0].fit.turns} == {"attention's scores", "mlp.dense_4h_to_h"}


def test_other_layers_of_the_same_knob_that_leave_as_little_are_told(model):
    """In a model whose second MLP gives nothing: what is turned in both is turned in the first."""
    model = copy.deepcopy(model)
    for x in model.gpt_neox.layers[1].mlp.dense_4h_to_h.parameters():
        x.data.zero_()
    told = answers(tokens_of(model, ("mlp.dense_4h_to_h", "scale", 0.7, (0,)), noise=0.001), 0.001)[0]
    assert told.fits
    turns = [(x.last.knob.name, x.last.knob.what, x.last.layers, x.left) for x in (told.fit, *told.alike)]
    assert {x[2] for x in turns} >= {(0,), (0, 1)}, turns


@pytest.mark.parametrize("forwards", [7, 10**6])
def test_other_operations_are_tried_in_all_layers_first_and_in_each_where_the_model_is_small(
    model, monkeypatch, forwards
):
    """Of a large model a layer by layer trial of the first ones alone would take all the time."""
    tokens, tried = tokens_of(model, noise=0.0), []
    monkeypatch.setattr(search, "_at", lambda tiny, turn: tried.append((tiny, turn)))
    weights = sum(x.numel() for x in model.parameters())
    monkeypatch.setattr(search, "_SWAP_WORK", weights * 100 * forwards)
    swaps = list(swaps_of(places_of(model)))
    counted = Knobs(tokens, tokens, places_of(model), lambda turns: Noise("bfloat16", 0.01))._swapped(swaps)[
        1
    ]
    turns = [turn for _, turn in tried]
    in_all = [x.is_everywhere and not x.knob.names_layers for x in turns]
    assert in_all == sorted(in_all, reverse=True), "in all layers first"
    assert sum(len(x.completion_ids) for x in tried[0][0].lines) <= (100 if forwards == 7 else 300)
    if forwards == 7:
        assert (len(turns), all(in_all), counted) == (7, True, {x.knob for x in turns})
    else:
        assert {x.knob for x in turns} == set(swaps)
        assert {x.layers for x in turns} >= {(0,), (1,), (0, 1)}
