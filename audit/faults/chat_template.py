"""What a chat template writes before an answer and between turns, and the turns that follow each other."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..formats.record import LoggedRollout

if TYPE_CHECKING:
    from ...engine.tasks.tokenizer import Tokenizer

_WORD = {"user": "qua", "assistant": "quo"}


def following(lines: Sequence[LoggedRollout]) -> list[tuple[LoggedRollout, LoggedRollout]]:
    """The turns of conversations, each with the next one."""
    return [(a, b) for a, b in pairwise(lines) if a.turn is not None and b.turn == a.turn + 1]


def generation_prompt(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """The ids that the chat template writes before an answer; empty where it has none."""
    if not tokenizer.has_chat_template:
        return ()
    with_prompt, without = (_rendered(tokenizer, ["user"], opening) for opening in (True, False))
    if not with_prompt.startswith(without) or with_prompt == without:
        return ()
    return tuple(tokenizer.encode_plain(with_prompt[len(without) :]))


def between_turns(tokenizer: "Tokenizer") -> str:
    """The white space after the end token of a turn in the chat template; empty where there is none."""
    if not tokenizer.has_chat_template:
        return ""
    text = _rendered(tokenizer, ["user", "assistant", "user"], False)
    rest = text.partition(_WORD["assistant"])[2]
    for end in sorted((tokenizer.text([i]) for i in tokenizer.stop_ids), key=len, reverse=True):
        if rest.startswith(end):
            rest = rest[len(end) :]
            return rest[: len(rest) - len(rest.lstrip())]
    return ""


def _rendered(tokenizer: "Tokenizer", roles: Sequence[str], opening: bool) -> str:
    """A short conversation in the chat template; empty where the template refuses it.

    opening: whether the generation prompt follows.
    """
    messages = [{"role": role, "content": _WORD[role]} for role in roles]
    try:
        return tokenizer.conversation(messages, opening)
    except ValueError:
        return ""
