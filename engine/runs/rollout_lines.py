"""The lines of rollouts.jsonl: how they are written, and how everything in zerokl reads them again."""

from typing import Any

import numpy as np

from ...files.reading import json_number, json_ready, parse_json
from ..config.budget_cuts import Cuts
from ..rollout.types import Rollout
from ..train.state import StepRecord

# The fields that hold numbers which may be infinite.
_NUMBERS = ("reward", "advantage", "logprobs", "trainer_logprobs")


def parse_rollout(line: bytes) -> dict[str, Any]:
    """A line as it was before it was written. Raises ValueError for a line that is no JSON object."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    return row | {name: json_number(row[name]) for name in _NUMBERS if name in row}


def rollout_line(record: StepRecord, p: int, g: int, G: int) -> dict[str, Any]:
    """The line of rollouts.jsonl for generation g of prompt p; each prompt has G generations.

    Of several turns, completion_ids holds what stands between them too, and `mask` says which were drawn. An
    environment adds the reward of each turn, and why it ended a trajectory with an error. An answer to a
    reasoning that was cut adds the sample of this reasoning, and its budget in tokens. A logprob of the
    trainer is -infinity where its top-k or top-p cuts a token that the sampler drew.
    """
    episodes, i = record.episodes, p * G + g
    r = episodes.rollouts[i]
    line = {
        "step": record.metrics["step"],
        "prompt": p,
        "sample": g,
        "problem": episodes.problems[p].id,
        "prompt_text": episodes.problems[p].prompt,
        "text": episodes.texts[p][g],
        "reward": float(episodes.rewards[p, g]),
        "advantage": _advantage(record, p, g, G),
        "finish": r.finish,
        "weight_version": r.weight_version,
        "prompt_ids": list(r.prompt_ids),
        "completion_ids": list(r.completion_ids),
        "logprobs": _by_place(r, r.logprobs),
    }
    if r.turns != 1:
        line |= {"mask": r.mask.astype(int).tolist(), "turn_starts": list(r.turn_starts)}
    if episodes.cuts is not None:
        line |= cut_fields(episodes.cuts, g)
    if episodes.turn_rewards is not None:
        line["turn_rewards"] = episodes.turn_rewards[i]
        line |= {"error": episodes.errors[i]} if episodes.errors[i] else {}
    if record.trainer_logprobs is not None and (logprobs := record.trainer_logprobs[i]) is not None:
        line["trainer_logprobs"] = _by_place(r, logprobs)
    return json_ready(line)


def cut_fields(cuts: Cuts, sample: int) -> dict[str, int]:
    """What the line of an answer says of its place; nothing for a reasoning."""
    place = cuts.place(sample)
    return dict(zip(("reasoning", "budget"), place, strict=True)) if place else {}


def _advantage(record: StepRecord, p: int, g: int, G: int) -> float | list[float | None]:
    """That of the completion; or one for each of completion_ids, where the loss gives each token its own."""
    A, i = record.advantages, p * G + g
    return float(A.rows[i][0]) if A.shape else _by_place(record.episodes.rollouts[i], A.rows[i])


def _by_place(rollout: Rollout, by_token: np.ndarray) -> list[float | None]:
    """by_token [C] as a list for completion_ids; None for a token that was not drawn."""
    values = iter(by_token.tolist())
    return [next(values) if drawn else None for drawn in rollout.mask]
