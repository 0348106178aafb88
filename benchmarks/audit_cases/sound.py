"""Logs without a fault. None may be called one, and each should get its all-clear."""

from dataclasses import replace

import numpy as np
import torch
from zerokl.audit.faults.fault import Plant
from zerokl.audit.faults.planting.world import Log, World

SOUND: list[Plant] = []


def sound(make):
    """Register a sound log."""
    SOUND.append(Plant(group="sound", make=make))
    return make


@sound
def bf16_beside_fp32(w: World) -> Log:
    return w.log(w.both(w.drawn()))


@sound
def bf16_beside_fp32_no_model(w: World) -> Log:
    return w.log(w.both(w.drawn()), with_model=False)


@sound
def bf16_without_a_trainer_column(w: World) -> Log:
    return w.log(w.drawn())


@sound
def bf16_beside_bf16(w: World) -> Log:
    return w.log(w.both(w.drawn(), model=w.bf16), options={"dtype": "bfloat16"})


@sound
def fp16_beside_fp32(w: World) -> Log:
    return w.log(w.both(w.drawn(model=w.model(dtype=torch.float16))))


@sound
def fp32_beside_fp32(w: World) -> Log:
    return w.log(w.both(w.drawn(model=w.fp32)))


@sound
def fp32_beside_fp32_no_model(w: World) -> Log:
    return w.log(w.both(w.drawn(model=w.fp32)), with_model=False)


@sound
def top_p(w: World) -> Log:
    s = replace(w.usual, top_p=0.9)
    return w.log(w.both(w.drawn(s), s), s)


@sound
def top_k_no_model(w: World) -> Log:
    s = replace(w.usual, top_k=20)
    return w.log(w.both(w.drawn(s), s), s, with_model=False)


@sound
def greedy(w: World) -> Log:
    s = replace(w.usual, temperature=0.0)
    return w.log(w.both(w.drawn(s, each=1), s), s)


@sound
def bias(w: World) -> Log:
    s = replace(w.usual, bias=((80, 2.0),))
    return w.log(w.both(w.drawn(s), s), s)


@sound
def temperature_one(w: World) -> Log:
    return w.log(w.both(w.drawn(w.raw), w.raw), w.raw)


@sound
def four_decimals(w: World) -> Log:
    lines = [replace(x, sampler=np.round(x.sampler, 4), extra={"decimals": 4}) for x in w.drawn()]
    return w.log(w.both(lines))


@sound
def two_turns(w: World) -> Log:
    return w.conversations(lambda p, c, q: [*p, *c, *w.newline, *q])


@sound
def caps_of_requests(w: World) -> Log:
    """Each request has a limit of its own, and the log says which completions it ended."""
    lines = []
    for i, x in enumerate(w.both(w.drawn())):
        n = 8 + 5 * i
        ended = {"finish_reason": "stop" if n >= len(x.completion) else "length"}
        parts = {name: getattr(x, name)[:n] for name in ("completion", "sampler", "trainer")}
        lines.append(replace(x, **parts, extra=ended))
    return w.log(lines)


@sound
def fp32_by_the_default_dtype(w: World) -> Log:
    """A stack in float32 whose two columns are equal; the audit scores in bfloat16."""
    lines = [replace(x, trainer=x.sampler) for x in w.drawn(model=w.fp32)]
    return w.log(lines, options={"dtype": "bfloat16"})


@sound
def few_lines(w: World) -> Log:
    return w.log(w.both(w.drawn()[:3]))


@sound
def with_other_checkpoints(w: World) -> Log:
    return w.log(w.both(w.drawn()), options=w.with_old)
