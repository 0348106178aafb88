"""Trajectories of several turns: the bits of the whole in one pass, and a mask of what was drawn."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.audit.frameworks.zerokl import parse
from zerokl.cli import main
from zerokl.engine.rollout import episodes
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import (
    Completion,
    DrawParams,
    GenerationParams,
    Request,
    RngKey,
    Rollout,
    Sampler,
    complete,
)
from zerokl.engine.runs.checks.logged_steps import read_step, rollouts_fault
from zerokl.engine.runs.rollout_lines import parse_rollout
from zerokl.engine.runs.run import train
from zerokl.engine.train.ledger_recorder import hash_rollouts
from zerokl.engine.train.monitor import MismatchError, Monitor
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder
from zerokl.model.prompts import Prompts
from zerokl.model.scoring import logprobs, pack
from zerokl.verify.ledger import read_ledger

from tests.helpers import property_settings, sums_of, zero_buffers
from tests.trajectories import in_three_turns

STOP = frozenset(range(6))
KEY = RngKey(3, 5)
PARAMS = DrawParams(SamplingParams(0.9, 0, 0.95), STOP)
# The ids that stand before each turn but the first; none where a turn follows another at once.
BETWEEN = st.lists(st.lists(st.integers(6, 63), max_size=40), min_size=1, max_size=3)


def drawn_in_turns(
    sampler: Sampler, rollouts: list[Rollout], between: list[list[int]], n: int
) -> list[Rollout]:
    """The rollouts, continued by a turn of up to n tokens after each member of `between`."""
    for ids in between:
        requests = [
            Request(
                (*r.ids, *ids), replace(KEY, prompt=r.prompt, sample=r.sample), PARAMS, n, len(r.logprobs)
            )
            for r in rollouts
        ]
        completions = sampler.generate(requests)
        rollouts = [r.with_turn(ids, c).check() for r, c in zip(rollouts, completions, strict=True)]
    return rollouts


def of_many_turns(decoder: Decoder, between: list[list[int]], concurrency: int = 64) -> list[Rollout]:
    sampler, prompts = NativeSampler(decoder, concurrency), [[7, 8, 9], [10] * 33]
    params = GenerationParams(PARAMS.sampling_params, 2, 9, STOP)
    return drawn_in_turns(sampler, complete(sampler, prompts, params, KEY), between, 9)


@torch.no_grad()
def scored(decoder: Decoder, rollouts: list[Rollout], masks: list[np.ndarray] | None = None) -> np.ndarray:
    """The trainer's logprobs [C] of all drawn tokens, the prompts read once for their samples."""
    prompts = Prompts(decoder, [r.prompt_ids for r in rollouts])
    masks = [r.mask for r in rollouts] if masks is None else masks
    packed = pack([r.pair for r in rollouts], prompts.prompt_of_sample, masks=masks)
    return logprobs(decoder, packed, PARAMS.sampling_params, prompts=prompts)[0].numpy()


def bits(x: np.ndarray) -> list[int]:
    return x.view(np.int32).tolist()


def sampled(rollouts: list[Rollout]) -> np.ndarray:
    return np.concatenate([r.logprobs for r in rollouts])


@property_settings(20)
@given(between=BETWEEN, concurrency=st.integers(1, 5))
def test_every_drawn_token_has_the_logprob_of_the_whole_trajectory(decoder, between, concurrency):
    rollouts = of_many_turns(decoder, between, concurrency)
    assert all(r.turns == 1 + len(between) for r in rollouts)
    assert bits(scored(decoder, rollouts)) == bits(sampled(rollouts))


def test_control_a_mask_that_is_one_token_off_is_unequal(decoder):
    rollouts = of_many_turns(decoder, [[11, 12, 13]])
    shifted = [np.roll(r.mask, 1) for r in rollouts]
    a, b = scored(decoder, rollouts, shifted), sampled(rollouts)
    assert len(a) == len(b)
    assert bits(a) != bits(b)


@property_settings(20)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_completion_in_parts_has_the_tokens_of_one_request(decoder, cuts):
    """Random numbers count over the trajectory. So it does not matter where it was interrupted."""
    sampler, params, key = NativeSampler(decoder), DrawParams(SamplingParams(), frozenset()), RngKey(1, 2)
    request = Request((7, 8, 9), key, params, sum(cuts))
    (whole,) = sampler.generate([request])
    ids, logprobs = (), []
    for n in cuts:
        (part,) = sampler.generate([Request((7, 8, 9, *ids), key, params, n, drawn=len(ids))])
        ids, logprobs = ids + part.ids, [*logprobs, part.logprobs]
    assert ids == whole.ids
    assert bits(np.concatenate(logprobs)) == bits(whole.logprobs)


