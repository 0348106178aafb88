"""One model and one log for all tests of this folder."""

from pathlib import Path

import pytest
import torch
from zerokl.model.checkpoint import load_decoder

from tests.audit.hypotheses.planted import (
    WIDTHS,
    Case,
    draw,
)
from tests.random_model import random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    # With weights of this size the context matters more than rounding does.
    return random_model(tmp_path_factory.mktemp("hypotheses"), WIDTHS, sharper=1.2)


@pytest.fixture(scope="session")
def case(model) -> Case:
    return Case(model, decoder := load_decoder(model, torch.float32), draw(decoder))
