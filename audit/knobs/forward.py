"""The tokens that knobs are fitted to, and what a model with some knobs gives them.

Shapes: B lines, T tokens of the longest, C completion tokens of one, N those of all lines together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ...kernels.truncation import scaled_logits
from ...model.checkpoint import DTYPES
from ..hypotheses.judgement import FP32, FP32_OF_BF16, MOST
from ..hypotheses.noise import Noise, measured, weight
from ..hypotheses.scorable_lines import Line
from .knob import REFUSALS, Turn, turned
from .prefix import Prefix, recorded

# Tokens that a completion is cut to at least.
_SHORTEST = 16


@dataclass(frozen=True)
class Tokens:
    """Some lines of a log, and the model that scores them. In fp32, with eager attention."""

    model: torch.nn.Module
    lines: Sequence[Line]

    @cached_property
    def logged(self) -> np.ndarray:
        """The column that is explained, [N] fp64; NaN where there is none."""
        return np.concatenate([x.logged for x in self.lines]).astype(np.float64)

    @cached_property
    def base(self) -> np.ndarray:
        """The model's own scores, [N] fp64."""
        return self._recorded[0]

    @cached_property
    def _recorded(self) -> tuple[np.ndarray, Prefix]:
        return recorded(self.model, self._scores)

    @cached_property
    def w(self) -> np.ndarray:
        """The weight of each token (hypotheses/noise.py), [N]."""
        return weight(self.base)

    def scores(self, turns: Sequence[Turn]) -> np.ndarray:
        """The scores with some knobs, [N] fp64. Layers before the first one of them compute nothing."""
        if not turns:
            return self.base
        with self._recorded[1].before(turns), turned(turns):
            return self._scores()

    def noise(self, dtype: str, turns: Sequence[Turn] = ()) -> Noise:
        """What a dtype rounds beside these scores, with some knobs, which may make a rounding larger."""
        narrow = "bfloat16" if dtype == "float32" else dtype
        exact = self.scores(turns)
        try:
            with _in_dtype(self.model, DTYPES[narrow]), turned(turns):
                rounded = self._scores()
        except REFUSALS:
            if not turns:
                raise
            return self.noise(dtype)  # a knob may compute in fp32 alone
        if turns and not np.isfinite(rounded[self.known]).any():
            return self.noise(dtype)  # in fp16 a knob may make all logits infinite
        noise = measured(narrow, [rounded[self.known]], [exact[self.known]])
        return Noise("float32", max(noise.size * FP32_OF_BF16, FP32)) if dtype == "float32" else noise

    @torch.no_grad()
    def _scores(self) -> np.ndarray:
        """The scores of the model as it is, [N] fp64. Logits are of the rows of completion tokens alone."""
        inputs = [[*x.prompt_ids, *x.completion_ids[:-1]] for x in self.lines]
        longest = max(map(len, inputs))
        ids = torch.tensor([[*x, *[0] * (longest - len(x))] for x in inputs], device=self.model.device)
        mask = torch.tensor([[1] * len(x) + [0] * (longest - len(x)) for x in inputs])
        kept = torch.zeros(len(inputs), longest, dtype=torch.bool)
        for row, x, line in zip(kept, inputs, self.lines, strict=True):
            row[len(line.prompt_ids) - 1 : len(x)] = True
        kept = kept.to(ids.device)
        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _m, args: (args[0][kept][None], *args[1:]))
        try:
            logits = self.model(ids, attention_mask=mask.to(ids.device), use_cache=False).logits[0]
        finally:
            handle.remove()
        scores, counts = [], [len(x.completion_ids) for x in self.lines]
        for z, line in zip(logits.split(counts), self.lines, strict=True):
            rows = scaled_logits(z.float(), line.params) if line.params else z.float()
            drawn = torch.tensor(line.completion_ids, device=rows.device).unsqueeze(1)
            scores.append(torch.log_softmax(rows, -1).gather(1, drawn).squeeze(1).cpu().numpy())
        return np.concatenate(scores).astype(np.float64)

    def difference(self, scores: np.ndarray) -> np.ndarray:
        """logged - scores in nats, [N], no larger than MOST; NaN where either is unknown."""
        with np.errstate(invalid="ignore"):
            d = self.logged - scores
        return np.where(np.isfinite(d), np.clip(d, -MOST, MOST), np.nan)

    def gaps(self, scores: np.ndarray) -> np.ndarray:
        """|logged - scores| in nats, [N]: MOST at most, and where a score is no number."""
        with np.errstate(invalid="ignore"):
            d = np.abs(self.logged - scores)
        return np.where(np.isfinite(scores), np.minimum(d, MOST), MOST)

    def left(self, scores: np.ndarray) -> float:
        """The mean difference, over the weight of each token."""
        return float(np.mean((self.gaps(scores) / self.w)[self.known]))

    @cached_property
    def known(self) -> np.ndarray:
        """The tokens that count, [N] bool."""
        return np.isfinite(self.logged) & np.isfinite(self.base)

    def by_line(self, x: np.ndarray) -> list[np.ndarray]:
        """[N] as [C] of each line."""
        return np.split(x, np.cumsum([len(line.completion_ids) for line in self.lines])[:-1])


