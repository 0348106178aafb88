"""What a fault is planted in: a model of transformers, its prompts, and the lines that it draws.

Nothing of zerokl computes here, so a plant and what judges it share no code.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerFast

from .sampling import AlteredCache, Change, Line, Settings, Store, changed, draw, load, scored, with_trainer

Join = Callable[[list[int], list[int], list[int]], list[int]]  # prompt, completion, question -> second prompt


@dataclass(frozen=True)
class Log:
    """What an audit is given: the lines, the settings that they declare, and options of the command."""

    lines: Sequence[Line]
    declared: Settings
    options: dict[str, Any] = field(default_factory=dict)
    with_model: bool = True


@dataclass(frozen=True)
class Texts:
    """What prompts are cut from, and the words of its chat template."""

    words: list[str]
    user: str
    assistant: str


@dataclass
class World:
    """A model, the same some steps earlier, and prompts. The seed decides draws and the sizes of faults.

    dtype: of the sampler. The trainer is in fp32.
    """

    family: str
    seed: int
    folder: Path
    old: Path
    prompts: list[list[int]]
    texts: Texts
    dtype: torch.dtype = torch.bfloat16
    bos_id: int = 0
    end_id: int = 1
    padding_id: int = 2
    exact: torch.dtype = torch.float32
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    _drawn: dict = field(default_factory=dict)
    _scored: dict = field(default_factory=dict)

    @property
    def raw(self) -> Settings:
        """The model's own distribution."""
        return Settings()

    @property
    def usual(self) -> Settings:
        """At this temperature a token of the benchmark's models has about 2.6 nats."""
        return Settings(temperature=0.8)

    def begin(self, case: str) -> None:
        """Sizes depend on the seed and the case alone, not on which cases came before."""
        self.rng = np.random.default_rng((self.seed, *map(ord, case)))

    # --- models ---

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer."""
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def fp32(self) -> torch.nn.Module:
        """The trainer's model."""
        return load(self.folder)

    @cached_property
    def bf16(self) -> torch.nn.Module:
        """The sampler's model, in its dtype."""
        return load(self.folder, self.dtype)

    def model(
        self, folder: Path | None = None, dtype: torch.dtype | None = None, **config: Any
    ) -> torch.nn.Module:
        """A model in the sampler's dtype, or another one. config: fields that differ from the folder's."""
        return load(folder or self.folder, dtype or self.dtype, **config)

    def changed(self, change: Change, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """The model with changed weights. change: of a name and a weight, None leaves it."""
        return changed(self.fp32, change).to(dtype or self.dtype)

    def parameters(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a folder in fp32."""
        return dict(load(folder).named_parameters())

    def with_attention(self, name: str, attend: Callable) -> torch.nn.Module:
        """The sampler's model with an attention of our own in transformers' registry."""
        AttentionInterface.register(name, attend)
        return self.model(attn_implementation=name)

    def cache(self, store: Store | None = None, window: int = 0) -> Callable:
        """A cache whose keys and values pass through a function, or are lost outside of a window."""
        return lambda config: AlteredCache(config, store, window)

    def copy(self, name: str) -> Path:
        """A copy of the model's folder, beside it."""
        return shutil.copytree(
            self.folder, self.folder.with_name(f"{self.folder.name}-{name}"), dirs_exist_ok=True
        )

    @property
    def with_old(self) -> dict[str, Any]:
        """The options that name the earlier checkpoint."""
        return {"checkpoints": (str(self.old),)}

    # --- logs ---

    def uniform(self, low: float, high: float) -> float:
        """A size of a fault."""
        return float(np.round(self.rng.uniform(low, high), 3))

    def drawn(self, settings: Settings | None = None, model=None, each: int = 3, **more: Any) -> list[Line]:
        """Completions of the prompts by the sampler's model, or another one."""
        settings = settings or self.usual
        if model is not None or more:
            return draw(model or self.bf16, self.prompts, each, settings, self.seed, **more)
        key = settings, each
        if key not in self._drawn:
            self._drawn[key] = draw(self.bf16, self.prompts, each, settings, self.seed)
        return self._drawn[key]

    draw = staticmethod(draw)

    def scored(self, model: torch.nn.Module, lines: Sequence[Line], settings: Settings | None = None):
        """The numbers of the lines by a model, [C] of each."""
        return scored(model, lines, settings or self.usual)

    def both(self, lines: Sequence[Line], settings: Settings | None = None, model=None) -> list[Line]:
        """The lines with the column of the trainer, or of another model. Usual lines are scored once."""
        settings = settings or self.usual
        usual = next((key for key, kept in self._drawn.items() if kept is lines), None)
        if usual is None or model is not None:
            return with_trainer(lines, scored(model or self.fp32, lines, settings))
        if (usual, settings) not in self._scored:
            self._scored[usual, settings] = scored(self.fp32, lines, settings)
        return with_trainer(lines, self._scored[usual, settings])

    def log(
        self,
        lines: Sequence[Line],
        declared: Settings | None = None,
        options: dict[str, Any] | None = None,
        with_model: bool = True,
    ) -> Log:
        """A log that declares the usual settings, or others."""
        return Log(lines, declared or self.usual, options or {}, with_model)

    def sampler(
        self,
        model: torch.nn.Module | None = None,
        drawn: Settings | None = None,
        declared: Settings | None = None,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> Log:
        """A faulty sampler beside a sound trainer of the declared settings."""
        return self.log(self.both(self.drawn(drawn, model, **more), declared), declared, options)

    def renumbered(self, numbers: Callable[[Line], Sequence[float]]) -> Log:
        """Usual lines with other numbers of the sampler, with and beside the trainer's column."""
        lines = self.both(self.drawn())
        return self.log([x.with_numbers(numbers(x)) for x in lines])

    @torch.no_grad()
    def likeliest(self, line: Line) -> np.ndarray:
        """The largest log-probability of the sampler at each place, [C]."""
        ids = torch.tensor([[*line.prompt, *line.completion]])
        logits = self.bf16(ids).logits[0, len(line.prompt) - 1 : -1].float() / self.usual.temperature
        return torch.log_softmax(logits, -1).max(-1).values.numpy()

    def rewarded(self, rewards: Sequence[Any], advantages: Sequence[Any] | None = None) -> list[Line]:
        """Usual lines with both columns and a reward each, and an advantage each; three of a prompt."""
        lines = self.both(self.drawn())
        extras = [{"reward": reward} for reward in rewards]
        for extra, advantage in zip(extras, advantages or (), strict=bool(advantages)):
            extra["advantage"] = advantage
        return [replace(line, extra=extra) for line, extra in zip(lines, extras, strict=True)]

    # --- ids ---

    @property
    def opening(self) -> list[int]:
        """The ids of the template's generation prompt."""
        return self.encoded(self.texts.assistant)

    @property
    def newline(self) -> list[int]:
        """The separator after a turn."""
        return self.encoded("\n")

    def encoded(self, text: str) -> list[int]:
        """The ids of a text, without special tokens of the tokenizer's."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def words(self, count: int) -> list[int]:
        """So many ids of the corpus."""
        words = self.texts.words
        start = int(self.rng.integers(len(words) - 9 * count))
        return self.encoded(" ".join(words[start : start + 9 * count]))[:count]

    def split_token(self, ids: list[int]) -> list[int]:
        """The ids with one token as two whose texts are its text: no encoder would give them.

        Ids of single letters alone stay as they are.
        """
        for i, token in enumerate(ids):
            text = self.tokenizer.decode([token])
            for cut in range(1, len(text)):
                parts = self.encoded(text[:cut]) + self.encoded(text[cut:])
                if len(parts) == 2 and self.tokenizer.decode(parts) == text:
                    return [*ids[:i], *parts, *ids[i + 1 :]]
        return ids

    def turns(self, join: Join) -> list[tuple[Line, Line]]:
        """Conversations of two turns. join: of prompt, completion and question -> the second prompt."""
        rng, words = random.Random(self.seed), self.texts.words
        pairs = []
        for i, first in enumerate(self.both(self.drawn()[::2])):
            start = rng.randrange(len(words) - 9)
            asked = f"{self.texts.user}{' '.join(words[start : start + 4])}\n{self.texts.assistant}"
            prompt = join(first.prompt, first.completion, self.encoded(asked))
            second = draw(self.bf16, [prompt], 1, self.usual, self.seed + 50 + i, most=40)
            pairs.append((first, *self.both(second)))
        return pairs

    def conversations(self, join: Join) -> Log:
        """A log of conversations of two turns."""
        return self.log(as_lines(self.turns(join)))


def as_lines(pairs: Sequence[tuple[Line, Line]]) -> list[Line]:
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
