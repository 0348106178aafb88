"""A sampler with a key-value cache and a trainer without one, both of transformers, and faults for either.

A fault is a changed model (weights, configuration, cache, attention) or other settings of the distribution.
Shapes: B completions at once, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ...engines.hf import cache_argument

END_ID = 1
Store = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Settings:
    """The distribution that tokens are drawn from."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    softcap: float = 0.0
    padded: int = 0  # further columns of logit 0 in the sum

    def named(self) -> dict[str, Any]:
        """As a line of a log says them."""
        words = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        bias = {"logit_bias": {str(i): x for i, x in self.bias}} if self.bias else {}
        return words | {"min_p": self.min_p} | bias


@dataclass
class Line:
    """A completion: its ids, and both columns."""

    prompt: list[int]
    completion: list[int]
    sampler: np.ndarray
    trainer: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def with_numbers(self, numbers: Sequence[float]) -> "Line":
        """The line with other numbers of the sampler."""
        return replace(self, sampler=np.float32(numbers))


def _seen(ids: Sequence[int], V: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(list(ids), dtype=torch.long), minlength=V).float()


def distribution(
    logits: torch.Tensor, s: Settings, prompt: Sequence[int] = (), drawn: Sequence[int] = ()
) -> torch.Tensor:
    """log-probabilities [V] fp32 of one place, in vLLM's order: penalties, bias, temperature, filters."""
    z = logits.float().clone()
    if s.softcap:
        z = s.softcap * torch.tanh(z / s.softcap)
    if s.repetition != 1.0:
        known = (_seen(prompt, len(z)) + _seen(drawn, len(z))) > 0
        z = torch.where(known, torch.where(z > 0, z / s.repetition, z * s.repetition), z)
    if s.presence or s.frequency:
        counts = _seen(drawn, len(z))
        z = z - s.frequency * counts - s.presence * (counts > 0)
    for token, value in s.bias:
        z[token] += value
    if s.temperature == 0.0:
        return torch.log_softmax(z, -1)
    logp = torch.log_softmax(torch.cat([z, torch.zeros(s.padded)]) / s.temperature, -1)[: len(z)]
    order = logp.argsort(descending=True)
    keep = torch.ones(len(z), dtype=torch.bool)
    if s.top_k:
        keep[order[s.top_k :]] = False
    if s.top_p < 1.0:
        before = torch.log_softmax(logp.masked_fill(~keep, -torch.inf), -1)[order].exp().cumsum(0)
        keep[order[1:][before[:-1] >= s.top_p]] = False
    if s.min_p:
        keep &= logp >= logp.max() + np.log(s.min_p)
    return logp if keep.all() else torch.log_softmax(logp.masked_fill(~keep, -torch.inf), -1)


def load(folder, dtype=torch.float32, **config):
    """The model of a folder. config: fields that differ from the folder's."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config).eval()


def changed(model, change: Change):
    """A copy with changed weights. change: of a name and a weight, None leaves it."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, w in model.named_parameters():
            if (new := change(name, w)) is not None:
                w.copy_(new)
    return model


class AlteredCache(DynamicCache):
    """A cache whose keys and values pass through a function before they are stored, or are lost.

    store: of keys or values, and of the largest of them in the layer's first tokens, those of the prompts.
    """

    def __init__(self, config, store: Store | None = None, window: int = 0):
        super().__init__(config=config)
        self._store, self._window = store, window
        self._largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if self._store:
            largest_key, largest_value = self._largest.setdefault(
                layer_idx, (keys.abs().max(), values.abs().max())
            )
            keys, values = self._store(keys, largest_key), self._store(values, largest_value)
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        if self._window and keys.shape[2] > self._window:
            return keys[:, :, -self._window :], values[:, :, -self._window :]
        return keys, values


