"""A decoder asks its source of weights for one layer at a time, and reads them inside the context only."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.blocks.block import LayerWeights
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import FlatWeights

from tests.helpers import total_unequal
from tests.model.checkpoints import save_random

PAIRS = [([9, 8, 7], [5, 6, 7, 8]), ([2] * 40, [3] * 30)]


class OneLayerAtATime(FlatWeights):
    """A source that holds one layer: its copy is NaN after the context, unless it is `kept`."""

    def __init__(self, weights: FlatWeights, kept: bool):
        self.named, self._weights, self._kept = weights.named, weights, kept
        self.embed, self.norm, self.lm_head = weights.embed, weights.norm, weights.lm_head
        self.asked: list[int] = []
        self._open = False

    @contextmanager
    def layer(self, i: int) -> Iterator[LayerWeights]:
        assert not self._open, "two layers at once"
        self._open = True
        self.asked.append(i)
        with self._weights.layer(i) as weights:
            copies = {name: w.detach().clone() for name, w in weights.items()}
        yield copies
        self._open = False
        for copy in copies.values():
            if not self._kept:
                copy.fill_(float("nan"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random("qwen3", tmp_path_factory.mktemp("layers"), 0, "200KB")


@torch.no_grad()
def test_each_layer_is_asked_for_once_and_only_in_its_context(folder):
    decoder = load_decoder(folder, torch.float32)
    expected = logprobs(decoder, pack(PAIRS), SamplingParams())[0]
    decoder.weights = source = OneLayerAtATime(decoder.weights, kept=False)
    assert total_unequal([logprobs(decoder, pack(PAIRS), SamplingParams())[0]], [expected]) == 0
    assert source.asked == list(range(decoder.config.layers))


def test_control_a_backward_reads_what_the_source_has_taken_back(folder):
    decoder, is_finite = load_decoder(folder, torch.float32), []
    weights = decoder.weights
    for kept in (True, False):
        decoder.weights = OneLayerAtATime(weights, kept)
        decoder.w["embed"].grad = None
        logprobs(decoder, pack(PAIRS), SamplingParams())[0].sum().backward()
        is_finite.append(bool(decoder.w["embed"].grad.isfinite().all()))
    assert is_finite == [True, False]
