"""Completions of one prompt that are equal, where chance makes that all but impossible."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...formats.record import LoggedRollout
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


# Doubled completions that chance gives a group at most, in expectation, for doubles to be a fault.
_BY_CHANCE = 0.001


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer | None) -> str | None:
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
    return (
        f"{doubled} completions repeat another one of the same prompt, in {prompts} groups; by "
        f"chance {expected:.1g} would. The samples of a group were drawn with one seed, or a line was "
        "written twice."
    )


def _drawn_at_random(line: LoggedRollout) -> bool:
    return line.sampling_params is None or line.sampling_params.temperature > 0.0


def duplicate_completions(w: World) -> Log:
    """Two samples of a group were drawn with one seed."""
    lines = w.drawn()
    return w.log(w.both([lines[i - i % 3 % 2] for i in range(len(lines))]))


FAULT = Shown(
    name="lines doubled within a group",
    order=10,
    look=look,
    remedy="Give every sample of a group a seed of its own; then advantages differ from 0 again.",
    tries="completions that repeat where chance makes that all but impossible",
    known_from=("Tencent-Hunyuan/UniRL#208",),
    plants=(Plant(group="ids", make=duplicate_completions, named=("doubled within",)),),
)
