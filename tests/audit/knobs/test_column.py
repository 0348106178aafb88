"""When the knobs of a column are tried, on which lines, and that the search never ends an audit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from zerokl.audit.conclusion.log_findings import fitting, none_fits
from zerokl.audit.hypotheses.evidence import Evidence
from zerokl.audit.hypotheses.noise import measured
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.hypotheses.tried import Row, Tried
from zerokl.audit.knobs import column
from zerokl.audit.knobs.column import KnobModel, beside_knobs, with_knobs, words_of
from zerokl.audit.knobs.forward import Tokens, chosen, sampled, usable
from zerokl.audit.knobs.knob import Turn
from zerokl.audit.knobs.knob_fit import Fitted
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.audit.knobs.search import Answer
from zerokl.engine.rollout.hf import load_model

from tests.audit.families import write_family

TRIED = Tried(distance=1.0, tokens=100, tried=44)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family("GPTNeoX", tmp_path_factory.mktemp("m") / "m")


def line(index: int, prompt: int, completion: int = 20) -> Line:
    x = np.full(completion, -1.0, np.float32)
    return Line(index, (5,) * prompt, (7,) * completion, x, x - 0.1 * (index + 1))


LINES = [line(i, 6) for i in range(6)]


def knob_model(folder, always: bool = False) -> KnobModel:
    return KnobModel(folder, torch.device("cpu"), always)


def test_a_model_that_is_too_large_is_never_loaded(folder, monkeypatch):
    monkeypatch.setattr(column, "load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(column, "_MOST_WEIGHTS", 1000)
    tried = with_knobs(TRIED, Evidence(LINES), knob_model(folder))
    assert replace(tried, untried="") == TRIED
    assert "weights" in tried.untried
    assert "--knobs" in tried.untried


def test_a_prompt_that_no_forward_holds_is_left_out():
    long, short = line(9, 8000), line(1, 6)
    assert usable([long, short], 2000) == [short]
    assert usable([long], 2000) == []
    assert usable([line(0, 0)], 2000) == [], "the first token of no prompt has no probability"
    for kept in (chosen([line(2, 1900), *LINES], 2000), sampled([line(2, 1900), *LINES], 2000, 1)[0]):
        assert len(kept) * max(len(x.prompt_ids) + len(x.completion_ids) for x in kept) <= 2000


def test_long_prompts_alone_are_said_and_no_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(column, "load_model", lambda *_: pytest.fail("loaded"))
    evidence = Evidence([line(0, 8000)])
    for always in (False, True):
        tried = with_knobs(TRIED, evidence, knob_model(folder, always))
        assert replace(tried, untried="") == TRIED
        assert "prompt" in tried.untried
        assert "--knobs" not in tried.untried, "it would not help"
    monkeypatch.setattr(column, "_FIT", 1e6)
    assert "--knobs" in with_knobs(TRIED, evidence, knob_model(folder)).untried


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room\nat all"), MemoryError(), KeyError("x")])
def test_an_error_of_a_library_ends_the_search_and_no_audit(folder, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(column, "load_model", fails)
    tried = with_knobs(TRIED, Evidence(LINES), knob_model(folder))
    assert replace(tried, untried="") == TRIED
    assert type(error).__name__ in tried.untried
    assert "\n" not in tried.untried


def test_a_stop_by_the_user_is_no_error_of_a_library(folder, monkeypatch):
    monkeypatch.setattr(column, "load_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        with_knobs(TRIED, Evidence(LINES), knob_model(folder))


def row(name: str, share_left: float, fits: bool = False) -> Row:
    return Row(name, "", "", 1.0, share_left, 1 - share_left, share_left, 100, 1, 1, 1.0, 99.0, fits)


def test_rows_are_the_nearest_first_and_numbers_at_operations_are_counted(folder, monkeypatch):
    rows = [row("knob: a", 0.9), row("knob: b", 0.2, fits=True), row("knob: c", 0.4)]
    monkeypatch.setattr(column, "_fitted", lambda *_: (rows, 56))
    before = replace(TRIED, rows=[row("x", 0.5), row("y", 0.95)])
    tried = with_knobs(before, Evidence(LINES), knob_model(folder))
    assert [x.name for x in tried.rows] == ["knob: b", "knob: c", "x", "knob: a", "y"]
    assert tried.best is rows[1]
    assert tried.tried == 44 + 56


@pytest.mark.parametrize("error", [RuntimeError("no batching rule\nhere"), MemoryError(), IndexError("x")])
def test_an_error_where_a_place_is_looked_for_keeps_the_numbers_that_were_fitted(folder, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(column, "_fitted", lambda *_: ([row("knob: a", 0.9)], 56))
    monkeypatch.setattr(column, "_with_entry", fails)
    tried = with_knobs(TRIED, Evidence(LINES), knob_model(folder))
    assert [x.name for x in tried.rows] == ["knob: a"]
    assert tried.tried == TRIED.tried + 56
    assert tried.untried.startswith("No place where the difference enters was looked for: the search ended")
    assert type(error).__name__ in tried.untried
    assert "\n" not in tried.untried


@pytest.mark.parametrize(
    ("named_leaves", "knob_leaves", "knob_fits", "best"),
    [
        (0.09, 0.03, True, "knob"),  # a cause that is like the true one
        (0.09, 0.03, False, "named"),  # other lines spoke against the knob
        (0.09, 0.07, True, "named"),  # little less: a knob of another place takes some of it by chance
        (0.02, 0.01, True, "named"),  # what is left may be rounding
    ],
)
def test_a_hypothesis_that_leaves_more_than_rounding_is_none_where_a_knob_leaves_less(
    named_leaves, knob_leaves, knob_fits, best
):
    named, knob = row("named", named_leaves, fits=True), row("knob", knob_leaves, knob_fits)
    tried = beside_knobs(replace(TRIED, rounding=0.01, best=named, rows=[named], also=["x"]), [knob])
    assert tried.best.name == best
    assert [x.fits for x in tried.rows if x.name == "named"] == [best == "named"]
    assert bool(tried.also) == (best == "named")


def test_a_sampler_of_a_narrower_rounding_gets_no_room_for_that_of_bf16(folder):
    """The noise of a dtype that was given; the trainer's column of a log is in another one."""
    models = {x: replace(knob_model(folder), sampler_dtype=x) for x in ("", "bfloat16", "float16", "float32")}
    assert {x: (m.dtype_of("sampler"), m.dtype_of("trainer")) for x, m in models.items()} == {
        x: (x or "bfloat16", "bfloat16") for x in models
    }
    tokens = Tokens(models[""].model(), LINES)
    noises = {x: tokens.noise(x) for x in models if x}
    assert noises["float16"].size < noises["bfloat16"].size / 4
    assert noises["float32"].size < noises["float16"].size / 10
    assert noises["float32"].dtype == "float32"


