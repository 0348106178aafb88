"""Faults of single lines and of conversations that the ids of a log show.

Some need the tokenizer, which knows the ends and the chat template. None needs the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..formats.record import LoggedRollout
from .log_fault import LogFault

if TYPE_CHECKING:
    from ...engine.tasks.tokenizer import Tokenizer

# Prompts that must begin alike, and lines that show a fault, for it to be none of a single line.
_PROMPTS, _LINES = 3, 3
# Nats of evidence (one in a million) against a token that every line has by chance.
_EVIDENCE = 14.0
_SHARE = 0.1  # of the lines that are cut short
_TAIL = 4  # tokens that a template writes after an end token, at most


def doubled_start(lines: Sequence[LoggedRollout]) -> LogFault | None:
    """All prompts begin with one id twice, as where a template's BOS gets the tokenizer's before it."""
    starts = {x.prompt_ids for x in lines if len(x.prompt_ids) > 2 and not x.turn}
    firsts = {p[:2] for p in starts}
    if len(starts) < _PROMPTS or len(firsts) > 1 or len(set(*firsts)) > 1:
        return None
    if len({p[2] for p in starts}) == 1 and starts and next(iter(starts))[2] in next(iter(firsts)):
        return None  # padding, or a text of one token
    (first, _), *_ = firsts
    return LogFault(
        name="doubled first token",
        text=f"all {len(starts)} prompts begin with token {first} twice: the chat template writes it, and "
        "the tokenizer adds it again.",
        remedy="Encode the template's text without special tokens (add_special_tokens=False).",
    )


def never_drawn(lines: Sequence[LoggedRollout]) -> LogFault | None:
    """Every completion has one id at its first place, though the trainer gives it little probability."""
    first = Counter(x.completion_ids[0] for x in lines if x.turn in (None, 0))
    token, count = first.most_common(1)[0] if first else (0, 0)
    prompts = {x.prompt_ids for x in lines}
    if count < sum(first.values()) or count < _LINES or len(prompts) < _PROMPTS:
        return None
    trained = [x for x in lines if x.drawn()[0] and x.trainer_logprobs is not None]
    nats = -sum(float(x.trainer_logprobs[0]) for x in trained if np.isfinite(x.trainer_logprobs[0]))
    if nats < _EVIDENCE:
        return None
    return LogFault(
        name="a token that was never drawn",
        text=f"all {count} completions begin with token {token}, to which the trainer gives a probability of "
        f"{math.exp(-nats / len(trained)):.2g}: a template wrote it, and it is trained as if drawn.",
        remedy="Put it into the prompt, or mask it.",
    )


def template_in_completion(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """Completions that begin with the template's generation prompt, which their prompts lack."""
    if not (opening := _generation_prompt(tokenizer)):
        return None
    n = len(opening)
    wrong = [x for x in lines if x.completion_ids[:n] == opening and x.prompt_ids[-n:] != opening]
    wrong = [x for x in wrong if x.drawn()[:n].all()]
    if len(wrong) < max(_LINES, len(lines) // 2):
        return None
    return LogFault(
        name="a token that was never drawn",
        text=f"{len(wrong)} completions begin with the chat template's generation prompt "
        f"({tokenizer.text(opening)!r}), which their prompts lack: the template wrote it, and it is trained "
        "as if it had been drawn.",
        remedy="Render prompts with add_generation_prompt=True; a completion begins with what was drawn.",
    )


def _generation_prompt(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """The ids that the chat template writes before an answer; empty where it has none."""
    if not tokenizer.has_chat_template:
        return ()
    with_prompt, without = (_rendered(tokenizer, ["user"], opening) for opening in (True, False))
    if not with_prompt.startswith(without) or with_prompt == without:
        return ()
    return tuple(tokenizer.encode_plain(with_prompt[len(without) :]))


def after_the_end(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """Completions that go on after their end token, all with the same few ids of the template."""
    tails: Counter[tuple[int, ...]] = Counter()
    for x in lines:
        ends = [i for i, token in enumerate(x.completion_ids) if token in tokenizer.stop_ids]
        if ends and ends[0] < len(x.completion_ids) - 1 and x.drawn()[ends[0] + 1 :].all():
            tails[x.completion_ids[ends[0] + 1 :]] += 1
    tail, count = tails.most_common(1)[0] if tails else ((), 0)
    if count < max(_LINES, sum(tails.values())) or len(tail) > _TAIL:
        return None
    return LogFault(
        name="a token that was never drawn",
        text=f"{count} completions go on after their end token, all with {tokenizer.text(tail)!r}: the chat "
        "template wrote it, and it is trained as if it had been drawn.",
        remedy="End a completion with its end token; what the template writes after it belongs to the next "
        "prompt.",
    )


def drawn_parts(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> list[slice]:
    """The part of each completion that was drawn, where the checks above find that others were not.

    Who reports a number for the other tokens reports that of nothing.
    """
    opening = len(_generation_prompt(tokenizer)) if template_in_completion(lines, tokenizer) else 0
    start = opening or int(never_drawn(lines) is not None)
    if after_the_end(lines, tokenizer) is None:
        return [slice(start, None)] * len(lines)
    ends = [[i + 1 for i, t in enumerate(x.completion_ids) if t in tokenizer.stop_ids] for x in lines]
    return [slice(start, next(iter(of_line), None)) for of_line in ends]


def cut_short(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """Completions that end without an end token, before any limit, while others have one.

    A limit is of the completion, of the whole sequence, or of a turn, which tokens of tools end.
    """
    lines = [x for x in lines if x.turn is None]
    ended = [x for x in lines if x.completion_ids[-1] in tokenizer.stop_ids]
    cut = [x for x in lines if x.completion_ids[-1] not in tokenizer.stop_ids and x.drawn()[-1]]
    sizes = [_sizes(x) for x in cut]
    limits = [max(of_all) for of_all in zip(*sizes, strict=True)]
    early = [
        x
        for x, size in zip(cut, sizes, strict=True)
        if not x.truncated and not any(n == limit for n, limit in zip(size, limits, strict=True))
    ]
    stop_strings = len({x.completion_ids[-1] for x in early}) == 1
    if not ended or len(early) < max(_LINES, _SHARE * len(lines)) or stop_strings:
        return None
    return LogFault(
        name="completions cut without an end token",
        text=f"{len(early)} of {len(lines)} completions end without an end token, at "
        f"{len({len(x.completion_ids) for x in early})} lengths below the longest: something cut them after "
        "they were drawn.",
        remedy="Hand on the completion as it was drawn, or mark it as truncated and leave it out. "
        "Where completions end at stop strings, nothing is wrong.",
    )


def _sizes(x: LoggedRollout) -> tuple[int, int, int]:
    """Tokens of the completion, of the whole sequence, and of the last turn."""
    undrawn = np.flatnonzero(~x.drawn())
    count, before = len(x.completion_ids), int(undrawn[-1]) + 1 if len(undrawn) else 0
    return count, len(x.prompt_ids) + count, count - before


def end_without_logprob(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer") -> LogFault | None:
    """Completions whose end token alone is masked, or has no log-probability."""
    ended = [x for x in lines if x.completion_ids[-1] in tokenizer.stop_ids and len(x.completion_ids) > 1]
    without = []
    for x in ended:
        known = x.drawn() & ~np.isnan(x.logprobs) if x.logprobs is not None else x.drawn()
        without.append(not known[-1] and bool(known[:-1].all()))
    if sum(without) < _LINES or sum(without) < len(ended) / 2:
        return None
    return LogFault(
        name="end token without a log-probability",
        text=f"in {sum(without)} of {len(ended)} completions that end, the end token is masked or has no "
        "log-probability, and all other tokens have one. The model drew it, too.",
        remedy="Log its log-probability and train on it, or the model unlearns to stop.",
    )


def turns(lines: Sequence[LoggedRollout], tokenizer: "Tokenizer | None") -> Iterator[LogFault]:
    """Faults between a turn and the next."""
    after = [(a, b) for a, b in pairwise(lines) if a.turn is not None and b.turn == a.turn + 1]
    if not after:
        return
    stripped = sum(_is_stripped(a, b) for a, b in after)
    if stripped >= max(2, len(after) // 2):
        yield LogFault(
            name="parts of a turn left out of the next",
            text=f"in {stripped} of {len(after)} turns the prompt holds the turn before without a part that "
            "was drawn, as a template does that strips earlier reasoning: the next turn was drawn after "
            "other ids than those that are trained.",
            remedy="Keep what was drawn in the conversation, or train each turn with its own prompt.",
        )
    if tokenizer is not None and (fault := _separators(after, tokenizer)):
        yield fault


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


def _separators(
    after: Sequence[tuple[LoggedRollout, LoggedRollout]], tokenizer: "Tokenizer"
) -> LogFault | None:
    """Turns that follow each other without what the chat template writes between them."""
    if not (expected := _between(tokenizer)):
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
    return LogFault(
        name="separator lost between turns",
        text=f"in {lost} of {known} turns {expected!r}, which the chat template writes after a turn's end, "
        "is missing: the model reads another format than it was trained on.",
        remedy="Append the ids that the template writes between two turns, not those of the message alone.",
    )


def _between(tokenizer: "Tokenizer") -> str:
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


_WORD = {"user": "qua", "assistant": "quo"}


def _rendered(tokenizer: "Tokenizer", roles: Sequence[str], opening: bool) -> str:
    """A short conversation in the chat template; empty where the template refuses it.

    opening: whether the generation prompt follows.
    """
    messages = [{"role": role, "content": _WORD[role]} for role in roles]
    try:
        return tokenizer.conversation(messages, opening)
    except ValueError:
        return ""


ALONE: tuple[Callable[[Sequence[LoggedRollout]], LogFault | None], ...] = (doubled_start, never_drawn)
BESIDE_TOKENIZER: tuple[Callable[[Sequence[LoggedRollout], "Tokenizer"], LogFault | None], ...] = (
    template_in_completion,
    after_the_end,
    cut_short,
    end_without_logprob,
)
