"""Rewards and advantages that are no signal are named with their lines; those of a sound rule never are."""

import math
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit.columns import audit_columns
from zerokl.audit.formats.record import LoggedRollout
from zerokl.audit.hypotheses.signal_checks import Signal, SignalLog

from tests.audit.hypotheses.test_values import rows_of, write

GROUP = 4
UNSAID = (
    {},
    {"prompt": None, "sample": None},
    {"step": None},
    {"step": None, "prompt": None, "sample": None},
)
LAST, FOLLOW = "advantages in the last turn alone", "advantages that do not follow the rewards"


def deviation(x: np.ndarray, ddof: int) -> float:
    return float(x.std(ddof=ddof)) if len(x) > ddof else 0.0


# Rules that the report names, by a part of the name: the rewards of a group and of its step.
NAMED = {
    "the group's mean": lambda r, step: r - r.mean(),
    "(n - 1, epsilon 0.0001)": lambda r, step: (r - r.mean()) / (deviation(r, 1) + 1e-4),
    "(n, epsilon 1e-06)": lambda r, step: (r - r.mean()) / (deviation(r, 0) + 1e-6),
    "leave-one-out": lambda r, step: (r - r.mean()) * len(r) / max(1, len(r) - 1),
    "the batch's mean": lambda r, step: r - step.mean(),
    "the batch's mean, over": lambda r, step: (r - step.mean()) / (deviation(step, 1) + 1e-4),
    "over the batch's standard": lambda r, step: (r - r.mean()) / (deviation(step, 1) + 1e-4),
    "one baseline": lambda r, step: r - 0.3,
    "reward": lambda r, step: r,
}
# Sound rules that it does not know.
OTHER = {
    "scaled below 0": lambda r, step: np.where(r > r.mean(), 1.0, 0.3) * (r - r.mean()),
    "clipped": lambda r, step: np.clip((r - r.mean()) / (deviation(r, 1) + 1e-4), -1, 1),
    "by difficulty": lambda r, step: (r - r.mean()) * (1 - r.mean()),
    "over the mean": lambda r, step: (r - r.mean()) / (r.mean() + 1e-6),
    "by length": lambda r, step: (s := r - 0.01 * np.arange(len(r)) ** 2) - s.mean(),
    "some left out": lambda r, step: np.where(np.arange(len(r)) % 4 < 3, r - r.mean(), 0.0),
}
REWARDS = {
    "binary": lambda rng: float(rng.random() < 0.5),
    "any": lambda rng: rng.random(),
    "solved": lambda rng: 1.0,
    "one of three": lambda rng: rng.choice([0.0, 0.5, 1.0]),
}


def lines(
    rule, reward="binary", prompts=8, group=GROUP, turns=1, seed=0, steps=1, **extra
) -> list[LoggedRollout]:
    """Completions of prompts with their rewards, and the advantages that a rule gives them."""
    rng, result = random.Random(f"{seed}"), []
    for step in range(steps):
        rewards = np.array([[REWARDS[reward](rng) for _ in range(group)] for _ in range(prompts)])
        for prompt, group_rewards in enumerate(rewards):
            for sample, value in enumerate(np.asarray(rule(group_rewards, rewards), float).tolist()):
                count = rng.randint(2, 9)
                mask = np.array(([True] * count + [False] * 2) * turns)[:-2]
                advantage = value if turns == 1 else tuple(np.where(mask, value, 0.0).tolist())
                labels = {"step": step, "prompt": prompt, "sample": sample} | extra
                labels = {name: x for name, x in labels.items() if x is not None}
                ids = tuple(rng.randrange(9) for _ in mask)
                reward_of = float(group_rewards[sample])
                parts = dict(reward=reward_of, advantage=advantage, **labels)
                result.append(LoggedRollout((prompt + 1,), ids, mask=mask, **parts))
    return result


def judged(log: list[LoggedRollout]) -> Signal:
    signal = SignalLog()
    for number, line in enumerate(log, 1):
        signal.add(f"log.jsonl, line {number}", line)
    return signal.judged()


def changed(line: LoggedRollout, **parts) -> LoggedRollout:
    return LoggedRollout(**{name: getattr(line, name) for name in LoggedRollout.__dataclass_fields__} | parts)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", NAMED)