@torch.no_grad()
def draw(
    model,
    prompts: Sequence[list[int]],
    each: int,
    drawn_with: Settings,
    seed: int = 0,
    most: int = 80,
    cache: Callable[[Any], DynamicCache] = lambda config: DynamicCache(config=config),
    reported: Settings | None = None,
    generators: Callable[[int, int], np.random.Generator] | None = None,
    position_gap: int = 0,
    prefix_of=None,
) -> list[Line]:
    """Draw `each` completions of each prompt, token by token through the cache, in the model's dtype.

    Prompts of one length are one batch. reported: the settings of the logged numbers, by default those that
    were drawn with. generators: of a prompt and a sample, where streams are shared. position_gap: added to
    the positions of the completion. prefix_of: a model that fills the cache with the prompts, but for their
    last tokens.
    """
    make = generators or (lambda p, s: np.random.default_rng((seed, p, s)))
    drawing = [
        _Drawing(prompt, make(p, s), drawn_with, reported)
        for p, prompt in enumerate(prompts)
        for s in range(each)
    ]
    for length in dict.fromkeys(map(len, prompts)):
        batch = [x for x in drawing if len(x.prompt) == length]
        memory = cache_argument(model, cache(model.config))
        prompts = torch.tensor([x.prompt for x in batch])
        if prefix_of is not None:
            prefix_of(prompts[:, :-1], use_cache=True, **memory)
            prompts, place = prompts[:, -1:], torch.full((len(batch), 1), length - 1)
            rows = model(prompts, use_cache=True, position_ids=place, **memory).logits
        else:
            rows = model(prompts, use_cache=True, **memory).logits
        for step in range(most):
            shown = reported or drawn_with
            for x, row, plain in zip(batch, rows[:, -1], _plain(rows[:, -1], drawn_with, shown), strict=True):
                x.take(row, plain)
            if all(x.ended for x in batch) or step == most - 1:
                break
            place = torch.full((len(batch), 1), length + step + position_gap)
            last = torch.tensor([[x.ids[-1]] for x in batch])
            rows = model(last, use_cache=True, position_ids=place, **memory).logits
    return [Line(x.prompt, x.ids, np.float32(x.numbers)) for x in drawing]


def _plain(rows: torch.Tensor, *all_settings: Settings) -> Sequence[torch.Tensor | None]:
    """The distributions of logits [B, V], all at once; None for settings with more than a temperature."""
    s = all_settings[0]
    if s.temperature == 0.0 or any(x != Settings(s.temperature) for x in all_settings):
        return [None] * len(rows)
    return list(torch.log_softmax(rows.float() / s.temperature, -1))


@dataclass
class _Drawing:
    """One completion while it is drawn."""

    prompt: list[int]
    stream: np.random.Generator
    settings: Settings
    reported: Settings | None
    ids: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the end token was drawn."""
        return bool(self.ids) and self.ids[-1] == END_ID

    def take(self, row: torch.Tensor, plain: torch.Tensor | None) -> None:
        """Draw the next token from logits [V]. plain: their distribution, where it needs no history."""
        if self.ended:
            return
        logp = distribution(row, self.settings, self.prompt, self.ids) if plain is None else plain
        token = _drawn(logp, self.settings, self.stream)
        if self.reported is not None:
            logp = distribution(row, self.reported, self.prompt, self.ids)
        self.numbers.append(float(logp[token]))
        self.ids.append(token)


def _drawn(logp: torch.Tensor, s: Settings, stream: np.random.Generator) -> int:
    if s.temperature == 0.0:
        return int(logp.argmax())
    u = stream.random()
    return min(int(torch.searchsorted(logp.double().exp().cumsum(0), u)), len(logp) - 1)


@torch.no_grad()
def scored(model, lines: Sequence[Line], s: Settings) -> list[np.ndarray]:
    """The trainer's column of each line: one forward over the whole sequence."""
    columns = []
    for line in lines:
        prompt, completion = line.prompt, line.completion
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        numbers = [
            float((distribution(z, s, prompt, completion[:i]) if plain is None else plain)[token])
            for i, (z, plain, token) in enumerate(zip(logits, _plain(logits, s), completion, strict=True))
        ]
        columns.append(np.float32(numbers))
    return columns


def with_trainer(lines: Sequence[Line], columns: Sequence[np.ndarray]) -> list[Line]:
    """The lines with a trainer's column."""
    return [replace(line, trainer=column) for line, column in zip(lines, columns, strict=True)]


def row(line: Line, s: Settings) -> dict[str, Any]:
    """A line of a log in zerokl's own fields."""

    def numbers(column: np.ndarray) -> list[float | None]:
        return [None if np.isnan(x) else float(x) for x in column]

    columns = {"logprobs": numbers(line.sampler)}
    if line.trainer is not None:
        columns["trainer_logprobs"] = numbers(line.trainer)
    ids = {"prompt_ids": list(line.prompt), "completion_ids": list(line.completion)}
    return ids | columns | s.named() | line.extra
