"""Faults of some tokens, of some lines, or of one version: what a wrong number is, and where it sits."""

from dataclasses import replace

import numpy as np
from ids import newline
from plants import plant, replaced
from sampling import END_ID, Line, Settings, draw, scored, with_trainer
from world import USUAL, Log, World


@plant("lines", "next line")
def next_lines_numbers_in_one_rank(w: World) -> Log:
    """One rank of three gathers with an index off by one."""
    lines = w.both(w.drawn())
    rank, wrong = int(w.rng.integers(3)), []
    for i, x in enumerate(lines):
        other = lines[(i + 1) % len(lines)].trainer
        n = min(len(other), len(x.trainer))
        wrong.append(replaced(x, np.arange(n), other[:n]) if i % 3 == rank else x)
    return Log(wrong, USUAL, with_model=False)


@plant("lines", "number is 0")
def zeros_beyond_a_length(w: World) -> Log:
    """A trainer that cuts its sequences: what is beyond has the number 0."""
    most, lines = int(w.rng.integers(50, 65)), w.both(w.drawn())
    beyond = [np.arange(len(x.trainer)) + len(x.prompt) >= most for x in lines]
    cut = [replaced(x, b, 0.0) for x, b in zip(lines, beyond, strict=True)]
    return Log(cut, USUAL, with_model=False)


@plant("lines", "mean")
def means_in_one_version(w: World) -> Log:
    """From one weight version on, each token has the mean of its completion."""
    lines = [replace(x, extra={"weight_version": 4 + i // 9}) for i, x in enumerate(w.both(w.drawn()))]
    wrong = [
        replace(x, sampler=np.full_like(x.sampler, x.sampler.mean())) if i // 9 else x
        for i, x in enumerate(lines)
    ]
    return Log(wrong, USUAL, with_model=False)


@plant("lines", "cut off")
def numbers_cut_off_below(w: World) -> Log:
    """A server that clips small log-probabilities."""
    floor = np.float32(-w.uniform(3.0, 5.0))
    lines = [replace(x, sampler=np.maximum(x.sampler, floor)) for x in w.drawn()]
    return Log(w.both(lines), USUAL, with_model=False)


@plant("lines", "of the raw logits")
def first_token_without_the_temperature(w: World) -> Log:
    """The token of the prefill is reported from before the temperature."""
    s = replace(USUAL, temperature=w.uniform(0.55, 0.7))
    lines = w.drawn(s)
    raw = scored(w.bf16, lines, Settings())
    first = [replace(x, sampler=np.append(r[:1], x.sampler[1:])) for x, r in zip(lines, raw, strict=True)]
    return Log(w.both(first, s), s)


@plant("lines", "of the raw logits", "trainer column, raw logits", "trainer column, another temp")
def one_group_without_the_temperature(w: World) -> Log:
    """The trainer forgets the temperature for the lines of two prompts."""
    lines, raw = w.both(w.drawn()), scored(w.fp32, w.drawn(), Settings())
    return Log(
        [replace(x, trainer=r) if 3 <= i < 9 else x for i, (x, r) in enumerate(zip(lines, raw, strict=True))],
        USUAL,
    )


@plant("lines", "of the raw logits", "trainer column, raw logits", "trainer column, another temp")
def long_lines_without_the_temperature(w: World) -> Log:
    """Long completions take another path in the trainer, which lacks the temperature."""
    lines, raw = w.both(w.drawn()), scored(w.fp32, w.drawn(), Settings())
    long = sorted(len(x.completion) for x in lines)[2 * len(lines) // 3]
    wrong = zip(lines, raw, strict=True)
    return Log([replace(x, trainer=r) if len(x.completion) >= long else x for x, r in wrong], USUAL)


@plant("lines", "another line's completion", "another line's numbers", "next line", "line's before")
def numbers_of_the_samples_in_another_order(w: World) -> Log:
    """The completions of a group were sorted, their numbers were not."""
    lines = w.drawn()
    groups = [lines[i : i + 3] for i in range(0, len(lines), 3)]
    moved: list[Line] = []
    for group in groups:
        for x, other in zip(group, [*group[1:], group[0]], strict=True):
            n = min(len(x.sampler), len(other.sampler))
            column = np.append(other.sampler[:n], x.sampler[n:])
            moved.append(replace(x, sampler=np.float32(column)))
    return Log(with_trainer(moved, scored(w.fp32, lines, USUAL)), USUAL)


@plant("lines", "padding is read")
def padding_is_read(w: World) -> Log:
    """The sampler pads its prompts on the left, and attends to the padding."""
    longest = max(map(len, w.prompts))
    padded = [[2] * (longest - len(p)) + p for p in w.prompts]
    lines = draw(w.bf16, padded, 3, USUAL, w.seed)
    prompts = [p for p in w.prompts for _ in range(3)]
    return Log(w.both([replace(x, prompt=p) for x, p in zip(lines, prompts, strict=True)]), USUAL)


@plant("ids", "never drawn", "after their end token")
def newline_after_the_end(w: World) -> Log:
    """The template's line break behind the end token is in the completion, and trained."""
    lines = []
    for x in w.drawn():
        tail = newline(w) if x.completion[-1] == END_ID else []
        numbers = np.append(x.sampler, np.full(len(tail), -0.01, np.float32))
        lines.append(replace(x, completion=[*x.completion, *tail], sampler=np.float32(numbers)))
    return Log(w.both(lines), USUAL)
