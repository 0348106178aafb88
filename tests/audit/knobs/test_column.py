"""When the knobs of a column are tried, on which lines, and that the search never ends an audit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.audit.hypotheses.evidence import Evidence
from zerokl.audit.hypotheses.lines import Line
from zerokl.audit.hypotheses.tried import Tried
from zerokl.audit.knobs import column
from zerokl.audit.knobs.column import KnobModel, with_knobs

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
