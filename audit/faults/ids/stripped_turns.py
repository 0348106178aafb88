"""Parts of a turn that the next one's prompt lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...formats.record import LoggedRollout
from ..chat_template import following
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer | None) -> str | None:
    """A next prompt that holds the turn before without a part that was drawn."""
    after = following(lines)
    stripped = sum(_is_stripped(a, b) for a, b in after)
    if not after or stripped < max(2, len(after) // 2):
        return None
    return (
        f"in {stripped} of {len(after)} turns the prompt holds the turn before without a part that "
        "was drawn, as a template does that strips earlier reasoning: the next turn was drawn after "
        "other ids than those that are trained."
    )


def _is_stripped(before: LoggedRollout, after: LoggedRollout) -> bool:
    """Whether the next prompt goes on with the end of a completion, without its beginning or its middle."""
    prompt, drawn, ids = before.prompt_ids, before.completion_ids, after.prompt_ids
    rest = ids[len(prompt) :]
    if ids[: len(prompt)] != prompt or rest[: len(drawn)] == drawn:
        return False
    kept = next((i for i, (a, b) in enumerate(zip(rest, drawn, strict=False)) if a != b), 0)
    for start in range(kept + 1, len(drawn)):
        tail = drawn[start:]
        if rest[kept : kept + len(tail)] == tail and (len(tail) > 1 or kept):
            return True
    return False


def first_half_of_a_turn_stripped(w: World) -> Log:
    """A template that strips the reasoning of earlier turns."""
    return w.conversations(lambda p, c, q: [*p, *c[len(c) // 2 :], *w.newline, *q])


FAULT = Shown(
    name="parts of a turn left out of the next",
    order=100,
    look=look,
    remedy="Keep what was drawn in the conversation, or train each turn with its own prompt.",
    tries="parts of a turn that the next prompt lacks, as where reasoning is stripped",
    plants=(
        Plant(group="ids", make=first_half_of_a_turn_stripped, named=("stripped", "left out of the next")),
    ),
)
