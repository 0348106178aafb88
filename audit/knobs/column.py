"""The knobs of a column of a log: when they are tried, on which lines, and what is told."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ...engine.display.progress import silent
from ...engine.rollout.hf import load_model
from ...model.weight_files import stored_tensors
from ..hypotheses.evidence import Evidence
from ..hypotheses.judgement import FEWEST_TOKENS, SECOND, TIMES
from ..hypotheses.noise import Noise
from ..hypotheses.scorable_lines import Line
from ..hypotheses.tried import Row, Tried
from .dictionary import meaning
from .forward import Tokens, chosen, sampled, usable
from .free_changes import FEWEST_PROMPTS, Difference, stacked
from .gradients import gradients_of
from .knob import REFUSALS, Turn
from .knob_fit import Fitted
from .module_places import Places, places_of
from .search import Answer, Knobs, leaves_rounding

# Products of a weight and a token in a screening forward and in one of a fit; tokens of these at most.
# Two cores of a CPU take about a second for the first. Where knobs are asked for, so many times the products.
_SCREEN, _FIT = 3e10, 1.2e11
_SCREEN_TOKENS, _FIT_TOKENS, _ASKED = 800, 2000, 16
# Weights times tokens times tokens of their line up to which gradients of single tokens are taken, about as
# long as the swaps, and _ASKED times as many where knobs are asked for; the fewest tokens; and the slopes in
# fp32 that are held at most.
_GRADIENTS, _FEWEST, _SLOPES = 2e12, 128, 1 << 27
# Batches of a fit's size on which its value is checked, of lines by chance.
_CHECKS = 4
# Weights of a model up to which its knobs are tried without being asked for.
_MOST_WEIGHTS = 1e9
# What a library may raise for a model or a machine that it does not take: memory, files, fields, shapes.
_FAILURES = (*REFUSALS, MemoryError, OSError, ImportError)
# Answers and equal knobs that a report lists.
_LISTED = 4
REMEDY = (
    "Compare what the two engines compute there, for the same tokens: the field of the config, the kernel, "
    "or the weights that one of them has."
)


@dataclass
class KnobModel:
    """The model whose knobs are turned, loaded when it is first needed: in fp32, with eager attention."""

    folder: Path
    device: torch.device
    always: bool = False  # whether they are tried though a hypothesis fits
    sampler_dtype: str = ""  # where it was given
    _loaded: list[torch.nn.Module] = field(default_factory=list)

    def weights(self) -> int:
        """How many the files hold, by their headers. Raises ValueError for files that cannot be read."""
        return sum(math.prod(x.part().get_shape()) for x in stored_tensors(self.folder))

    def model(self) -> torch.nn.Module:
        """The model, read once."""
        if not self._loaded:
            model = load_model(self.folder, torch.float32, "eager").to(self.device)
            self._loaded.append(model.requires_grad_(False))
        return self._loaded[0]

    def dtype_of(self, side: str) -> str:
        """The dtype whose rounding a side may leave: the sampler's where it was given, else bf16."""
        return (side == "sampler" and self.sampler_dtype) or "bfloat16"


def with_knobs(
    tried: Tried, evidence: Evidence, knob_model: KnobModel, stage: Callable[[str], None] = silent
) -> Tried:
    """What was tried on a column, and its knobs: where no hypothesis leaves rounding, and where asked for.

    The search is no part of what an audit promises: where a library fails in it, the report says so.
    """
    wanted = knob_model.always or (_leaves_more(tried) and not tried.is_within_rounding)
    if not wanted or not tried.distance or tried.tokens < FEWEST_TOKENS:
        return tried
    stage("trying a number at every operation")
    try:
        return _searched(tried, evidence, knob_model, stage)
    except _FAILURES as error:
        return _untried(tried, _ended(error))


def _ended(error: BaseException) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"the search ended with {type(error).__name__}{reason and f' ({reason})'}"


def _searched(tried: Tried, evidence: Evidence, knob_model: KnobModel, stage: Callable[[str], None]) -> Tried:
    """What was tried, and the knobs, as far as the size of the model and the prompts allow for them."""
    weights, is_asked = knob_model.weights(), knob_model.always
    if weights > _MOST_WEIGHTS and not is_asked:
        limit = f"{_MOST_WEIGHTS:.0e} are the most without --knobs"
        return _untried(tried, f"the model has {weights:.2g} weights, and {limit}")
    share = (_ASKED if is_asked else 1) / weights
    most = min(_FIT_TOKENS, int(_FIT * share))
    if not (lines := usable(evidence.lines, most)):
        asked = " without --knobs" if most < _FIT_TOKENS and not is_asked else ""
        return _untried(tried, f"no prompt leaves room within the {most} tokens of a forward{asked}")
    few = chosen(lines, min(_SCREEN_TOKENS, int(_SCREEN * share)))
    rows, count = _fitted(lines, few, most, evidence.side, knob_model, stage)
    tried = replace(beside_knobs(tried, rows), tried=tried.tried + count)
    if tried.best is not None or tried.is_within_rounding:
        return tried
    stage("looking for the operation that the difference enters at")
    try:
        return _with_entry(tried, lines, most, weights, evidence.side, knob_model)
    except (*REFUSALS, MemoryError) as error:
        return _unplaced(tried, _ended(error))