def test_control_numbers_that_begin_again_draw_other_tokens(decoder):
    sampler, params, key = NativeSampler(decoder), DrawParams(SamplingParams(), frozenset()), RngKey(1, 2)
    (whole,) = sampler.generate([Request((7, 8, 9), key, params, 12)])
    prefix = (7, 8, 9, *whole.ids[:6])
    (again,) = sampler.generate([Request(prefix, key, params, 6)])
    (counted,) = sampler.generate([Request(prefix, key, params, 6, drawn=6)])
    assert (again.ids == whole.ids[6:], counted.ids == whole.ids[6:]) == (False, True)


REQUESTS = st.lists(
    st.builds(
        Request,
        ids=st.sampled_from([(7,), (7, 8, 9), (10,) * 33, (12,) * 64]),
        rng_key=st.builds(
            RngKey, st.integers(0, 1), st.integers(0, 3), prompt=st.integers(0, 3), sample=st.integers(0, 2)
        ),
        draw_params=st.sampled_from([PARAMS, DrawParams(SamplingParams(), frozenset({9}), 0.1)]),
        max_tokens=st.integers(1, 12),
        drawn=st.integers(0, 70),
    ),
    min_size=1,
    max_size=6,
)


@property_settings(25)
@given(requests=REQUESTS, concurrency=st.integers(1, 7), data=st.data())
def test_a_request_has_the_same_bits_in_any_company(decoder, requests, concurrency, data):
    """Requests of other keys, limits, steps and distributions, in any order, decide nothing."""
    order = data.draw(st.permutations(range(len(requests))))
    together = NativeSampler(decoder, concurrency).generate([requests[i] for i in order])
    for i, completion in zip(order, together, strict=True):
        (alone,) = NativeSampler(decoder).generate([requests[i]])
        assert alone.ids == completion.ids
        assert bits(alone.logprobs) == bits(completion.logprobs)
        assert len(alone.ids) <= requests[i].max_tokens


def gradient(
    decoder: Decoder, rollouts: list[Rollout], masks: list | None, weights: torch.Tensor
) -> torch.Tensor:
    """Of the weighted sum of the logprobs, all weights in one vector."""
    buffers = zero_buffers(decoder.w.values())
    packed = pack([r.pair for r in rollouts], masks=masks)
    (logprobs(decoder, packed, SamplingParams(), buffers=buffers)[0] * weights).sum().backward()
    return torch.cat([sums.flatten() for sums in sums_of(buffers)])


def test_the_gradient_is_that_of_the_drawn_tokens(model):
    """In fp64: with a mask, and with every token scored but a weight of 0 for those that were not drawn."""
    rollouts = of_many_turns(load_decoder(model, torch.float32), [[11, 12, 13, 14]])
    exact, masks = load_decoder(model, torch.float64), [r.mask for r in rollouts]
    drawn = torch.from_numpy(np.concatenate(masks)).double()
    masked = gradient(exact, rollouts, masks, torch.ones(int(drawn.sum())))
    weighted = gradient(exact, rollouts, None, drawn)
    assert (masked - weighted).norm() <= 1e-12 * weighted.norm()
    unmasked = gradient(exact, rollouts, None, torch.ones(len(drawn)))
    assert (masked - unmasked).norm() > 1e-3 * unmasked.norm(), "control"


def changed(rollout: Rollout, **fields) -> list[Rollout]:
    return [replace(rollout, **fields)]


def test_the_ledger_binds_what_nobody_drew(decoder):
    rollout = of_many_turns(decoder, [[11, 12, 13]])[0]
    before = hash_rollouts([rollout])
    start, ids = rollout.turn_starts[1], list(rollout.ids)
    ids[start - 1] += 1
    assert _differing(before, hash_rollouts(changed(rollout, ids=tuple(ids)))) == ["between_turns"]
    later = (*rollout.turn_starts[:1], start + 1)
    assert _differing(before, hash_rollouts(changed(rollout, turn_starts=later))) == ["between_turns"]
    ids[start] += 1
    differing = _differing(before, hash_rollouts(changed(rollout, ids=tuple(ids))))
    assert differing == ["tokens", "between_turns"]
    assert "between_turns" not in hash_rollouts(of_many_turns(decoder, []))


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name in a if a[name] != b[name]]


