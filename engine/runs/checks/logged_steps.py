"""The steps of rollouts.jsonl, compared with what the ledger and the metrics say of them.

The ledger has hashes of prompts, tokens, log-probabilities, rewards and advantages. Rewards, lengths and the
mismatch of a step follow from these.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....files.reading import json_number, shown
from ....verify.difference import first_wrong, same_json
from ....verify.ledger import Line, digest
from ....verify.mismatch import mismatch_metrics
from ...config.budget_cuts import Cuts
from ...rollout.episodes import Episodes, is_trained
from ...rollout.types import Rollout
from ...tasks.environment import CONTEXT, TOKENS
from ...train.ledger_recorder import hash_ends, hash_rewards, hash_rollouts
from ...train.losses.advantage import StepAdvantages
from ...train.metrics import rollout_metrics
from ...train.state import TrainState
from ..rollout_lines import cut_fields


@dataclass(frozen=True)
class LoggedStep:
    """The lines of one step, and what they hold."""

    lines: list[dict[str, Any]]  # [P G]; where reasonings are cut and answered, G counts the answers too
    episodes: Episodes  # P prompts x G generations, without their problems
    advantages: StepAdvantages

    @property
    def rollouts(self) -> list[Rollout]:
        """[P G]"""
        return self.episodes.rollouts


def read_step(lines: Sequence[dict[str, Any]], G: int, cuts: Cuts | None = None) -> LoggedStep:
    """The lines of one step. cuts: see Episodes. Raises ValueError for a line that is no rollout."""
    rewards = np.array([_float(line, "reward") for line in lines], np.float64).reshape(-1, G)
    rollouts = [_rollout(line, i, G) for i, line in enumerate(lines)]
    A = _advantages(lines, rollouts, G)
    texts = [[line["text"] for line in lines[p * G : (p + 1) * G]] for p in range(len(rewards))]
    turn_rewards = [_turn_rewards(line) for line in lines] if "turn_rewards" in lines[0] else None
    episodes = Episodes([], rollouts, texts, rewards, False, turn_rewards, cuts=cuts)
    return LoggedStep(list(lines), episodes, A)


def _advantages(lines: Sequence[dict[str, Any]], rollouts: Sequence[Rollout], G: int) -> StepAdvantages:
    if not isinstance(lines[0].get("advantage"), list):
        A = np.array([_float(line, "advantage") for line in lines], np.float64)
        return StepAdvantages.of_samples(A.reshape(-1, G))
    A = []
    for line, rollout in zip(lines, rollouts, strict=True):
        values = json_number(line["advantage"])
        places = (
            zip(values, rollout.mask, strict=True) if len(values) == len(rollout.mask) else [(None, True)]
        )
        if not all(type(x) is (float if d else type(None)) for x, d in places):
            raise ValueError("advantage is no list of numbers, with null for each token that was not drawn")
        A.append(np.array([x for x in values if x is not None], np.float64))
    return StepAdvantages(A)


def _turn_rewards(line: dict[str, Any]) -> list[float]:
    rewards = line.get("turn_rewards")
    if not isinstance(rewards, list) or not all(type(r) is float for r in rewards):
        raise ValueError("turn_rewards is no list of numbers")
    return rewards


def _rollout(line: dict[str, Any], index: int, G: int) -> Rollout:
    if (line.get("prompt"), line.get("sample")) != divmod(index, G):
        raise ValueError(f"prompt {index // G}, sample {index % G} is missing where it belongs")
    # An environment may have ended a trajectory before its first turn, or before its prompt.
    least = 0 if line.get("turn_starts") == [] and "turn_rewards" in line else 1
    prompt_ids, completion_ids = (_ids(line, name, least) for name in ("prompt_ids", "completion_ids"))
    drawn = _ids(line, "mask", least) if "mask" in line else (1,) * len(completion_ids)
    values = json_number(line.get("logprobs"))
    if not isinstance(values, list) or len({len(drawn), len(completion_ids), len(values)}) > 1:
        raise ValueError("has not one logprob, and one entry of the mask, for each token")
    if not all(type(x) is (float if d else type(None)) for x, d in zip(values, drawn, strict=True)):
        raise ValueError("logprobs is no list of numbers, with null for each token that was not drawn")
    exact = np.array([x for x in values if x is not None], np.float64)
    with np.errstate(over="ignore"):
        logprobs = exact.astype(np.float32)
    if logprobs.astype(np.float64).tobytes() != exact.tobytes():
        raise ValueError("logprobs are not fp32 numbers")
    if type(line.get("text")) is not str or type(line.get("weight_version")) is not int:
        raise ValueError("has no text, or no weight_version")
    p = len(prompt_ids)
    rollout = Rollout(
        *divmod(index, G),
        ids=(*prompt_ids, *completion_ids),
        drawn=np.array([0] * p + list(drawn), bool),
        logprobs=logprobs,
        turn_starts=_ids(line, "turn_starts", least) if "mask" in line else (p,),
        finish=str(line.get("finish")),
        weight_version=line["weight_version"],
    )
    return rollout.check() if least else rollout


def _float(line: dict[str, Any], name: str) -> float:
    value = json_number(line.get(name))
    if type(value) is not float:
        raise ValueError(f"{name} ({shown(value)}) is not what a run writes")
    return value


def _ids(line: dict[str, Any], name: str, least: int = 1) -> tuple[int, ...]:
    ids = line.get(name)
    if (
        not isinstance(ids, list)
        or len(ids) < least
        or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    ):
        raise ValueError(f"{name} is no list of token ids")
    return tuple(ids)


def rollouts_fault(step: LoggedStep, line: Line) -> str | None:
    """The first quantity whose hash is not the one in the step's line of the ledger; None if all are."""
    rewards = hash_rewards(step.episodes.rewards, step.advantages)
    wrong = first_wrong(line.quantities, hash_rollouts(step.rollouts) | hash_ends(step.episodes) | rewards)
    return wrong and (
        f"step {line.step}: the {wrong.quantity.replace('_', ' ')} are not those whose hash is in the ledger"
    )


