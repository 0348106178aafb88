"""A knob in a layer computes from that layer on, with the bits of a whole forward."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.knobs.forward import Tokens
from zerokl.audit.knobs.knob import Turn, turned
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.audit.knobs.prefix import Prefix
from zerokl.engine.rollout.hf import load_model

from tests.audit.families import FAMILIES, write_family

QUICK = ("GPTNeoX", "Mamba")


def lines() -> list[Line]:
    column = np.full(6, -1.0, np.float32)
    ids = tuple(range(20, 26))
    return [Line(i, (5, 60 + i, 9)[: 3 - i % 2], ids, column, column) for i in range(4)]


def last_layer_knobs(model) -> list[Turn]:
    """A knob of each kind that layers have, in the last of them."""
    knobs = [
        x for x in knobs_of(places_of(model), 30, False) if x.what in ("scale", "scores", "values", "epsilon")
    ]
    return [Turn(x, 0.7, x.place.layers[-1:]) for x in knobs if x.place.layers[-1] > 0]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.full]) for x in FAMILIES]
)
def test_a_knob_in_a_layer_has_the_bits_of_a_whole_forward(tmp_path, name):
    model = load_model(write_family(name, tmp_path / name), torch.float32, "eager")
    tokens, ran = Tokens(model, lines()), []
    prefix = tokens._recorded[1]
    assert prefix.layers
    turns = last_layer_knobs(model)
    assert turns
    with ExitStack() as stack:
        for module in prefix.layers[0].children():
            stack.callback(module.register_forward_hook(lambda *_: ran.append(1)).remove)
        for turn in turns:
            assert np.array_equal(tokens.scores((turn,)), _whole(tokens, turn))
        whole, ran[:] = len(ran), []
        tokens.scores(turns[:1])
    assert (whole > 0, ran) == (True, []), "the first layer computes in whole forwards alone"
    assert np.array_equal(tokens.base, Tokens(model, tokens.lines).base), "nothing is left on the model"


def test_layers_that_hand_on_more_than_they_give_are_all_computed(tmp_path):
    model = load_model(write_family("GPTNeoX", tmp_path / "model"), torch.float32, "eager")
    first, *_, last = model.gpt_neox.layers
    kept = {}
    first.mlp.register_forward_hook(lambda _m, _a, out: kept.update(x=out))
    last.register_forward_hook(lambda _m, _a, out: out + kept.pop("x", torch.zeros(())))
    assert Tokens(model, lines())._recorded[1] == Prefix()


def test_logits_are_made_of_the_rows_of_completion_tokens_alone(tmp_path):
    model, shapes = load_model(write_family("GPTNeoX", tmp_path / "model"), torch.float32, "eager"), []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, _a, out: shapes.append(tuple(out.shape)))
    tokens = Tokens(model, lines())
    scores = tokens.by_line(tokens._scores())
    handle.remove()
    assert [x[:2] for x in shapes] == [(1, 24)], "4 lines of 6"
    for line, column in zip(tokens.lines, scores, strict=True):
        ids = torch.tensor([[*line.prompt_ids, *line.completion_ids]])
        logp = model(ids).logits[0].log_softmax(-1).detach()
        first = len(line.prompt_ids)
        whole = [float(logp[i - 1, ids[0, i]]) for i in range(first, ids.shape[1])]
        assert np.allclose(column, whole, rtol=0, atol=1e-5)


def _whole(tokens: Tokens, turn: Turn) -> np.ndarray:
    with turned((turn,)):
        return tokens._scores()