def test_a_rounding_is_that_of_a_model_loaded_in_the_dtype_and_larger_where_a_knob_makes_it_so(folder):
    tokens = Tokens(knob_model(folder).model(), LINES)
    plain, rounded = tokens.noise("bfloat16"), Tokens(load_model(folder, torch.bfloat16, "eager"), LINES)
    assert plain == measured("bfloat16", [rounded.base], [tokens.base])
    assert all(x.dtype == torch.float32 for x in tokens.model.parameters())
    places = places_of(tokens.model)
    head = next(x for x in knobs_of(places, 30, False) if x.place.kind == places.lm_head)
    assert tokens.noise("bfloat16", [Turn(head, 3.0, head.place.layers)]).size > 2 * plain.size


def test_each_of_two_knobs_has_its_meaning(folder):
    places = places_of(knob_model(folder).model())
    by_what = {x.what: x for x in knobs_of(places, 30, False)}
    scores, stretch = by_what["scores"], by_what["positions"]
    turns = Turn(scores, 1.459, scores.place.layers), Turn(stretch, 0.25, stretch.place.layers)
    answer = Answer(Fitted(turns, 0.1, np.empty(0), 0.001), (), True, 1.0, 99.0)
    config = SimpleNamespace(head_dim=8, hidden_size=32, num_attention_heads=4)
    first, second = words_of(answer, config, "lm_head", "sampler").split("; and ")
    assert "in all layers (near 1.459, YaRN's attention factor for a scaling of 8, squared)" in first
    assert "± 0.001 (linear scaling by 4)" in second


def test_the_cause_says_that_no_number_was_fitted():
    for best, find in ((None, none_fits), (row("x", 0.1, fits=True), fitting)):
        tried = replace(TRIED, rows=[row("x", 0.1)], best=best, untried="No number was fitted: so.")
        measured = SimpleNamespace(log=SimpleNamespace(hypotheses=tried), columns_alone=False)
        assert "No number was fitted: so." in find(measured).text
