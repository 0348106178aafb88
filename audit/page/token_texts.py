"""The tokens of a report, with their text: the strip of audit.html, and the tokens farthest apart.

Text of a model is hostile: it may hold control characters, escape sequences of terminals, markup, and
characters that turn the direction of writing. `visible` makes all of them printable; pages escape markup as
well.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.rollout.types import Rollout
from ...engine.tasks.tokenizer import Tokenizer
from ...kernels.sampling_params import SamplingParams
from ...verify.reading import printable

# Tokens that a report holds. A page of more takes seconds to lay out.
_TOKENS = 6000
_PROMPT, _BEFORE = 400, 60  # characters


def visible(text: str) -> str:
    """The text with every character that does not print (control, direction, surrogate) as an escape."""
    return printable(text, keep="")


def strip(
    rollouts: Sequence[tuple[Rollout, SamplingParams]],
    trainer: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    worst: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Sequences with their tokens, those with the worst tokens first, until _TOKENS are reached.

    trainer: the trainer's logprobs [C] of each sequence.
    """
    order = list(dict.fromkeys([*(w["sequence"] for w in worst), *range(len(rollouts))]))
    sequences, tokens = [], 0
    for i in order:
        rollout = rollouts[i][0]
        if tokens and tokens + len(rollout.completion_ids) > _TOKENS:
            continue
        kept = rollout.completion_ids[:_TOKENS]
        tokens += len(kept)
        rows = zip(kept, rollout.logprobs.tolist(), trainer[i].tolist(), strict=False)
        # A log may have tokens that are not compared; their logprob is NaN.
        rows = ((token, s, t) if s == s else (token, None, None) for token, s, t in rows)
        sequences.append(
            {
                "sequence": i,
                "prompt": tokenizer.decode(rollout.prompt_ids)[-_PROMPT:],
                "tokens": [[tokenizer.decode([token]), token, s, t] for token, s, t in rows],
                "left_out": len(rollout.completion_ids) - len(kept),
            }
        )
    return {"sequences": sequences, "left_out": len(rollouts) - len(sequences)}


def with_text(
    worst: dict[str, Any], rollouts: Sequence[tuple[Rollout, SamplingParams]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """One of the worst tokens, with its id, its text, and the end of the text before it."""
    r, position = rollouts[worst["sequence"]][0], worst["position"]
    before = tokenizer.decode([*r.prompt_ids, *r.completion_ids[:position]])[-_BEFORE:]
    return worst | {
        "token": r.completion_ids[position],
        "text": tokenizer.decode(r.completion_ids[position : position + 1]),
        "before": before,
    }