def _with_entry(
    tried: Tried, lines: Sequence[Line], most: int, weights: int, side: str, knob_model: KnobModel
) -> Tried:
    """What was tried, and where the difference enters, by lines that chance chooses, or why none is told.

    most: tokens of a forward. weights: of the model. Raises what the model raises in a backward.
    """
    work = _GRADIENTS * (_ASKED if knob_model.always else 1) / weights
    kept = _affordable(lines, most, work)
    if few := _too_few(kept, knob_model.always):
        return _unplaced(tried, few)
    model = knob_model.model()
    gradients, by_line, room = gradients_of(model, places_of(model), kept), [], _SLOPES
    while room > 0 and len(by_line) < len(kept):
        by_line.append(gradients.features(kept[len(by_line)]))
        room -= sum(x.size for x in by_line[-1].values())
    kept = kept[: len(by_line)]
    if few := _too_few(kept, asked=True):
        return _unplaced(tried, few)
    features, tokens = stacked(by_line), Tokens(model, kept)
    w = tokens.w.astype(np.float32)[:, None]
    for x in features.values():
        x /= w
    if not features:
        return _unplaced(tried, "no operation of the model gives a row for each token")
    numbers = np.repeat(prompt_numbers(kept), [len(x.completion_ids) for x in kept])
    r = np.where(tokens.known, tokens.difference(tokens.base) / tokens.w, np.nan)
    noise = tokens.noise(knob_model.dtype_of(side)).size
    return replace(tried, entry=Difference(r, numbers, noise).entry(features))


def _affordable(lines: Sequence[Line], most: int, work: float) -> list[Line]:
    """Different lines by chance, within so many tokens times the tokens of their line."""
    kept = []
    for line in _different(sampled(_different(lines), most, 1)[0]):  # some are alike once they are cut
        tokens = len(line.completion_ids)
        if tokens * (len(line.prompt_ids) + tokens) <= work:
            work -= tokens * (len(line.prompt_ids) + tokens)
            kept.append(line)
    return kept


def _different(lines: Sequence[Line]) -> list[Line]:
    """One line of each prompt and completion."""
    return list({x.pair: x for x in reversed(lines)}.values())[::-1]


def prompt_numbers(lines: Sequence[Line]) -> np.ndarray:
    """A number for each line, [L]; the same where a prompt begins with another one, as a later turn does."""
    prompts = sorted({x.prompt_ids for x in lines}, key=len)
    return np.array([next(i for i, p in enumerate(prompts) if x.prompt_ids[: len(p)] == p) for x in lines])


def _too_few(lines: Sequence[Line], asked: bool) -> str:
    """Why these lines tell no place, in words; empty where they may."""
    tokens, prompts = sum(len(x.completion_ids) for x in lines), len(set(prompt_numbers(lines)))
    if tokens >= _FEWEST and prompts >= FEWEST_PROMPTS:
        return ""
    return (
        f"there are {tokens} tokens of {prompts} different prompts within the limits"
        f"{'' if asked else ' without --knobs'}, and {_FEWEST} of {FEWEST_PROMPTS} are the fewest"
    )


def _unplaced(tried: Tried, reason: str) -> Tried:
    return replace(tried, untried=f"No place where the difference enters was looked for: {reason}.")


def _leaves_more(tried: Tried) -> bool:
    """Whether what fits best leaves more than rounding, or nothing fits."""
    return tried.best is None or tried.best.left > TIMES * tried.rounding


def beside_knobs(tried: Tried, knobs: Sequence[Row]) -> Tried:
    """What was tried, and rows of knobs, the nearest first. A knob that fits is the best where none is yet.

    A cause leaves rounding alone. Of a large difference one that is only like it may leave as little as an
    exact one. So it is no cause where a knob fits that leaves clearly less. Both were fitted to tokens of
    their own, so shares of the difference are compared.
    """
    best, others = next((x for x in knobs if x.fits), None), tried.rows
    least = min((x.share_left for x in knobs if x.fits), default=math.inf)
    if tried.best and _leaves_more(tried) and least <= SECOND * tried.best.share_left:
        others = [replace(x, fits=x.fits and least > SECOND * x.share_left) for x in others]
        tried = replace(tried, best=None, also=[])
    rows = sorted([*knobs, *others], key=lambda x: (not x.fits, x.share_left))
    return replace(tried, best=tried.best or best, rows=rows)


