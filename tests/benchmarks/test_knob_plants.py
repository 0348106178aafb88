"""The benchmark of planted numbers counts a report as right only where every part and every word is."""

import sys
from pathlib import Path

import pytest
import zerokl

CASES = Path(zerokl.__file__).parent / "benchmarks" / "audit_cases"
SCORES = "the sampler computes with attention's scores times"
FP8 = "the sampler computes with the output of attention.dense rounded to fp8 (e4m3) in all layers"


@pytest.fixture
def word(monkeypatch):
    monkeypatch.syspath_prepend(str(CASES))
    import knobs

    plants = {f"{x.family} {x.name}": x for x in knobs.plants()}
    yield lambda name, text: knobs.judged(plants[name], {"cause": {"kind": "knob: x", "text": text}})
    for name in ("knobs", "run", "models", "sound_logs", "sound"):
        sys.modules.pop(name, None)


def test_a_report_is_located_only_where_all_that_it_tells_is_right(word):
    yarn = "(near 2.005, YaRN's attention factor for a scaling of 64, squared)"
    assert word("qwen3 scores doubled", f"{SCORES} 1.998 ± 0.01 in all layers; not told from x") == "located"
    assert (
        word("qwen3 scores doubled", f"{SCORES} 1.998 ± 0.01 in all layers {yarn}; not told from x")
        == "wrong"
    )
    ours = "(near 1.459, YaRN's attention factor for a scaling of 8, squared)"
    assert word("qwen3 scores by YaRN's factor", f"{SCORES} 1.455 in all layers {ours}") == "located"
    assert word("gpt_neox fp8 outputs", FP8) == "located", "the brackets of a format are no meaning"


def test_of_two_plants_both_must_be_told(word):
    first = f"{SCORES} 1.6 in all layers"
    assert word("qwen3 two at once", first) == "wrong"
    assert word("qwen3 two at once", f"{first}; and mlp.down_proj times 0.7 ± 0.1 in layer 2") == "located"


def test_a_strange_plant_is_located_only_by_its_operation_and_layer(word):
    import strange

    plant = next(x for x in strange.plants() if x.name == "a norm's weight is lost")
    sys.modules.pop("strange")

    def judged(kind: str, text: str) -> str:
        return strange.judged(plant, {"cause": {"kind": kind, "text": text}})

    assert (
        judged("knob: x", "the sampler computes with self_attn.q_norm times 0.9 in layer 2. It explains")
        == "located"
    )
    assert (
        judged("knob: x", "the sampler computes with self_attn.q_norm times 0.9 in layer 1. It explains")
        == "wrong"
    )
    assert judged("another prompt", "the completions were drawn for other prompts") == "wrong"
    assert judged("unknown", "none of 100 hypotheses fits. The nearest is q_norm in layer 2") == "seen"
    assert judged("rounding", "rounding alone") == "missed"
