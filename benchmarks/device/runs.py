"""Training steps of a random model in this process, without a run's folder."""

import gc
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from zerokl.benchmarks.letters import characters
from zerokl.benchmarks.machine import Machine, Row
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.init import random_decoder
from zerokl.engine.runs.ledger_head import run_head
from zerokl.engine.runs.setup import make_state
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.engine.train.ledger_recorder import Recorder
from zerokl.engine.train.step import train_step
from zerokl.files.dtypes import dtype_name
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.decoder import Decoder
from zerokl.model.weights import fingerprint

TASK = "zerokl.benchmarks.letters:Letters"


@dataclass(frozen=True)
class Run:
    """What some steps left behind."""

    steps: list[dict[str, float]]  # the metrics of each step
    fingerprint: str  # of the ledger
    weights: str

    @property
    def tokens(self) -> int:
        """Completion tokens of all steps."""
        return int(sum(m["tokens"] for m in self.steps))

    @property
    def unequal(self) -> int:
        """Tokens whose trainer logprob is not the sampler's."""
        return sum(round(m["tokens"] * (1 - m["mismatch/frac_equal"])) for m in self.steps)

    def beside(self, first: "Run", what: str) -> Iterator[Row]:
        """The rows of a run that repeats `first`: its mismatch, and whether its ledger is another."""
        yield {"what": f"{what}: {self.tokens} tokens, trainer against sampler", "unequal": self.unequal}
        unequal = int((self.fingerprint, self.weights) != (first.fingerprint, first.weights))
        yield {"what": f"{what}: a fingerprint that is not the first run's", "unequal": unequal}


def write_model(
    m: Machine, folder: Path, layers: int, vocab: int, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model of random weights, with the widths of the smallest shape, and a tokenizer of its size."""
    return write_decoder(m.decoder(m.first_shape, layers, vocab, dtype), folder)


def write_preset(preset: str, folder: Path) -> Path:
    """Write a model of one of `zerokl init`'s presets with random weights, and init's tokenizer."""
    tokenizer = character_tokenizer()
    return write_decoder(random_decoder(preset, len(tokenizer), 0), folder, tokenizer)


def write_decoder(decoder: Decoder, folder: Path, tokenizer: Any = None) -> Path:
    """Write a model and a tokenizer, by default one of its size. Returns the folder of the model."""
    tokenizer = tokenizer or character_tokenizer(characters(decoder.config.vocab_size - 3))
    tokenizer.save_pretrained(folder / "tokenizer")
    write_checkpoint(folder / "model", decoder.layout, decoder.flat.detach(), companions=folder / "tokenizer")
    return folder / "model"


def settings(m: Machine, model: Path, dtype: torch.dtype, steps: int) -> dict[str, object]:
    """The settings of a short run, as the configuration has them: 4 prompts x 4 samples."""
    return {
        "model": str(model),
        "device": m.device.type,
        "dtype": dtype_name(dtype),
        "steps": steps,
        "prompts": 4,
        "num_generations": 4,
        "workers": 1,
        "task": {"name": TASK},
        "sampling": {"max_tokens": 8 if m.small else 48},
        "evaluation": {"every": 0},
        "optimizer": {"lr": 1e-3},
        # Room for a cache beside what else is on the GPU.
        "native": {"cache_bytes": 1 << 30},
        "vllm": {"context": 512, "cache_bytes": 1 << 28},
    }


def take_steps(values: Mapping[str, object], cut: bool = True) -> Run:
    """Take all steps of a run (see each_step)."""
    steps = each_step(values, cut)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def each_step(values: Mapping[str, object], cut: bool = True) -> Generator[dict[str, float], None, Run]:
    """Take the steps of a run. Yields the metrics of each as soon as it is done, and returns what they left.

    cut: a completion ends with a stop token; else it has every token. Raises MismatchError where a bit
    differs.
    """
    config = Config.model_validate(values)
    task = load_task(config.task.name, config.task.options)
    with closing(make_state(config, Path(config.model), task, Reward(task.reward))) as state:
        if not cut:
            state.tokenizer.stop_ids = frozenset()
        recorder = Recorder(None, run_head(state, {}), config.ledger, state.optimizer)
        steps = []
        for _ in range(config.steps):
            steps.append(train_step(state, recorder).metrics)
            yield steps[-1]
        weights = fingerprint(state.optimizer.layout, state.optimizer.weights.collect())
        run = Run(steps, recorder.ledger.chain, weights)
    del state
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run