def test_the_rule_of_a_run_is_named(name, turns):
    signal = judged(lines(NAMED[name], "any", turns=turns))
    assert name in signal.rule
    assert signal.follow == signal.judged == 8 * GROUP * turns
    assert signal.rule in signal.words()
    assert signal.faults == []


def test_rules_that_agree_but_at_zero_are_told_by_the_zeros():
    """In groups that are half right, r and (r - mean) / std are 1 where r is 1. They differ where it is 0."""
    halves = enumerate(lines(NAMED["reward"]))
    log = [changed(x, reward=float(i % 2), advantage=float(i % 2)) for i, x in halves]
    assert judged(log).rule == "reward"
    whitened = [changed(x, advantage=2.0 * x.reward - 1.0) for x in log]
    assert "(n, epsilon 0)" in judged(whitened).rule


@pytest.mark.parametrize("name", [*NAMED, *OTHER])
def test_sound_logs_raise_no_alarm(name):
    """128 logs of a rule: rewards, groups of one, turns, and logs that name no step or no prompt."""
    rule = (NAMED | OTHER)[name]
    for case in product(REWARDS, (1, 4), (1, 2), (1, 3), UNSAID):
        reward, group, turns, steps, extra = case
        log = lines(rule, reward, 5, group, turns, steps=steps, **extra)
        assert judged(log).faults == [], case


@pytest.mark.parametrize("reward", ["binary", "any"])
@pytest.mark.parametrize("name", list(NAMED)[:4])
def test_advantages_of_other_completions_are_named_with_their_lines(name, reward):
    """The second half of each group carries the first half's, as where micro-batches are mixed up."""
    log = lines(NAMED[name], reward, group=8)
    mixed = [changed(x, advantage=log[i - 4].advantage) if i % 8 >= 4 else x for i, x in enumerate(log)]
    signal = judged(mixed)
    (fault,) = signal.faults
    assert fault.name == FOLLOW
    wrong = [
        i + 1 for i, (a, b) in enumerate(zip(log, mixed, strict=True)) if a.advantage * b.advantage < 0.0
    ]
    assert f"log.jsonl, line {wrong[0]}" in fault.text
    assert signal.rule == judged(log).rule


def test_parts_with_rules_of_their_own_are_sound():
    """A reasoning with leave-one-out, and an answer behind it with the reward itself."""
    one, two = (lines(NAMED[name], "any", turns=2) for name in ("leave-one-out", "reward"))
    log = [
        changed(a, advantage=a.advantage[: len(a.mask) // 2] + b.advantage[len(a.mask) // 2 :])
        for a, b in zip(one, two, strict=True)
    ]
    assert judged(log).follow == judged(log).judged // 2
    assert judged(log).faults == []


def test_one_wrong_line_is_named():
    log = lines(NAMED["the group's mean"], "any")
    log[13] = changed(log[13], advantage=-log[13].advantage)
    (fault,) = judged(log).faults
    assert (fault.name, "(log.jsonl, line 14)" in fault.text) == (FOLLOW, True)


@pytest.mark.parametrize(
    ("scale", "name"), [((0, 0, 1), LAST), ((1, -0.5, 1), FOLLOW), ((0.81, 0.9, 1), None)]
)
def test_turns_that_do_not_have_their_completions_advantage(scale, name):
    """0 in all turns but the last, another sign in one; and a discount, which is sound."""
    log = lines(NAMED["the group's mean"], turns=3)
    for i, x in enumerate(log):
        turn = np.cumsum(np.diff(x.mask.astype(int), prepend=0) == 1) - 1
        values = np.array(x.advantage) * np.array(scale)[turn]
        log[i] = changed(x, advantage=tuple(values.tolist()))
    assert [fault.name for fault in judged(log).faults] == ([name] if name else [])


def test_turns_of_a_line_are_one_completion():
    log = lines(NAMED["the group's mean"], "any")
    turns = [changed(x, turn=t, prompt_ids=(t, i)) for i, x in enumerate(log) for t in range(2)]
    signal = judged(turns)
    assert (signal.completions, signal.groups, signal.follow) == (32, 8, 64)
    silent = [changed(x, advantage=x.advantage * (x.turn == 1)) for x in turns]
    assert [fault.name for fault in judged(silent).faults] == [LAST]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (None, "missing rewards"),
        (math.nan, "rewards that are no numbers"),
        (math.inf, "rewards that are no numbers"),
    ],
)
def test_a_reward_that_is_none_is_named_with_its_line(reward, name):
    log = lines(NAMED["the group's mean"])
    log[9] = changed(log[9], reward=reward)
    (fault,) = judged(log).faults
    assert (fault.name, "log.jsonl, line 10" in fault.text) == (name, True)
    log[9] = changed(log[9], reward=1.0, advantage=math.nan)
    (fault,) = judged(log).faults
    assert (fault.name, "log.jsonl, line 10" in fault.text) == ("advantages that are no numbers", True)


