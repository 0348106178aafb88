"""Logs without a fault. None may be called one, and each should get its all-clear."""

from dataclasses import replace

import numpy as np
import torch
from ids import conversations, newline, turns
from plants import Plant
from sampling import Settings, load
from world import USUAL, Log, World

SOUND: list[Plant] = []


def sound(make):
    """Register a sound log."""
    SOUND.append(Plant("sound", make.__name__, (), make))
    return make


@sound
def bf16_beside_fp32(w: World) -> Log:
    return Log(w.both(w.drawn()), USUAL)


@sound
def bf16_beside_fp32_no_model(w: World) -> Log:
    return Log(w.both(w.drawn()), USUAL, with_model=False)


@sound
def bf16_without_a_trainer_column(w: World) -> Log:
    return Log(w.drawn(), USUAL)


@sound
def bf16_beside_bf16(w: World) -> Log:
    return Log(w.both(w.drawn(), model=w.bf16), USUAL, {"dtype": "bfloat16"})


@sound
def fp16_beside_fp32(w: World) -> Log:
    return Log(w.both(w.drawn(model=load(w.folder, torch.float16))), USUAL)


@sound
def fp32_beside_fp32(w: World) -> Log:
    return Log(w.both(w.drawn(model=w.fp32)), USUAL)


@sound
def fp32_beside_fp32_no_model(w: World) -> Log:
    return Log(w.both(w.drawn(model=w.fp32)), USUAL, with_model=False)


@sound
def top_p(w: World) -> Log:
    s = replace(USUAL, top_p=0.9)
    return Log(w.both(w.drawn(s), s), s)


@sound
def top_k_no_model(w: World) -> Log:
    s = replace(USUAL, top_k=20)
    return Log(w.both(w.drawn(s), s), s, with_model=False)


@sound
def greedy(w: World) -> Log:
    s = replace(USUAL, temperature=0.0)
    return Log(w.both(w.drawn(s, each=1), s), s)


@sound
def bias(w: World) -> Log:
    s = replace(USUAL, bias=((80, 2.0),))
    return Log(w.both(w.drawn(s), s), s)


@sound
def temperature_one(w: World) -> Log:
    return Log(w.both(w.drawn(Settings()), Settings()), Settings())


@sound
def four_decimals(w: World) -> Log:
    lines = [replace(x, sampler=np.round(x.sampler, 4), extra={"decimals": 4}) for x in w.drawn()]
    return Log(w.both(lines), USUAL)


@sound
def two_turns(w: World) -> Log:
    return Log(conversations(turns(w, lambda p, c, q: [*p, *c, *newline(w), *q])), USUAL)


@sound
def caps_of_requests(w: World) -> Log:
    """Each request has a limit of its own, and the log says which completions it ended."""
    lines = []
    for i, x in enumerate(w.both(w.drawn())):
        n = 8 + 5 * i
        ended = {"finish_reason": "stop" if n >= len(x.completion) else "length"}
        parts = {name: getattr(x, name)[:n] for name in ("completion", "sampler", "trainer")}
        lines.append(replace(x, **parts, extra=ended))
    return Log(lines, USUAL)


@sound
def fp32_by_the_default_dtype(w: World) -> Log:
    """A stack in float32 whose two columns are equal; the audit scores in bfloat16."""
    lines = [replace(x, trainer=x.sampler) for x in w.drawn(model=w.fp32)]
    return Log(lines, USUAL, {"dtype": "bfloat16"})


@sound
def few_lines(w: World) -> Log:
    return Log(w.both(w.drawn()[:3]), USUAL)


@sound
def with_other_checkpoints(w: World) -> Log:
    return Log(w.both(w.drawn()), USUAL, {"checkpoints": (str(w.old),)})
