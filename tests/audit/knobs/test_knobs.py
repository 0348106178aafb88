"""Numbers at operations that nobody listed are located by an audit of a log; sound logs give none."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from zerokl.audit.command import run_audit
from zerokl.audit.conclusion.verdict import verdict
from zerokl.audit.config import AuditSettings
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.knobs import column
from zerokl.audit.knobs.forward import Tokens
from zerokl.audit.knobs.knob import Turn, turned
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.audit.page.page import page
from zerokl.engine.rollout.hf import load_model
from zerokl.engine.rollout.types import GenerationParams
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.families import FAMILIES, write_family

IDS = torch.arange(5, 45).view(2, 20)
PROMPTS = [[5, 60 + 7 * i, 90 - i, 40] for i in range(10)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("families"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = write_family(name, root / name)
        return made[name]

    return folder


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def knob(places, name: str, what: str):
    return next(x for x in knobs_of(places, 200, True) if (x.name, x.what) == (name, what))


# --- what a knob does ---


@pytest.mark.parametrize("name", FAMILIES)
def test_every_knob_at_its_neutral_value_changes_nothing_and_is_taken_away(folder_of, name):
    model = load_model(folder_of(name), torch.float32, "eager")
    places, plain = places_of(model), logits(model)
    kinds = [x.kind for x in places.modules]
    assert places.lm_head in kinds
    assert len(kinds) >= 7
    assert places.layers == 2
    for k in knobs_of(places, 200, False):
        if k.step or k.what == "epsilon":
            with turned([Turn(k, k.neutral, k.place.layers)]):
                assert torch.allclose(logits(model), plain, atol=1e-5), f"{k.name} {k.what}"
        for value in k.values[:1]:
            with turned([Turn(k, value, k.place.layers)]):
                logits(model)
        assert torch.equal(logits(model), plain), f"{k.name} {k.what} stays"


def test_a_knob_is_the_change_that_its_words_say(folder_of):
    model = load_model(folder_of("GPTNeoX"), torch.float32, "eager")
    places, layer = places_of(model), model.gpt_neox.layers[1]

    def with_knob(name: str, what: str, value: float, layers=None) -> torch.Tensor:
        k = knob(places, name, what)
        with turned([Turn(k, value, layers or k.place.layers)]):
            return logits(model)

    scores = with_knob("attention's scores", "scores", 2.0, (1,))
    norm = with_knob("input_layernorm", "epsilon", 0.3, (1,))
    reach = with_knob("attention's reach", "reach", 3.0, (1,))
    layer.attention.scaling *= 2
    assert torch.allclose(scores, logits(model), atol=1e-5)
    layer.attention.scaling /= 2
    layer.input_layernorm.eps = 0.3
    assert torch.allclose(norm, logits(model), atol=1e-5)
    layer.input_layernorm.eps = 1e-5
    # What a token reads in layer 1 alone: the first rows have no more than that.
    plain = logits(model)
    assert torch.allclose(reach[:, :3], plain[:, :3], atol=1e-5)
    assert not torch.allclose(reach[:, 3:], plain[:, 3:], atol=1e-3)


def test_tokens_are_scored_as_an_engine_scores_them(folder_of):
    engine = HfEngine(folder_of("GPTNeoX"), torch.float32)
    params = SamplingParams(0.8)
    pairs = [((5, 6, 7), (8, 9, 10)), ((11, 12), (13, 14, 15, 16))]
    scores = engine.score(pairs, params)
    lines = [Line(i, *pair, x, x, params) for i, (pair, x) in enumerate(zip(pairs, scores, strict=True))]
    model = load_model(folder_of("GPTNeoX"), torch.float32, "eager")
    tokens = Tokens(model, lines)
    assert np.abs(tokens.base - np.concatenate(scores)).max() < 1e-5
    assert tokens.left(tokens.base) < 1e-4


# --- what an audit tells ---


def write_log(path: Path, folder: Path, change) -> Path:
    """A log of a bf16 sampler whose model is changed."""
    engine = HfEngine(folder, torch.bfloat16, "eager")
    change(engine.model)
    params = GenerationParams(SamplingParams(), 1, 40, frozenset({1}))
    rows = [
        {
            "prompt_ids": list(r.prompt_ids),
            "completion_ids": list(r.completion_ids),
            "logprobs": [float(x) for x in r.logprobs],
            "temperature": 1.0,
        }
        for r in engine.generate(PROMPTS, params, 0)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _hotter_layer(model) -> None:
    model.gpt_neox.layers[1].attention.scaling *= 2.5


def _smaller_mlp(model) -> None:
    for layer in model.gpt_neox.layers:
        layer.mlp.dense_4h_to_h.register_forward_hook(lambda _m, _i, y: 0.7 * y)


def _larger_mixer(model) -> None:
    model.backbone.layers[0].mixer.out_proj.register_forward_hook(lambda _m, _i, y: 1.4 * y)


PLANTS = [
    ("GPTNeoX", _hotter_layer, r"attention's scores times 2\.[3-7]\d* .* in layer 1"),
    pytest.param(
        "GPTNeoX", _smaller_mlp, r"times 0\.(6[5-9]|7[0-4])\d* .* in all layers", marks=pytest.mark.full
    ),
    pytest.param(
        "Mamba", _larger_mixer, r"mixer.out_proj times 1\.[34]\d* .* in layer 0", marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), PLANTS)
def test_a_number_that_nobody_listed_is_located(folder_of, tmp_path, name, change, words):
    log = write_log(tmp_path / "log.jsonl", folder_of(name), change)
    report = run_audit(str(log), "", None, AuditSettings(model=str(folder_of(name)), dtype="float32"))
    assert report.cause.kind.startswith("knob: "), report.cause
    assert re.search(words, report.cause.text), report.cause.text
    assert not report.outcome.passed
    assert report.cause.kind in verdict(report)
    assert "knob: " in page(report), "the page shows it as it shows other hypotheses"


@pytest.mark.full
@pytest.mark.parametrize("name", ["GPTNeoX", "GPT2"])
def test_a_sound_log_gives_no_knob(folder_of, tmp_path, name):
    log = write_log(tmp_path / "log.jsonl", folder_of(name), lambda model: None)
    settings = AuditSettings(model=str(folder_of(name)), dtype="float32", knobs=True)
    report = run_audit(str(log), "", None, settings)
    rows = [x for x in report.log.hypotheses.rows if x.name.startswith("knob")]
    assert rows, "they were tried"
    assert not any(x.fits for x in rows)
    assert not report.cause.kind.startswith("knob")


@pytest.mark.full
def test_a_fault_in_some_lines_is_not_told_of_the_sampler_as_a_whole(folder_of, tmp_path, monkeypatch):
    """The value is fitted to the lines that differ most, here to four, and checked on all."""
    monkeypatch.setattr(column, "_FIT_TOKENS", 110)
    folder = folder_of("GPTNeoX")
    hot = write_log(tmp_path / "hot.jsonl", folder, _hotter_layer).read_text().splitlines()
    sound = write_log(tmp_path / "sound.jsonl", folder, lambda model: None).read_text().splitlines()
    (log := tmp_path / "log.jsonl").write_text("\n".join([*hot[:5], *sound[5:]]) + "\n")
    report = run_audit(str(log), "", None, AuditSettings(model=str(folder), dtype="float32", knobs=True))
    rows = [x for x in report.log.hypotheses.rows if x.name.startswith("knob: attention's scores")]
    assert not any(x.fits for x in rows), rows
    assert re.search(r"times 2\.[3-7]\d* .* in layer 1.*; so in [56] of 10 lines", rows[0].what), rows[0].what
    assert not report.cause.kind.startswith("knob")