@pytest.mark.parametrize("advantage", [0.0, None])
def test_completions_that_are_all_cut_without_a_signal(advantage):
    log = lines(NAMED["the group's mean"])
    cut = [
        changed(x, completion_ids=(1, 2, i), mask=None, reward=0.0, advantage=advantage)
        for i, x in enumerate(log)
    ]
    assert [fault.name for fault in judged(cut).faults] == ["all completions cut, and no signal"]
    # Sound: completions of many lengths, of one last token, and groups that are solved.
    other = [changed(x, reward=0.0, advantage=advantage) for x in log]
    ended = [changed(x, completion_ids=(1, i, 2)) for i, x in enumerate(cut)]
    solved = [changed(x, reward=1.0) for x in cut]
    for sound in (other, ended, solved):
        assert judged(sound).faults == []
        words = judged(sound).words()
        assert words.startswith("No group has a signal")
        # Where a scorer raises in every call, and its caller takes that for 0, no reward is above it.
        assert ("None of the 32 is above 0: " in words) == (sound is not solved)


def test_a_group_without_a_signal_says_nothing_of_completions_alone():
    """Nor do advantages of one group say anything of groups that have none."""
    log = [
        changed(x, reward=0.5 if i < GROUP else float(i % 2)) for i, x in enumerate(lines(NAMED["reward"]))
    ]
    alone = [changed(x, prompt=i, advantage=None) for i, x in enumerate(log) if i >= GROUP]
    pair = [changed(x, prompt=99, advantage=None) for x in log[:2]]
    assert judged([*alone, *pair]).words().startswith("The log holds no advantages")
    part = [changed(x, advantage=0.0 if i < GROUP else None) for i, x in enumerate(log)]
    assert judged(part).faults == []


def test_advantages_of_zero_beside_rewards_that_differ():
    log = lines(NAMED["the group's mean"], "any")
    emptied = [changed(x, advantage=0.0) for x in log]
    (fault,) = judged(emptied).faults
    assert fault.name == "advantages of 0 alone, beside rewards that differ"
    assert "differ in 8 of 8 groups (log.jsonl, line 1, line 2, line 3, line 4)" in fault.text
    assert judged(emptied).words() == "No completion has a signal: every advantage is 0."
    unscored = [changed(x, reward=None) for x in emptied]
    assert judged(unscored).faults == []
    assert judged(unscored).words().endswith("every advantage is 0. The log holds no rewards.")
    one_left = [*emptied[:-1], log[-1]]
    assert judged(one_left).faults == []


def test_what_a_log_lacks_is_told_once():
    log = [changed(x, reward=None, advantage=None) for x in lines(NAMED["reward"])]
    assert judged(log).words().startswith("The log holds no rewards and no advantages")


def test_the_report_has_it_as_a_fault_of_the_log(tmp_path: Path):
    rows = [
        row | {"step": 0, "prompt": i // 4, "sample": i % 4, "reward": float(i % 3 == 0)}
        for i, row in enumerate(rows_of())
    ]
    for i, row in enumerate(rows):
        row["advantage"] = row["reward"] - sum(x["reward"] for x in rows[i // 4 * 4 : i // 4 * 4 + 4]) / 4
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert report.outcome.passed
    assert report.log.signal.rule == "reward less the group's mean"
    assert report.log.signal.words() in report.notes
    rows[5]["advantage"] *= -1.0
    report = audit_columns(write(tmp_path / "log.jsonl", rows))
    assert (report.outcome.faults, report.outcome.passed) == ((FOLLOW,), False)
    assert "line 6" in report.cause.text
    rows[5]["reward"] = "NaN"
    assert "rewards that are no numbers" in audit_columns(write(tmp_path / "log.jsonl", rows)).outcome.faults
