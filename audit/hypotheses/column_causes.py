"""What may have gone wrong with a log of two columns, without a model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..faults.all_faults import without_model
from ..formats.record import LoggedRollout
from .evidence import Evidence
from .fit import explain
from .scorable_lines import Line
from .tried import Tried


def try_columns(lines: Sequence[LoggedRollout]) -> tuple[Tried, Tried]:
    """What the hypotheses that need no model say to the sampler's column of a log, and to the trainer's."""
    evidence = Evidence(
        [
            declared(
                Line(
                    i,
                    line.prompt_ids or (),
                    line.completion_ids,
                    np.where(line.drawn(), line.logprobs, np.float32(np.nan)),
                    np.where(line.drawn(), line.trainer_logprobs, np.float32(np.nan)),
                    line.sampling_params,
                    *said(line),
                ),
                line.decimals,
                line.trainer_decimals,
            )
            for i, line in enumerate(lines)
        ]
    )
    swapped = [
        replace(x, logged=x.scored, scored=x.logged, decimals=line.trainer_decimals)
        for x, line in zip(evidence.lines, lines, strict=True)
    ]
    trainers = replace(evidence, lines=swapped, side="trainer")
    faults = without_model()
    return explain(evidence, faults), explain(trainers, faults)


def declared(line: Line, decimals: int | None, others: int | None = None) -> Line:
    """The line with the decimals that the log says `logged` keeps. others: those that `scored` keeps."""
    nats = sum(0.5 * 10.0**-n for n in (decimals, others) if n is not None)
    return replace(line, decimals=decimals, slack=np.full(len(line.logged), nats) if nats else None)


def said(line: LoggedRollout) -> tuple[bool, int | None, int | None, int | None]:
    """The last fields of a Line: masked, version, step, turn."""
    masked = line.mask is not None and not line.mask.all()
    first, last = line.weight_span or (None, None)
    return masked, first if first == last else None, line.step, line.turn
