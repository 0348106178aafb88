"""Weights that a sampler has and its trainer has not: what is no weight stays as it is."""

import pytest
import torch
from zerokl.files.bitwise import count_unequal
from zerokl.model.buffers import as_numbers
from zerokl.model.checkpoint import load_decoder
from zerokl.model.sampler_weights import ROUNDED, rounded_weights

from tests.random_model import MIXTURES, random_model


@pytest.mark.parametrize("dtype", ROUNDED)
def test_weights_are_rounded_and_the_bytes_of_buffers_are_not(tmp_path, dtype):
    decoder = load_decoder(random_model(tmp_path, MIXTURES["glm4_moe"]), torch.float32)
    layout, exact = decoder.layout, decoder.flat.detach()
    assert layout.buffers
    before, after = layout.stored_tensors(exact), layout.stored_tensors(rounded_weights(layout, exact, dtype))
    for name, x in before.items():
        wanted = x if name in layout.buffers else x.to(ROUNDED[dtype]).float()
        assert count_unequal(after[name], wanted) == 0, name


def test_control_an_fp8_does_not_hold_the_bytes_of_a_buffer(tmp_path):
    decoder = load_decoder(random_model(tmp_path, MIXTURES["glm4_moe"]), torch.float32)
    held = decoder.layout.checkpoint_views(decoder.flat.detach())[min(decoder.layout.buffers)]
    assert count_unequal(as_numbers(held.to(torch.float8_e4m3fn).float()), as_numbers(held)) > 0
