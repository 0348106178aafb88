"""Whether rewards and advantages of a log are a signal: numbers, by one rule, that differ within a group.

A group holds the completions of one prompt of a step. A rule says what the advantages of its completions
are. The rule that most advantages follow is taken for the run's. An advantage that breaks it is a fault only
where another one of its group follows the rule, and has the same reward, or where the sign is the opposite
one. So advantages of rewards that the log does not hold (shaped, by length, or with a critic) are none.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..faults.fault import LogFault
from ..faults.signal import (
    advantages_without_numbers,
    all_cut,
    last_turn_alone,
    missing_rewards,
    no_advantages,
    off_their_rule,
    rewards_without_numbers,
)
from ..formats.record import LoggedRollout
from .advantage_rules import Parts, baseline, close, distance, known_rules, parts_of
from .completions import Completion, by_group, completion_of, grouped, named

# Advantages that a rule is told by, and the share of them that follows it at least.
_FEWEST, _FOLLOW = 4, 0.5
# Witnesses that make a fault; one alone does where almost all other advantages follow the rule.
_WITNESSES, _ALMOST_ALL = 2, 0.9
# Completions that must have one length to be called cut, where the log does not say how they ended.
_CUT = 8


@dataclass(frozen=True)
class Signal:
    """What rewards and advantages of a log say. Groups of one completion are not counted."""

    completions: int
    rewards: int
    advantages: int
    groups: int
    groups_without: int  # whose rewards are all equal
    silent: bool = False  # whether the log has advantages, and each one is 0
    unsolved: bool = False  # whether it has rewards, and none is above 0
    alone: int = 0  # completions of no group of several
    rule: str | None = None  # that the advantages follow
    judged: int = 0  # advantages other than 0, a turn each
    follow: int = 0  # of these
    faults: list[LogFault] = field(default_factory=list)

    def words(self) -> str:
        """What was looked at, in words."""
        if self.groups and self.groups_without == self.groups and not (self.judged or self.alone):
            return f"No group has a signal: all rewards of each are equal.{self._unsolved()}"
        if self.silent:
            rewards = "" if self.rewards else " The log holds no rewards."
            return f"No completion has a signal: every advantage is 0.{rewards}"
        lacking = [n for n, x in (("rewards", self.rewards), ("advantages", self.advantages)) if not x]
        if lacking:
            listed = " and no ".join(lacking)
            return f"The log holds no {listed}: whether its completions carry a signal is not looked at."
        if self.rule:
            return f"Advantages: {self.rule}, in {self.follow:,} of {self.judged:,} that are not 0."
        if self.judged < _FEWEST:
            return f"Too few advantages are not 0 ({self.judged:,}) to tell how they follow the rewards."
        return (
            f"The {self.judged:,} advantages that are not 0 follow no rule that is tried, as those of a "
            "critic or of shaped rewards."
        )

    def _unsolved(self) -> str:
        if not self.unsolved:
            return ""
        return (
            f" None of the {self.rewards:,} is above 0: unless rewards are penalties, the prompts are too "
            "hard, or what scores them fails without a word."
        )


class SignalLog:
    """Takes the lines of a log, in their order."""

    def __init__(self) -> None:
        self._completions: list[Completion] = []

    def add(self, place: str, line: LoggedRollout) -> None:
        """Take a completion, or a turn of one."""
        before = self._completions[-1] if self._completions else None
        now = completion_of(place, line, before)
        if before and now.turn and before.turn == now.turn - 1 and before.sample == now.sample:
            parts = before.advantages + now.advantages
            tokens, numbers = before.tokens + now.tokens, before.numbers and now.numbers
            self._completions[-1] = now._replace(
                group=before.group, advantages=parts, numbers=numbers, tokens=tokens
            )
            return
        self._completions.append(now)

    def judged(self) -> Signal:
        """What the whole log says."""
        completions = grouped(self._completions)
        groups = [g for g in by_group(completions) if len(g) > 1]
        without = sum(len({x.reward for x in g}) == 1 and g[0].reward is not None for g in groups)
        rewards = sum(x.reward is not None for x in completions)
        advantages = [x for x in completions if any(a is not None for a in x.advantages)]
        silent = bool(advantages) and not any(any(x.advantages) for x in advantages)
        unsolved = rewards > 0 and not any(x.reward is not None and not x.reward <= 0.0 for x in completions)
        alone = len(completions) - sum(map(len, groups))
        counts = len(completions), rewards, len(advantages), len(groups), without
        signal = Signal(*counts, silent, unsolved, alone)
        faults = [*_no_numbers(completions, rewards), _last_turn_alone(advantages)]
        faults.append(_no_advantages(advantages) if silent else None)
        if rewards and advantages:
            signal, fault = _followed(signal, completions)
            faults.append(fault)
        faults.append(_cut_without_signal(signal, completions))
        return replace(signal, faults=[fault for fault in faults if fault])


# --- numbers ---


def _no_numbers(completions: Sequence[Completion], rewards: int) -> Iterator[LogFault]:
    """Rewards and advantages that are no numbers, and rewards that some lines lack."""
    lacking = [x for x in completions if x.reward is None] if rewards else []
    no_number = [x for x in completions if x.reward is not None and not np.isfinite(x.reward)]
    if lacking or no_number:
        counts = ((len(lacking), "missing"), (len(no_number), "NaN or infinite"))
        listed = " and ".join(f"{what} in {n:,}" for n, what in counts if n)
        fault = rewards_without_numbers.FAULT if no_number else missing_rewards.FAULT
        yield fault.named(
            f"the reward is {listed} of {len(completions):,} completions "
            f"({named([*no_number, *lacking])}). One such reward makes the advantages of its group wrong.",
        )
    if wrong := [x for x in completions if not x.numbers]:
        yield advantages_without_numbers.FAULT.named(
            f"{len(wrong):,} of {len(completions):,} completions have an advantage that is NaN, "
            f"infinite or null beside a drawn token ({named(wrong)}).",
        )


# --- rules ---


def _last_turn_alone(completions: Sequence[Completion]) -> LogFault | None:
    """Conversations whose advantage stands beside their last turn, and is 0 in all others."""
    several = [x for x in completions if len(x.advantages) > 1 and any(x.advantages)]
    if len(several) < _WITNESSES or any(any(x.advantages[:-1]) for x in several):
        return None
    return last_turn_alone.FAULT.named(
        f"in all {len(several):,} completions of several turns that have an advantage, it is 0 in all "
        f"turns but the last ({named(several)}): the others are not trained.",
    )


def _no_advantages(completions: Sequence[Completion]) -> LogFault | None:
    """Groups whose rewards differ. completions: those with an advantage, each of which is 0."""
    groups = [g for g in by_group(completions) if len(g) > 1]
    differ = [
        g for g in groups if len({x.reward for x in g if x.reward is not None and np.isfinite(x.reward)}) > 1
    ]
    if len(differ) < _WITNESSES:
        return None
    return no_advantages.FAULT.named(
        f"every advantage is 0, though the rewards differ in {len(differ):,} of {len(groups):,} groups "
        f"({named(differ[0])}): nothing is learned from them.",
    )


def _followed(signal: Signal, completions: Sequence[Completion]) -> tuple[Signal, LogFault | None]:
    """The rule that most advantages follow, and the fault where others break it."""
    parts = parts_of(completions)
    signal = replace(signal, judged=len(parts.owner))
    if len(parts.owner) < _FEWEST:
        return signal, None
    with np.errstate(over="ignore", invalid="ignore"):  # a reward of 1e308
        rules = [(name, e, close(parts, e)) for name, e in known_rules(parts)]
    # A baseline is fitted, so a part of the advantages follows it by chance.
    rules += [rule for rule in [baseline(parts)] if rule[2].all()]
    zero = np.array([x.numbers and not any(x.advantages) for x in parts.completions])

    def nearness(rule: tuple[str, np.ndarray, np.ndarray]) -> tuple[int, int, float]:
        _, expected, follows = rule
        return (
            int(follows.sum()),
            int(np.isclose(expected[zero], 0.0).sum()),
            -distance(parts, expected, follows),
        )

    # Of those that most follow, the one with most of the zeros, then the nearest; of equal ones the first:
    # the usual rules stand before others.
    name, expected, follows = max(rules, key=nearness)
    share = float(follows.mean())
    if share < _FOLLOW:
        return signal, None
    signal = replace(signal, rule=name, follow=int(follows.sum()))
    breaking = parts.owner[_witnesses(parts, expected, follows)]
    broken = [parts.completions[i] for i in sorted(set(breaking.tolist()))]
    if len(broken) < (1 if share >= _ALMOST_ALL else _WITNESSES):
        return signal, None
    return signal, off_their_rule.FAULT.named(
        f"{signal.follow:,} of the {signal.judged:,} that are not 0 are the {name}. Those of "
        f"{len(broken):,} completions are not ({named(broken)}), though others of their groups are that "
        "have the same reward, or though they have the opposite sign: they were computed beside other "
        "completions, or belong to them.",
    )


def _witnesses(parts: Parts, expected: np.ndarray, follows: np.ndarray) -> np.ndarray:
    """Which advantages break the rule as no sound one does, [N] bool: see the top of this file.

    A turn that follows no rule in any line may have one of its own, unless its signs are all opposite.
    """
    group, reward = parts.group[parts.owner].tolist(), np.round(parts.reward[parts.owner], 6).tolist()
    like = list(zip(group, parts.turn.tolist(), reward, strict=True))
    following = {x for x, follow in zip(like, follows.tolist(), strict=True) if follow}
    turns = {x[:2] for x in following}
    opposite = parts.advantage * expected[parts.owner] < 0.0
    all_opposite = {turn for turn in set(parts.turn.tolist()) if opposite[parts.turn == turn].all()}
    pairs = zip(like, opposite.tolist(), strict=True)
    return ~follows & np.array(
        [x in following or (other and (x[:2] in turns or x[1] in all_opposite)) for x, other in pairs]
    )


# --- cut ---


def _are_all_cut(completions: Sequence[Completion]) -> bool:
    """Whether a limit ended all completions: the log says so, or they have one length and no end in common.

    Completions that end by themselves end at many lengths, or with one token.
    """
    reasons = {x.truncated for x in completions}
    if reasons != {None}:
        return reasons == {True}
    lengths, last = {x.tokens for x in completions}, Counter(x.last for x in completions)
    return len(completions) >= _CUT and len(lengths) == 1 and 2 * max(last.values()) <= len(completions)


def _cut_without_signal(signal: Signal, completions: Sequence[Completion]) -> LogFault | None:
    """Completions that were all cut, where no group has a signal.

    Groups that are all solved have no signal either, and nothing is wrong with them.
    """
    if not _are_all_cut(completions):
        return None
    if any(x.reward is not None and x.reward > 0.0 for x in completions):
        return None
    if signal.advantages:
        what, silent = "every advantage is 0", signal.silent
    else:
        what = "all rewards of each group are equal"
        silent = bool(signal.groups) and signal.groups_without == signal.groups
    if not silent:
        return None
    return all_cut.FAULT.named(
        f"a limit cut all {len(completions):,} completions before they ended, after "
        f"{max(x.tokens for x in completions):,} tokens at most; {what}. Nothing can be learned from them.",
    )
