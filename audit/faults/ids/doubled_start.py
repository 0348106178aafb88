"""All prompts begin with one id twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...formats.record import LoggedRollout
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


_PROMPTS = 3  # that must begin alike, for it to be none of a single line


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer | None) -> str | None:
    """All prompts begin with one id twice, as where a template's BOS gets the tokenizer's before it."""
    starts = {x.prompt_ids for x in lines if len(x.prompt_ids) > 2 and not x.turn}
    firsts = {p[:2] for p in starts}
    if len(starts) < _PROMPTS or len(firsts) > 1 or len(set(*firsts)) > 1:
        return None
    if len({p[2] for p in starts}) == 1 and starts and next(iter(starts))[2] in next(iter(firsts)):
        return None  # padding, or a text of one token
    (first, _), *_ = firsts
    return (
        f"all {len(starts)} prompts begin with token {first} twice: the chat template writes it, and "
        "the tokenizer adds it again."
    )


def doubled_bos(w: World) -> Log:
    """The template writes a BOS, and the tokenizer adds one."""
    prompts = [[w.bos_id, *p] for p in w.prompts]
    return w.log(w.both(w.draw(w.bf16, prompts, 3, w.usual, w.seed)))


FAULT = Shown(
    name="doubled first token",
    order=20,
    look=look,
    remedy="Encode the template's text without special tokens (add_special_tokens=False).",
    tries="all prompts begin with one id twice, as where the template and the tokenizer both add a BOS",
    plants=(Plant(group="ids", make=doubled_bos, named=("doubled", "special token")),),
)
