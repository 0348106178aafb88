"""Faults of a log that show in its ids alone. No log-probability need differ for them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..faults.all_faults import in_ids
from ..faults.chat_template import generation_prompt
from ..faults.fault import LogFault
from ..faults.ids import after_the_end, never_drawn, template_in_completion
from ..formats.record import LoggedRollout

if TYPE_CHECKING:
    from ...engine.tasks.tokenizer import Tokenizer


def check_log(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer | None") -> list[LogFault]:
    """What is wrong with the lines of a log.

    Lines without token ids are passed over. tokenizer: None where no model is named; then ends and texts are
    not checked.
    """
    lines = [x for x in lines if x.completion_ids is not None and x.prompt_ids is not None]
    if not lines:
        return []
    able = [fault for fault in in_ids() if tokenizer is not None or not fault.needs_tokenizer]
    shown = [fault.shown(lines, tokenizer) for fault in able]
    return list({fault.name: fault for fault in shown if fault}.values())


def drawn_parts(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> list[slice]:
    """The part of each completion that was drawn, where the checks above find that others were not.

    Who reports a number for the other tokens reports that of nothing.
    """
    opening = len(generation_prompt(tokenizer)) if template_in_completion.look(lines, tokenizer) else 0
    start = opening or int(never_drawn.look(lines, tokenizer) is not None)
    if after_the_end.look(lines, tokenizer) is None:
        return [slice(start, None)] * len(lines)
    ends = [[i + 1 for i, t in enumerate(x.completion_ids) if t in tokenizer.stop_ids] for x in lines]
    return [slice(start, next(iter(after_end), None)) for after_end in ends]
