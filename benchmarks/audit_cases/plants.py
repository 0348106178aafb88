"""Faults of numbers, weights and settings, each with the names by which an audit may call it.

A plant is a function of a World. `named`: kinds of the cause, or words in its text, any of which is right.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from sampling import END_ID, AlteredCache, Line, Settings, changed, draw, load, scored, with_trainer
from transformers import AttentionInterface
from world import USUAL, Log, World


@dataclass(frozen=True)
class Plant:
    """One case."""

    group: str
    name: str
    named: tuple[str, ...]
    make: Callable[[World], Log]


PLANTS: list[Plant] = []


def plant(group: str, *named: str):
    """Register a plant: its class, and what names it."""

    def register(make):
        PLANTS.append(Plant(group, make.__name__, named, make))
        return make

    return register


# --- 1: one column is at fault ---


@plant(
    "column", "trainer without the temperature", "trainer column, raw logits", "trainer column, another temp"
)
def trainer_without_temperature(w: World) -> Log:
    return Log(w.both(w.drawn(), Settings()), USUAL)


@plant("column", "trainer without the temperature")
def trainer_without_temperature_no_model(w: World) -> Log:
    return Log(w.both(w.drawn(), Settings()), USUAL, with_model=False)


@plant("column", "trainer without top-p", "not renormalised", "trainer column, raw logits")
def trainer_without_top_p(w: World) -> Log:
    s = replace(USUAL, top_p=w.uniform(0.85, 0.93))
    return Log(w.both(w.drawn(s), USUAL), s)


@plant("column", "raw logits")
def sampler_raw_logits(w: World) -> Log:
    return Log(w.both(w.drawn(reported=Settings(), settings=USUAL)), USUAL)


@plant("column", "trainer column, logit bias", "logit bias", "trainer column, raw logits")
def trainer_without_bias(w: World) -> Log:
    s = replace(USUAL, bias=((int(w.rng.integers(60, 120)), w.uniform(1.5, 3.0)),))
    return Log(w.both(w.drawn(s), USUAL), s)


@plant("column", "trainer column, another checkpoint", "trainer column, incomplete sync")
def trainer_with_old_weights(w: World) -> Log:
    old = load(w.old)
    return Log(w.both(w.drawn(), model=old), USUAL, {"checkpoints": (str(w.old),)})


# --- 2: wrong numbers at some places ---


def replaced(line: Line, places: np.ndarray, values: np.ndarray) -> Line:
    """The line with other numbers of the trainer at some places."""
    column = line.trainer.copy()
    column[places] = values
    return replace(line, trainer=column)


@plant("place", "number is 0")
def zero_at_the_end_token(w: World) -> Log:
    lines = w.both(w.drawn())
    return Log([replaced(x, np.array(x.completion) == END_ID, 0.0) for x in lines], USUAL, with_model=False)


@plant("place", "number is 0")
def zero_first_in_a_chunk(w: World) -> Log:
    k = int(w.rng.integers(9, 17))
    lines = w.both(w.drawn())
    return Log([replaced(x, np.arange(len(x.trainer)) % k == 0, 0.0) for x in lines], USUAL, with_model=False)


@plant("place", "next line", "another line")
def first_token_of_the_next_line(w: World) -> Log:
    lines = w.both(w.drawn())
    firsts = [lines[(i + 1) % len(lines)].trainer[0] for i in range(len(lines))]
    return Log([replaced(x, np.array([0]), f) for x, f in zip(lines, firsts, strict=True)], USUAL)


@plant("place", "earlier token")
def an_earlier_tokens_number(w: World) -> Log:
    k, start = int(w.rng.integers(2, 5)), int(w.rng.integers(30, 40))
    lines = []
    for x in w.both(w.drawn()):
        places = np.arange(start, len(x.trainer))
        lines.append(replaced(x, places, x.trainer[places - k]) if len(places) else x)
    return Log(lines, USUAL, with_model=False)


@torch.no_grad()
def _likeliest(w: World, line: Line) -> np.ndarray:
    ids = torch.tensor([[*line.prompt, *line.completion]])
    logits = w.bf16(ids).logits[0, len(line.prompt) - 1 : -1].float() / USUAL.temperature
    return torch.log_softmax(logits, -1).max(-1).values.numpy()


@plant("place", "likeliest")
def the_likeliest_tokens_number(w: World) -> Log:
    lines = w.both(w.drawn())
    k = int(w.rng.integers(3, 6))
    return Log(
        [
            replace(x, sampler=np.where(np.arange(len(x.sampler)) % k == k - 1, _likeliest(w, x), x.sampler))
            for x in lines
        ],
        USUAL,
    )


@plant("place", "padded vocabulary")
def trainer_pads_the_vocabulary(w: World) -> Log:
    padded = replace(USUAL, padded=int(w.rng.choice([64, 128, 256])))
    return Log(w.both(w.drawn(), padded), USUAL)


@plant("place", "base")
def base_two_in_one_rank(w: World) -> Log:
    lines = w.both(w.drawn())
    scale = np.where(np.arange(len(lines)) % 4 == 3, 1 / np.log(2.0), 1.0)
    lines = [replace(x, trainer=np.float32(x.trainer * s)) for x, s in zip(lines, scale, strict=True)]
    return Log(lines, USUAL, with_model=False)


@plant("place", "another checkpoint")
def old_weights_in_a_group(w: World) -> Log:
    old = draw(load(w.old, torch.bfloat16), w.prompts[2:4], 3, USUAL, w.seed + 9)
    lines = w.drawn()
    return Log(w.both([*lines[:6], *old, *lines[12:]]), USUAL, {"checkpoints": (str(w.old),)})


# --- 4: continuous and composed faults ---


def _sampler(w: World, model=None, drawn: Settings = USUAL, declared: Settings = USUAL, **more) -> Log:
    """A faulty sampler beside a sound trainer of the declared settings."""
    options = more.pop("options", {})
    return Log(w.both(w.drawn(drawn, model, **more), declared), declared, options)


@plant("settings", "repetition penalty", "penalties")
def repetition_penalty(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, repetition=w.uniform(1.08, 1.25)))


@plant("settings", "presence", "penalties")
def presence_penalty(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, presence=w.uniform(0.4, 0.9)))


@plant("settings", "frequency", "penalties")
def frequency_penalty(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, frequency=w.uniform(0.2, 0.5)))


@plant("settings", "logit bias")
def logit_bias(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, bias=((int(w.rng.integers(60, 120)), w.uniform(2.0, 4.0)),)))


@plant("settings", "drew with min-p")
def min_p(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, min_p=w.uniform(0.03, 0.12)))


@plant("settings", "drew with top-p")
def an_odd_top_p(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, top_p=w.uniform(0.82, 0.97)))


@plant("settings", "another temperature")
def an_odd_temperature(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, temperature=w.uniform(0.84, 0.93)))


@plant("settings", "softcap", "soft-capped")
def logits_softcap(w: World) -> Log:
    return _sampler(w, drawn=replace(USUAL, softcap=w.uniform(8.0, 14.0)))


def quantised(kind: str, by: str, of_bf16: bool = False):
    """A change of weights: fp8 or int8 with a scale for each tensor, row or block of 32."""

    def change(name: str, w: torch.Tensor):
        if "proj" not in name or w.dim() != 2:  # a bias is not quantised
            return None
        x = w.bfloat16().float() if of_bf16 else w.float()
        rows, columns = (n + -n % 32 for n in x.shape)
        shaped = {"tensor": x.reshape(1, -1), "row": x}.get(by)
        if shaped is None:
            wide = torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))
            shaped = wide.reshape(rows // 32, 32, columns // 32, 32).transpose(1, 2).reshape(-1, 1024)
        most = 448.0 if kind == "fp8" else 127.0
        scale = (shaped.abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
        small = shaped / scale
        small = small.to(torch.float8_e4m3fn).float() if kind == "fp8" else small.round()
        back = small * scale
        if by == "block":
            back = back.reshape(rows // 32, columns // 32, 32, 32).transpose(1, 2).reshape(rows, columns)
            return back[: x.shape[0], : x.shape[1]]
        return back.reshape(x.shape)

    return change


def _quantised(w: World, *how) -> Log:
    return _sampler(w, changed(w.fp32, quantised(*how)).bfloat16())


@plant("weights", "weights quantised")
def fp8_by_tensor(w: World) -> Log:
    return _quantised(w, "fp8", "tensor")


@plant("weights", "weights quantised")
def fp8_by_row_of_bf16(w: World) -> Log:
    return _quantised(w, "fp8", "row", True)


@plant("weights", "weights quantised")
def fp8_by_block(w: World) -> Log:
    return _quantised(w, "fp8", "block")


@plant("weights", "weights quantised")
def int8_by_tensor(w: World) -> Log:
    return _quantised(w, "int8", "tensor")


@plant("weights", "another checkpoint")
def stale_weights(w: World) -> Log:
    return _sampler(w, load(w.old, torch.bfloat16), options={"checkpoints": (str(w.old),)})


@plant("weights", "between", "scaled update")
def half_of_an_update(w: World) -> Log:
    old, share = dict(load(w.old).named_parameters()), w.uniform(0.3, 0.7)
    model = changed(w.fp32, lambda name, x: old[name] + share * (x - old[name]))
    return _sampler(w, model.bfloat16(), options={"checkpoints": (str(w.old),)})


# --- 4: the cache, attention, positions ---


@plant("attention", "keys and values")
def fp8_cache(w: World) -> Log:
    return _sampler(w, cache=lambda c: AlteredCache(c, lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)))


@plant("attention", "keys and values")
def fp8_e5m2_cache(w: World) -> Log:
    return _sampler(w, cache=lambda c: AlteredCache(c, lambda x: x.to(torch.float8_e5m2).to(x.dtype)))


@plant("attention", "window")
def sliding_window(w: World) -> Log:
    size = int(w.rng.choice([24, 32, 40]))
    return _sampler(w, cache=lambda c: AlteredCache(c, window=size))


def _attention(name: str, cap: float = 0.0, sink: bool = False):
    """An attention of our own in transformers' registry."""

    def attend(module, q, k, v, mask, scaling=None, **_):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q.float() @ k.float().transpose(2, 3)) * scaling
        if cap:
            scores = cap * torch.tanh(scores / cap)
        T, S = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(T, S).tril(S - T) == 0, -torch.inf)
        if sink:
            scores = torch.cat([scores, torch.zeros(*scores.shape[:-1], 1)], -1)
        p = scores.softmax(-1)[..., :S]
        return (p.to(v.dtype) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    return name


@plant("attention", "softcap", "soft-capped")
def attention_softcap(w: World) -> Log:
    cap = w.uniform(2.0, 4.0)
    name = _attention("capped", cap)
    return _sampler(w, load(w.folder, torch.bfloat16, attn_implementation=name))


@plant("attention", "sink")
def attention_sink(w: World) -> Log:
    name = _attention("sunk", sink=True)
    return _sampler(w, load(w.folder, torch.bfloat16, attn_implementation=name))


@plant("attention", "rotary")
def rope_scaling_and_theta_lost(w: World) -> Log:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return _sampler(w, load(w.folder, torch.bfloat16, rope_parameters=rope))


@plant("attention", "positions")
def a_gap_in_positions(w: World) -> Log:
    return _sampler(w, position_gap=int(w.rng.integers(3, 12)))


# --- composed ---


@plant("composed", "weights quantised", "another temperature")
def fp8_and_temperature(w: World) -> Log:
    model = changed(w.fp32, quantised("fp8", "tensor")).bfloat16()
    return _sampler(w, model, replace(USUAL, temperature=w.uniform(0.9, 1.1)))


@plant("composed", "repetition", "penalties", "base")
def penalty_and_base_ten(w: World) -> Log:
    lines = w.drawn(replace(USUAL, repetition=w.uniform(1.1, 1.2)))
    lines = [replace(x, sampler=np.float32(x.sampler / np.log(10.0))) for x in lines]
    return Log(with_trainer(lines, scored(w.fp32, lines, USUAL)), USUAL)


@plant("composed", "another checkpoint", "drew with top-p")
def stale_and_top_p(w: World) -> Log:
    drawn = replace(USUAL, top_p=w.uniform(0.85, 0.95))
    return _sampler(w, load(w.old, torch.bfloat16), drawn, options={"checkpoints": (str(w.old),)})