def metrics_fault(
    step: LoggedStep, line: Line, metrics: Mapping[str, Any], older_weights: bool
) -> str | None:
    """The first metric that is not the one that follows from the step's rollouts and ledger; None if none is.

    older_weights: the mismatch is not that of the log-probabilities in the ledger.
    """
    trained = [r for r in step.rollouts if is_trained(r)]
    lengths = [len(r.logprobs) for r in trained]
    derived = rollout_metrics(step.episodes) | {"tokens": sum(lengths)}
    sampled = np.concatenate([r.logprobs for r in trained])
    if not older_weights and digest(torch.from_numpy(sampled)) == line.quantities.get("trainer_logprobs"):
        derived |= mismatch_metrics(sampled, sampled, lengths)
    wrong = first_wrong(metrics, derived, same_json)
    return wrong and wrong.beside("must be")


def texts_fault(step: LoggedStep, state: TrainState) -> str | None:
    """The first text, problem or end of a completion that does not follow from the tokens; None if all do."""
    problems, cuts = {problem.id: problem for problem in state.problems}, step.episodes.cuts
    answer_stops = state.tokenizer.stop_ids
    reasoning_stops = answer_stops | state.player.reasoning_ends
    for line, rollout in zip(step.lines, step.rollouts, strict=True):
        problem = problems.get(line.get("problem"))
        cut = cut_fields(cuts, rollout.sample) if cuts else {}
        derived = {
            "prompt_text": problem and problem.prompt,
            "text": state.tokenizer.decode(rollout.completion_ids),
            "finish": _finish(rollout, "turn_rewards" in line, answer_stops if cut else reasoning_stops),
            **cut,
        }
        if wrong := first_wrong(line, derived):
            return f"prompt {rollout.prompt}, sample {rollout.sample}: {wrong.beside('its tokens give')}"
    return None


def _finish(rollout: Rollout, in_environment: bool, stop_ids: Collection[int]) -> str:
    """How a rollout ended, as far as its last token says. In an environment only a cut turn does."""
    ended = not rollout.turns or rollout.ids[-1] in stop_ids
    if in_environment:
        return rollout.finish if ended or rollout.finish in (TOKENS, CONTEXT) else TOKENS
    return "stop" if ended else "length"