def test_a_flipped_bit_after_an_observation_is_named_by_its_place_among_the_drawn(decoder):
    rollouts = of_many_turns(decoder, [[11, 12, 13]])
    trainer = torch.from_numpy(sampled(rollouts).copy())
    place = int(rollouts[1].drawn[: rollouts[1].turn_starts[1]].sum())
    rollouts[1].logprobs.view(np.int32)[place] ^= 1
    with pytest.raises(
        MismatchError, match=rf"prompt 0, sample 1, position {place} \(token (\d+)\)"
    ) as error:
        Monitor(0, True, 0, 0).compare(trainer, rollouts)
    assert error.value.report["token"] == rollouts[1].ids[rollouts[1].turn_starts[1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_starts": (3,)}, "must ascend"),
        ({"turn_starts": (3, 3, 9)}, "must ascend"),
        ({"turn_starts": (3, 8)}, "must ascend"),
        ({"logprobs": np.zeros(3, np.float32)}, "3 logprobs"),
        ({"drawn": np.arange(11) >= 3}, "8 drawn tokens"),
        ({"ids": (1,) * 12}, "12 ids, a mask of 11"),
        ({"drawn": np.arange(11) < 5, "logprobs": np.zeros(5, np.float32)}, "end with a drawn token"),
    ],
)
def test_a_rollout_whose_parts_contradict_each_other_is_refused(fields, message):
    one = Rollout.of_one_turn(0, 0, (1, 2, 3), (4, 5), np.zeros(2, np.float32), "length", 0)
    two = one.with_turn([6, 7, 8, 9], Completion((10, 11), np.zeros(2, np.float32), "stop", 0)).check()
    assert two.drawn_ids == (4, 5, 10, 11)
    assert two.completion_ids == (4, 5, 6, 7, 8, 9, 10, 11)
    with pytest.raises(ValueError, match=message):
        replace(two, **fields).check()


@pytest.fixture
def three_turns(monkeypatch):
    monkeypatch.setattr(episodes, "complete", in_three_turns)


def test_a_run_of_trajectories_is_exact_and_reads_itself_again(three_turns, config, tmp_path, capsys):
    """Trainer, monitor, ledger, log, report, verify and replay, over trajectories of three turns."""
    path = tmp_path / "run"
    summary = train(config(steps=3, checkpoint__every=2), path)
    assert (summary.mismatch_max_abs, summary.tokens_unequal) == (0.0, 0)
    with (path / "rollouts.jsonl").open("rb") as file:
        rows = [parse_rollout(line) for line in file]
    first = [row for row in rows if row["step"] == 0]
    for row, rollout in zip(first, read_step(first, 3).rollouts, strict=True):
        assert rollout.turns == 3
        assert list(rollout.ids[rollout.turn_starts[1] - 3 : rollout.turn_starts[1]]) == [11, 12, 13]
        (logged,) = parse(json.loads(json.dumps(row)) | {"temperature": 1.0}, path)
        assert logged.mask.tolist() == rollout.mask.tolist()
        assert bits(logged.logprobs[logged.mask]) == bits(rollout.logprobs)
    assert main(["verify", "run", str(path)]) == 0
    assert main(["report", str(path)]) == 0
    capsys.readouterr()
    again = train(config(steps=3, micro_batch=2, checkpoint__every=2), tmp_path / "again")
    assert again.fingerprint == summary.fingerprint


def test_an_altered_observation_is_found(three_turns, config, tmp_path):
    path = tmp_path / "run"
    train(config(steps=2), path)
    file = path / "rollouts.jsonl"
    lines = file.read_text().splitlines()
    row = json.loads(lines[0])
    row["completion_ids"][row["mask"].index(0)] += 1
    file.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    assert main(["verify", "run", str(path)]) == 1
    with file.open("rb") as lines:
        step = read_step([row for line in lines if (row := parse_rollout(line))["step"] == 0], 3)
    fault = rollouts_fault(step, read_ledger(path / "ledger.jsonl").lines[0])
    assert fault == "step 0: the between turns are not those whose hash is in the ledger"


@pytest.mark.full
def test_shards_and_micro_batches_of_trajectories_have_one_gradient(three_turns, config, tmp_path):
    weights = {
        train(config(steps=2, **settings), tmp_path / str(i)).weights
        for i, settings in enumerate(
            [{}, {"micro_batch": 1}, {"workers": 2}, {"shards_in_flight": 2}, {"native__max_concurrency": 1}]
        )
    }
    assert len(weights) == 1
