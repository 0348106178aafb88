"""Samplers name the experts of every row that they compute, however they read and draw it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from zerokl.engine.rollout.hf import HfGenerator
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder
from zerokl.model.routing import RecordedRouting, ReplayedRouting

from tests.random_model import EXPERTS, random_model
from tests.trajectories import in_three_turns

# Prompts of several lengths, two of them equal, and two that begin with the same blocks.
PROMPTS = [[5, 6, 7], [5, 6, 7], [9] * 70, [*[9] * 66, 8]]
PARAMS = GenerationParams(SamplingParams(), 2, 9, frozenset({1}), experts=True)
KEY = RngKey(3, 1)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS, sharper=3.0)


@torch.no_grad()
def whole(decoder: Decoder, rollout: Rollout) -> np.ndarray:
    """The experts of one forward over a whole trajectory."""
    routing, ids = RecordedRouting(decoder.config.experts), rollout.ids[:-1]
    decoder.hidden(torch.tensor(ids), PackedContext([len(ids)], decoder.config, routing=routing))
    return routing.taken()[: len(ids)].numpy()


def unequal(rollouts: Sequence[Rollout], expected: Sequence[np.ndarray]) -> int:
    """Rows and layers whose experts differ, in any order of the slots."""
    pairs = zip((r.experts for r in rollouts), expected, strict=True)
    return sum(int((np.sort(a, 2) != np.sort(b, 2)).any(2).sum()) for a, b in pairs)


@pytest.mark.parametrize("draw", [complete, in_three_turns], ids=["one turn", "three turns"])
@pytest.mark.parametrize("batch", [0, 13], ids=["whole prompts", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_native_samplers_are_those_of_a_whole_forward(moe, dtype, batch, draw):
    """Prompts are read once, in chunks, and of later turns what is not in the prefix cache."""
    decoder = load_decoder(moe, dtype)
    sampler = NativeSampler(decoder, max_concurrency=3, max_batch_tokens=batch)
    rollouts = draw(sampler, PROMPTS, PARAMS, KEY)
    assert (sampler.tokens_cached > 100) is (draw is in_three_turns)
    expected = [whole(decoder, r) for r in rollouts]
    assert [r.experts.shape for r in rollouts] == [x.shape for x in expected]
    assert unequal(rollouts, expected) == 0
    assert all((r.drawn_experts == x[r.drawn[1:]]).all() for r, x in zip(rollouts, expected, strict=True))
    expected[-1][-1, 0] = (expected[-1][-1, 0] + 1) % 6
    assert unequal(rollouts, expected) == 1, "control"


def test_blocks_that_were_kept_without_experts_are_read_again(moe):
    decoder = load_decoder(moe, torch.float32)
    sampler = NativeSampler(decoder)
    keeping = [r for r in PARAMS.requests(PROMPTS, KEY)]
    for experts in (False, True):
        requests = [
            type(r)(
                r.ids, r.rng_key, r.draw_params._replace(experts=experts), r.max_tokens, trajectory_tokens=99
            )
            for r in keeping
        ]
        completions = sampler.generate(requests)
        assert sampler.tokens_cached == 0
    assert all(
        len(c.experts) == len(r.ids) + len(c.ids) - 1 for r, c in zip(requests, completions, strict=True)
    )


@torch.no_grad()
def test_transformers_are_its_own_routers_of_each_sequence_alone(moe):
    """Beside its router_logits: prompts are padded and drawn together, and have caches."""
    engine = HfGenerator(moe, torch.float32)
    rollouts = engine.generate(PROMPTS, PARAMS, 3)
    expected = []
    for r in rollouts:
        out = engine.model(torch.tensor([r.ids[:-1]]), output_router_logits=True, use_cache=False)
        layers = [z.view(-1, z.shape[-1]).topk(2).indices for z in out.router_logits]
        expected.append(torch.stack(layers, 1).numpy())
    assert unequal(rollouts, expected) == 0
    assert rollouts[0].experts.shape == (len(rollouts[0].ids) - 1, 1, 2)
    shifted = [np.roll(x, 1, 0) for x in expected]
    assert unequal(rollouts, shifted) > 10, "control: the rows before"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, 2, 2), r"must be \[rows, \*\(1, 2\)\]"),
        (torch.full((3, 1, 2), 6), r"must be in 0\.\.5"),
    ],
)
def test_experts_that_a_model_does_not_have_are_refused(moe, given, message):
    with pytest.raises(ValueError, match=message):
        ReplayedRouting(load_decoder(moe, torch.float32).config.experts, given)
