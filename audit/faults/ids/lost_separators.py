"""Turns that follow each other without what the chat template writes between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...formats.record import LoggedRollout
from ..chat_template import between_turns, following
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """Turns that follow each other without what the chat template writes between them."""
    after = following(lines)
    if not after or not (expected := between_turns(tokenizer)):
        return None
    ends = tuple(tokenizer.text([i]) + expected for i in tokenizer.stop_ids)
    lost = known = 0
    for a, b in after:
        ids = a.prompt_ids + a.completion_ids
        if b.prompt_ids[: len(ids)] == ids:
            known += 1
            lost += not tokenizer.text(b.prompt_ids[len(ids) :]).startswith((expected, *ends))
    if lost < max(2, known // 2):
        return None
    return (
        f"in {lost} of {known} turns {expected!r}, which the chat template writes after a turn's end, "
        "is missing: the model reads another format than it was trained on."
    )


def separator_lost(w: World) -> Log:
    """A loop that appends the message alone."""
    return w.conversations(lambda p, c, q: [*p, *c, *q])


FAULT = Shown(
    name="separator lost between turns",
    order=110,
    look=look,
    remedy="Append the ids that the template writes between two turns, not those of the message alone.",
    tries="turns without what the template writes between them",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=separator_lost, named=("separator", "template")),),
)
