"""Turns whose prompt holds the text of the turn before, but other ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ...formats.record import LoggedRollout
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
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
    return (
        f"{changed} of {turns} turns begin with the text of the turn before and with other token "
        "ids: it was decoded and encoded again."
    )


def turns_encoded_again(w: World) -> Log:
    """A tool loop that keeps the conversation as text."""

    def join(p: list[int], c: list[int], q: list[int]) -> list[int]:
        text = w.tokenizer.decode([*p, *c])
        return [*w.tokenizer.encode(text, add_special_tokens=False), *w.newline, *q]

    return w.conversations(join)


FAULT = Shown(
    name="retokenised turns",
    order=50,
    look=look,
    remedy="Append token ids to the conversation; never decode and encode what the model drew.",
    tries="a turn whose prompt has the text of the turns before, but other ids",
    known_from=("huggingface/trl#5224",),
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=turns_encoded_again, named=("retokenised",)),),
)
