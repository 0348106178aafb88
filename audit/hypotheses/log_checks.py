"""Faults of a log that show in its ids alone. No log-probability need differ for them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..formats.record import LoggedRollout
from .id_checks import ALONE, BESIDE_TOKENIZER, turns
from .log_fault import LogFault

if TYPE_CHECKING:
    from ...engine.tasks.tokenizer import Tokenizer

# Doubled completions that chance gives a group at most, in expectation, for doubles to be a fault.
_BY_CHANCE = 0.01
DOUBLED = "lines doubled within a group"
_FEWEST = 4  # completions from which the lack of an end token is told


def check_log(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer | None") -> list[LogFault]:
    """What is wrong with the lines of a log.

    Lines without token ids are passed over. tokenizer: None where no model is named; then ends and texts are
    not checked.
    """
    lines = [x for x in lines if x.completion_ids is not None and x.prompt_ids is not None]
    faults = [_doubled(lines), *(find(lines) for find in ALONE)]
    if tokenizer is not None:
        faults += [_end_left_out(lines, tokenizer), _turns_retokenised(lines, tokenizer)]
        faults += [find(lines, tokenizer) for find in BESIDE_TOKENIZER if lines]
    return list({fault.name: fault for fault in [*faults, *turns(lines, tokenizer)] if fault}.values())


def _doubled(lines: Sequence[LoggedRollout]) -> LogFault | None:
    """Completions of one prompt that are equal, where chance makes that all but impossible."""
    groups: dict[tuple, list[LoggedRollout]] = defaultdict(list)
    for line in lines:
        groups[line.step, line.prompt_ids].append(line)
    doubled, expected, prompts = 0, 0.0, 0
    for group in groups.values():
        sampled = [x for x in group if x.logprobs is not None and _drawn_at_random(x)]
        chances = [math.exp(float(np.nansum(x.logprobs))) for x in sampled]
        # For each line, the chance that another line of its group is the same.
        expected += sum(chances) * (len(sampled) - 1) / 2
        repeats = len(sampled) - len({x.completion_ids for x in sampled})
        doubled, prompts = doubled + repeats, prompts + (repeats > 0)
    if not doubled or expected > _BY_CHANCE * doubled:
        return None
    return LogFault(
        name=DOUBLED,
        text=f"{doubled} completions repeat another one of the same prompt, in {prompts} groups; by "
        f"chance {expected:.1g} would. The samples of a group were drawn with one seed, or a line was "
        "written twice.",
        remedy="Give every sample of a group a seed of its own; then advantages differ from 0 again.",
    )


def _drawn_at_random(line: LoggedRollout) -> bool:
    return line.sampling_params is None or line.sampling_params.temperature > 0.0


def _end_left_out(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """No completion ends with an end token, though they end at different lengths."""
    lengths = [len(x.completion_ids) for x in lines]
    short = [x for x in lines if len(x.completion_ids) < max(lengths, default=0) and not x.truncated]
    if len(short) < _FEWEST or any(tokenizer.stop_ids & set(x.completion_ids) for x in lines):
        return None
    if any(x.turn is not None for x in lines):
        return None  # a turn ends where its tool is called
    return LogFault(
        name="end token left out",
        text=f"none of {len(short)} completions that end before the longest one holds an end token "
        f"({', '.join(map(str, sorted(tokenizer.stop_ids)))}): the log, or the trainer, leaves it out.",
        remedy="Keep the end token in the completion and train on it, or the model unlearns to stop. "
        "Where completions end at stop strings, nothing is wrong.",
    )


def _turns_retokenised(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """Turns whose prompt holds the text of the turn before, but other ids."""
    changed = turns = 0
    for before, after in pairwise(lines):
        if before.turn is None or after.turn != before.turn + 1:
            continue
        ids = before.prompt_ids + before.completion_ids
        turns += 1
        if after.prompt_ids[: len(ids)] == ids:
            continue
        text = tokenizer.text(ids)
        changed += bool(text) and tokenizer.text(after.prompt_ids).startswith(text)
    if not changed:
        return None
    return LogFault(
        name="retokenised turns",
        text=f"{changed} of {turns} turns begin with the text of the turn before and with other token "
        "ids: it was decoded and encoded again.",
        remedy="Append token ids to the conversation; never decode and encode what the model drew.",
    )
