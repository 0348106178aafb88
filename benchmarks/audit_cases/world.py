"""What a case is planted in: a model, its prompts, and the lines that it draws without a fault."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from sampling import Line, Settings, draw, load, scored, with_trainer
from transformers import AutoTokenizer

# At this temperature a token of both models has about 2.6 nats.
USUAL = Settings(temperature=0.8)


@dataclass(frozen=True)
class Log:
    """What an audit is given: the lines, the settings that they declare, and options of the command."""

    lines: Sequence[Line]
    declared: Settings
    options: dict[str, Any] = field(default_factory=dict)
    with_model: bool = True


@dataclass
class World:
    """One family with one seed. The seed decides prompts, draws and the sizes of faults."""

    family: str
    seed: int
    root: Path
    _drawn: dict = field(default_factory=dict)
    _scored: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = models.make(self.family, self.root / self.family)
        self.old = self.root / f"{self.family}-old"
        self.rng = np.random.default_rng((self.seed, len(self.family)))

    @cached_property
    def tokenizer(self):
        """The model's tokenizer."""
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def fp32(self):
        """The trainer's model."""
        return load(self.folder)

    @cached_property
    def bf16(self):
        """The sampler's model."""
        return load(self.folder, torch.bfloat16)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Six prompts of two lengths."""
        rng, words = random.Random(100 + self.seed), models.text().split(" ")
        of_length: dict[int, list[list[int]]] = {}
        while sum(len(x) >= 3 for x in of_length.values()) < 2:
            prompt = next(iter(models.turn(self.tokenizer, words, rng)))
            of_length.setdefault(len(prompt), []).append(prompt)
        groups = [x[:3] for x in of_length.values() if len(x) >= 3]
        return [prompt for group in zip(*groups, strict=True) for prompt in group]

    def uniform(self, low: float, high: float) -> float:
        """A size of a fault."""
        return float(np.round(self.rng.uniform(low, high), 3))

    def drawn(self, settings: Settings = USUAL, model=None, each: int = 3, **more: Any) -> list[Line]:
        """Completions of the prompts by the bf16 model, or another one."""
        if model is not None or more:
            return draw(model or self.bf16, self.prompts, each, settings, self.seed, **more)
        key = settings, each
        if key not in self._drawn:
            self._drawn[key] = draw(self.bf16, self.prompts, each, settings, self.seed)
        return self._drawn[key]

    def both(self, lines: Sequence[Line], settings: Settings = USUAL, model=None) -> list[Line]:
        """The lines with the column of the fp32 trainer, or of another model. Usual lines are scored once."""
        usual = next((key for key, kept in self._drawn.items() if kept is lines), None)
        if usual is None or model is not None:
            return with_trainer(lines, scored(model or self.fp32, lines, settings))
        if (usual, settings) not in self._scored:
            self._scored[usual, settings] = scored(self.fp32, lines, settings)
        return with_trainer(lines, self._scored[usual, settings])
