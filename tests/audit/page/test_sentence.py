"""Sentences of the audit begin with a capital, and names keep their case."""

import pytest
from zerokl.audit.sentence import begun


@pytest.mark.parametrize(
    "text",
    [
        "hf and zerokl agree",
        "vllm computes",
        "runs/x.jsonl holds",
        "k1 is 0.1",
        "layers.0.q_norm differs",
        "k3",
    ],
)
def test_a_name_keeps_its_case(text):
    assert begun(text) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("the KL of SmolLM2 is 0", "The KL of SmolLM2 is 0"),
        ("rounding alone. The two engines sum", "Rounding alone. The two engines sum"),
        ("equal.", "Equal."),
        ("hfs", "Hfs"),
        ("", ""),
    ],
)
def test_a_word_begins_with_a_capital_and_the_rest_stays(text, sentence):
    assert begun(text) == sentence
