"""The tokens of a report with their text: those that audit.html colours, and those farthest apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ..figures.measure import WorstToken

if TYPE_CHECKING:
    from ...engine.rollout.types import Rollout
    from ...engine.tasks.tokenizer import Tokenizer

# Tokens that a report holds. A page of more takes seconds to lay out.
_TOKENS = 6000
_PROMPT, _BEFORE = 400, 60  # characters


@dataclass(frozen=True)
class SequenceTexts:
    """A sequence with its tokens: text, id, and the log-probabilities of sampler and trainer, or None."""

    sequence: int
    prompt: str
    tokens: list[tuple[str, int, float | None, float | None]]
    left_out: int  # further tokens


@dataclass(frozen=True)
class TokenTexts:
    """Sequences with their tokens, those with the worst tokens first."""

    sequences: list[SequenceTexts]
    left_out: int  # further sequences


def token_texts(
    rollouts: "Sequence[tuple[Rollout, SamplingParams]]",
    trainer: Sequence[np.ndarray],
    tokenizer: "Tokenizer",
    worst: Sequence[WorstToken],
) -> TokenTexts:
    """Sequences with their tokens, those with the worst tokens first, until _TOKENS are reached.

    trainer: the trainer's logprobs [C] of each sequence.
    """
    order = list(dict.fromkeys([*(w.sequence for w in worst), *range(len(rollouts))]))
    sequences, tokens = [], 0
    for i in order:
        rollout = rollouts[i][0]
        if tokens and tokens + len(rollout.completion_ids) > _TOKENS:
            continue
        kept = rollout.completion_ids[:_TOKENS]
        tokens += len(kept)
        rows = zip(kept, rollout.logprobs.tolist(), trainer[i].tolist(), strict=False)
        # A log may have tokens that are not compared; a logprob of theirs is NaN.
        rows = ((token, s, t) if s == s and t == t else (token, None, None) for token, s, t in rows)
        sequences.append(
            SequenceTexts(
                i,
                tokenizer.decode(rollout.prompt_ids)[-_PROMPT:],
                [(tokenizer.decode([token]), token, s, t) for token, s, t in rows],
                len(rollout.completion_ids) - len(kept),
            )
        )
    return TokenTexts(sequences, len(rollouts) - len(sequences))


def with_text(
    worst: WorstToken, rollouts: "Sequence[tuple[Rollout, SamplingParams]]", tokenizer: "Tokenizer"
) -> WorstToken:
    """One of the worst tokens, with its id, its text, and the end of the text before it."""
    r, position = rollouts[worst.sequence][0], worst.position
    return replace(
        worst,
        token=r.completion_ids[position],
        text=tokenizer.decode(r.completion_ids[position : position + 1]),
        before=tokenizer.decode([*r.prompt_ids, *r.completion_ids[:position]])[-_BEFORE:],
    )