@contextmanager
def _in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside this context the weights of a model are in a dtype. Its buffers, as those of angles, are not."""
    kept = [(x, x.data) for x in model.parameters()]
    try:
        for x, data in kept:
            x.data = data.to(dtype)
        yield
    finally:
        for x, data in kept:
            x.data = data


def usable(lines: Sequence[Line], most_tokens: int) -> list[Line]:
    """The lines of which some token has both numbers, and whose prompt leaves room within so many tokens."""
    return [
        x
        for x in lines
        if 0 < len(x.prompt_ids) <= most_tokens - _SHORTEST
        and np.isfinite(x.logged.astype(np.float64) - x.scored).any()
    ]


def chosen(lines: Sequence[Line], most_tokens: int) -> list[Line]:
    """Of usable lines those that are fitted: they differ most for their length, up to so many tokens in all.

    A completion is cut where it would be too long: later tokens change no earlier one.
    """
    return _packed(sorted(lines, key=_distance, reverse=True), most_tokens)


def sampled(lines: Sequence[Line], most_tokens: int, batches: int) -> list[list[Line]]:
    """Usable lines by chance, cut as those of `chosen` are: all where so many batches hold them."""
    order, result = [lines[i] for i in np.random.default_rng(0).permutation(len(lines))], []
    while order and len(result) < batches:
        result.append(_packed(order, most_tokens))
        order = order[len(result[-1]) :]
    return result


def _packed(order: Sequence[Line], most_tokens: int) -> list[Line]:
    """The first lines, cut, up to so many tokens in all, those of padding included; one at least."""
    each = max(24, most_tokens // max(4, min(len(order), 16)))
    kept, longest = [], 0
    for line in order:
        line = _cut(line, max(each - len(line.prompt_ids), _SHORTEST))
        longest = max(longest, len(line.prompt_ids) + len(line.completion_ids))
        if kept and (len(kept) + 1) * longest > most_tokens:
            break
        kept.append(line)
    return kept


def _distance(line: Line) -> float:
    with np.errstate(invalid="ignore"):
        d = np.abs(line.logged.astype(np.float64) - line.scored)
    d = np.minimum(d[np.isfinite(d)], 1.0)
    return float(d.mean()) if len(d) else 0.0


def _cut(line: Line, tokens: int) -> Line:
    """The line with so many completion tokens at most."""
    parts = {name: getattr(line, name)[:tokens] for name in ("completion_ids", "logged", "scored")}
    return replace(line, **parts, slack=None if line.slack is None else line.slack[:tokens])
