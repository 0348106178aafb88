"""Faults that the ids of a log show, and the random numbers behind them. The columns of most are sound."""

import random
from dataclasses import replace

import models
import numpy as np
from plants import plant
from sampling import END_ID, Line, draw
from world import USUAL, Log, World

BOS_ID = 0


@plant("ids", "doubled", "special token")
def doubled_bos(w: World) -> Log:
    prompts = [[BOS_ID, *p] for p in w.prompts]
    return Log(w.both(draw(w.bf16, prompts, 3, USUAL, w.seed)), USUAL)


@plant("ids", "doubled within")
def duplicate_completions(w: World) -> Log:
    lines = w.drawn()
    return Log(w.both([lines[i - i % 3 % 2] for i in range(len(lines))]), USUAL)


@plant("ids", "random stream", "one stream")
def one_random_stream(w: World) -> Log:
    lines = w.drawn(generators=lambda p, s: np.random.default_rng((w.seed, s)))
    return Log(w.both(lines), USUAL)


@plant("ids", "cut", "end token")
def cut_without_an_end(w: World) -> Log:
    lines = []
    for i, x in enumerate(w.both(w.drawn())):
        n = 20 + 7 * (i % 5)
        if i % 3 or n >= len(x.completion):
            lines.append(x)
            continue
        lines.append(replace(x, completion=x.completion[:n], sampler=x.sampler[:n], trainer=x.trainer[:n]))
    return Log(lines, USUAL)


@plant("ids", "end token")
def end_token_without_a_logprob(w: World) -> Log:
    lines = w.both(w.drawn())
    ends = [np.array(x.completion) == END_ID for x in lines]
    return Log(
        [
            replace(x, sampler=np.where(e, np.float32(np.nan), x.sampler), extra={"mask": (~e).tolist()})
            for x, e in zip(lines, ends, strict=True)
        ],
        USUAL,
    )


@plant("ids", "never drawn", "template")
def a_template_token_is_trained(w: World) -> Log:
    """Each completion begins with ids that the template, not the model, wrote."""
    given = w.tokenizer.encode("<|assistant|>", add_special_tokens=False)
    lines = [replace(x, prompt=x.prompt[:-1], completion=[*given, *x.completion]) for x in w.drawn()]
    lines = [replace(x, sampler=np.concatenate([[np.float32(-0.02)], x.sampler])) for x in lines]
    return Log(w.both(lines), USUAL)


def turns(w: World, join) -> list[Line]:
    """Conversations of two turns. join: of prompt, completion and question -> the second prompt."""
    rng, words = random.Random(w.seed), models.text().split(" ")
    lines = []
    for i, first in enumerate(w.both(w.drawn()[::2])):
        start = rng.randrange(len(words) - 9)
        asked = f"{models.USER}{' '.join(words[start : start + 4])}\n{models.ASSISTANT}"
        question = w.tokenizer.encode(asked, add_special_tokens=False)
        prompt = join(first.prompt, first.completion, question)
        (second,) = w.both(draw(w.bf16, [prompt], 1, USUAL, w.seed + 50 + i, most=40))
        lines += [(first, second)]
    return lines


def conversations(pairs) -> list[Line]:
    """Each pair of turns as one line of a log."""
    rows = []
    for pair in pairs:
        parts = [
            {
                "prompt_ids": x.prompt,
                "completion_ids": x.completion,
                "logprobs": x.sampler.tolist(),
                "trainer_logprobs": x.trainer.tolist(),
            }
            for x in pair
        ]
        rows.append(Line([], [], np.empty(0), extra={"turns": parts}))
    return rows


def newline(w: World) -> list[int]:
    """The separator after a turn."""
    return w.tokenizer.encode("\n", add_special_tokens=False)


@plant("ids", "separator", "template")
def separator_lost(w: World) -> Log:
    return Log(conversations(turns(w, lambda p, c, q: [*p, *c, *q])), USUAL)


@plant("ids", "retokenised")
def turns_encoded_again(w: World) -> Log:
    def join(p, c, q):
        text = w.tokenizer.decode([*p, *c])
        return [*w.tokenizer.encode(text, add_special_tokens=False), *newline(w), *q]

    return Log(conversations(turns(w, join)), USUAL)


@plant("ids", "stripped", "left out of the next")
def first_half_of_a_turn_stripped(w: World) -> Log:
    def join(p, c, q):
        return [*p, *c[len(c) // 2 :], *newline(w), *q]

    return Log(conversations(turns(w, join)), USUAL)
