"""Several virtual shards in one pass: gradient and scores have the bits of one shard at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.train.losses.advantage import of_tokens
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.scored import Scored
from zerokl.engine.train.shard import Shard, ShardWork
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model import prompts
from zerokl.model.decoder import Decoder

from tests.helpers import property_settings, randint, total_unequal

SHARDS = 4
# The lengths of each sample's prompt and completion. Equal prompts are one group, which a shard may cut.
SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12)


def step_of(samples: list[tuple[int, int]]) -> Shard:
    rollouts = [
        Rollout.of_one_turn(
            i, 0, tuple([7] * p), tuple(randint(i, 60, c).tolist()), np.full(c, -2.0, np.float32), "stop", 0
        )
        for i, (p, c) in enumerate(sorted(samples))
    ]
    A = of_tokens([(i % 3) - 1.0 for i in range(len(rollouts))], [c for _, c in sorted(samples)])
    return Shard(rollouts, A, np.full(len(rollouts), 0.1))


def summed(
    decoder: Decoder, step: Shard, in_flight: int, micro_batch: int, watch: bool = False
) -> tuple[list[list[Scored] | None], torch.Tensor]:
    sums = spoiled(ShardSum(decoder, SHARDS, in_flight))
    work = ShardWork(SamplingParams(), LossConfig(), micro_batch, watch=watch)
    scored = sums.add(work, step.cut(SHARDS))
    return scored, sums.tree.take().clone()


def spoiled(sums: ShardSum) -> ShardSum:
    """The gradient buffers of all products hold NaN, as if a loss had overflowed before."""
    for weight in sums.decoder.matrices():
        sums.buffers[weight].sums.fill_(float("nan"))
    return sums


def flat(scored: list[list[Scored] | None]) -> tuple[torch.Tensor, list[float], list[float]]:
    parts = [part for shard in scored if shard for part in shard]
    losses, entropies = (
        [x for part in parts for x in getattr(part, name)] for name in ("losses", "entropies")
    )
    return torch.cat([part.logp for part in parts]), losses, entropies


@property_settings(12)
@given(
    samples=SAMPLES,
    in_flight=st.sampled_from([2, 3, 4]),
    micro_batch=st.integers(1, 12),
    pass_tokens=st.sampled_from([30, 512]),
)
def test_shards_in_flight_change_no_bit(decoder, samples, in_flight, micro_batch, pass_tokens):
    step = step_of(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "PASS_TOKENS", pass_tokens)  # several passes a shard
        apart, expected = summed(decoder, step, 1, 2)
        together, gradient = summed(decoder, step, in_flight, micro_batch)
    assert total_unequal([gradient], [expected]) == 0
    assert total_unequal([flat(together)[0]], [flat(apart)[0]]) == 0
    assert flat(together)[1:] == flat(apart)[1:]
    assert [shard is None for shard in together] == [shard is None for shard in apart]


def test_control_another_assignment_to_shards_changes_bits(decoder):
    step = step_of([(3, 5), (4, 9), (20, 8), (31, 7), (31, 2)])
    _, expected = summed(decoder, step, SHARDS, 8)
    moved = replace(step, rollouts=step.rollouts[::-1])
    assert total_unequal([summed(decoder, moved, SHARDS, 8)[1]], [expected]) > 0


def test_control_a_buffer_that_is_not_marked_as_empty_is_read(decoder, monkeypatch):
    step = step_of([(3, 5), (4, 9)])
    assert summed(decoder, step, SHARDS, 8)[1].isfinite().all()
    monkeypatch.setattr(ShardSum, "_empty", lambda sums: [x.sums.zero_() for x in sums._small])
    assert summed(decoder, step, SHARDS, 8)[1].isnan().any()


def test_the_counts_of_lost_gradients_are_the_same(decoder):
    step = step_of([(3, 5), (4, 9), (20, 8), (31, 7), (31, 2), (31, 4)])

    def counts(in_flight: int) -> dict[str, int]:
        parts = [part for shard in summed(decoder, step, in_flight, 8, watch=True)[0] for part in shard or []]
        return {name: sum(p.underflow.get(name, 0) for p in parts) for name in ("norm", "embed")}

    assert counts(1) == counts(SHARDS)
