"""The numbers of another line: of one as long, or of one of the same prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import closest
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.sampling import Line
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Of each line the nearest other one's numbers, as many as that one has."""
    scores, most = {}, 1
    by_length, by_prompt = defaultdict(list), defaultdict(list)
    for x in evidence.all_lines:
        by_length[len(x.scored)].append(x)
        by_prompt[x.prompt_ids].append(x)
    # A log may hold 10^5 short lines, so those of one length are compared at once.
    indices = {n: np.array([x.index for x in lines]) for n, lines in by_length.items()}
    columns = {n: np.stack([x.scored for x in lines]) for n, lines in by_length.items()}
    for i, line in enumerate(evidence.lines):
        n = len(line.scored)
        as_long = columns[n][indices[n] != line.index] if n in columns else np.empty((0, n), np.float32)
        others = [
            np.concatenate([other.scored[:n], line.scored[len(other.scored) :]])
            for other in by_prompt[line.prompt_ids]
            if len(other.scored) != n
        ]
        candidates = np.concatenate([as_long, np.array(others)]) if others else as_long
        if len(candidates):
            scores[i], most = closest(line, candidates), max(most, len(candidates))
    yield Prediction("logged numbers belong to another line of the log", scores, choices=most, by_line=True)


def numbers_of_the_samples_in_another_order(w: World) -> Log:
    """The completions of a group were sorted, their numbers were not."""
    lines = w.drawn()
    groups = [lines[i : i + 3] for i in range(0, len(lines), 3)]
    moved: list[Line] = []
    for group in groups:
        for x, other in zip(group, [*group[1:], group[0]], strict=True):
            n = min(len(x.sampler), len(other.sampler))
            column = np.append(other.sampler[:n], x.sampler[n:])
            moved.append(replace(x, sampler=np.float32(column)))
    return w.log(w.both(moved))


FAULT = Predicted(
    name="another line's numbers",
    order=370,
    predict=predict,
    remedy="Carry prompt, completion and log-probabilities in one record from the sampler to the trainer.",
    tries="the other lines of the log",
    is_of_whole_log=True,
    plants=(
        Plant(
            group="lines",
            make=numbers_of_the_samples_in_another_order,
            named=("another line's completion", "another line's numbers", "next line", "line's before"),
        ),
    ),
)