def _fitted(
    lines: Sequence[Line],
    few: Sequence[Line],
    most: int,
    side: str,
    knob_model: KnobModel,
    stage: Callable[[str], None],
) -> tuple[list[Row], int]:
    """The rows of the best knobs, and how many were tried. few, most: lines of a screen, tokens of a fit."""
    model = knob_model.model()
    tokens, places = Tokens(model, chosen(lines, most)), places_of(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    noise = partial(tokens.noise, knob_model.dtype_of(side))
    answers, count = Knobs(Tokens(model, few), tokens, places, noise, types, stage).answer()
    stage("trying what was fitted on other lines")
    checks = [Tokens(model, x) for x in sampled(lines, most, _CHECKS)]
    rows = []
    for x in answers[:_LISTED]:
        row = _row(x, tokens, places, side, count)
        rows.append(_checked(row, x, checks, noise(x.fit.turns)) if x.fits else row)
    return rows, count


def _untried(tried: Tried, reason: str) -> Tried:
    return replace(tried, untried=f"No number at an operation was fitted: {reason}.")


def _checked(row: Row, answer: Answer, checks: Sequence[Tokens], noise: Noise) -> Row:
    """The row of an answer that fits some lines: it fits where it leaves rounding in others, too."""
    scored = [(t, t.scores(answer.fit.turns)) for t in checks]
    nearer = sum(_nearer(t, scores) for t, scores in scored)
    total = sum(len(t.lines) for t in checks)
    if leaves_rounding(noise, scored):
        return replace(row, lines=nearer, lines_tried=total)
    what = f"{row.what}; so in {nearer} of {total} lines"
    return replace(row, what=what, lines=nearer, lines_tried=total, fits=False)


def _nearer(tokens: Tokens, scores: np.ndarray) -> int:
    """The lines that some scores come nearer to than the model's own do."""
    gaps = (tokens.by_line(np.abs(tokens.difference(x))) for x in (tokens.base, scores))
    return sum(bool(np.nansum(after) < np.nansum(before)) for before, after in zip(*gaps, strict=True))


def _row(answer: Answer, tokens: Tokens, places: Places, side: str, count: int) -> Row:
    """The row of an answer. The figures are of the lines that were fitted."""
    fit, known = answer.fit, tokens.known
    before, after = (np.abs(tokens.difference(x))[known] for x in (tokens.base, fit.scores))
    distance, left = float(np.nanmean(before)), float(np.nanmean(after))
    return Row(
        name="knob: " + " and ".join(dict.fromkeys(x.knob.name for x in fit.turns)),
        what=words_of(answer, tokens.model.config.get_text_config(), places.lm_head, side),
        remedy=REMEDY,
        distance=distance,
        left=left,
        explained=distance - left,
        share_left=left / distance if distance else 1.0,
        tokens=int(known.sum()),
        lines=_nearer(tokens, fit.scores),
        lines_tried=len(tokens.lines),
        slope=answer.slope,
        errors=answer.errors,
        fits=answer.fits,
        candidates=count,
    )


def words_of(answer: Answer, config: object, lm_head: str, side: str) -> str:
    """The knobs of an answer with their values, what they mean, and the knobs that do the same."""
    turned = "; and ".join(_one(answer.fit, turn, config, lm_head) for turn in answer.fit.turns)
    text = f"the {side} computes with {turned}"
    if answer.alike:
        same = [f"{x.last.knob.words(x.last.value)}{_where(x.last)}" for x in answer.alike[:_LISTED]]
        text += f"; not told from {', or '.join(same)}"
    return text


def _one(fit: Fitted, turn: Turn, config: object, lm_head: str) -> str:
    """A knob of a fit, its layers, and what its value means. The error is of the last one."""
    error = fit.error if turn is fit.last else 0.0
    known = meaning(replace(fit, turns=(turn,), error=error), config, lm_head)
    plus_minus = f" ± {error:.2g}" if error else ""
    return f"{turn.knob.words(turn.value)}{plus_minus}{_where(turn)}{known and f' ({known})'}"


def _where(turn: Turn) -> str:
    """The layers of a knob, as a part of a sentence; empty for what is in no layer."""
    if turn.layers == (-1,) or turn.knob.names_layers:
        return ""
    if turn.is_everywhere:
        return " in all layers"
    if len(turn.layers) == 1:
        return f" in layer {turn.layers[0]}"
    return f" in layers {', '.join(map(str, turn.layers))}"
