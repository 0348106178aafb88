"""A model with its tokenizer, for use from Python: sample, score, evaluate."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..kernels.backend import find_device
from ..kernels.logprob import Distribution
from ..kernels.philox import Stream
from ..model.checkpoint import DTYPES, load_decoder, resolve_model
from ..model.config import ModelConfig
from ..model.scoring import logprobs, pack
from ..verify.invariance import Check
from .config import TaskConfig
from .evaluate import Evaluation, evaluate
from .initialise import task_of
from .law import run_checks
from .native import NativeSampler
from .rollout import Keys, Rollout, Sampling
from .tasks import load_reward, load_task, problems_of
from .text import Text


class Policy:
    """A decoder in one dtype, a native sampler over the same weights, and the tokenizer. Make with `load_policy`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | None = None):
        self.folder = folder
        self.text = Text(folder, ModelConfig.from_file(folder).vocab_size)
        self.decoder = load_decoder(folder, dtype, device)
        self.sampler = NativeSampler(self.decoder)

    def sample(
        self, prompts: Sequence[str | Sequence[int]], n: int = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
        max_tokens: int = 64, seed: int = 0, chat: bool = False,
    ) -> list[Rollout]:  # fmt: skip
        """n completions of each prompt (text or token ids), prompt by prompt, each with its tokens' logprobs [C].

        Raises ValueError for a prompt that is empty or too long, or a setting out of range.
        """
        ids = [self.text.encode(p, chat) if isinstance(p, str) else list(p) for p in prompts]
        sampling = Sampling(Distribution(temperature, top_k, top_p), n, max_tokens, self.text.stop_ids)
        return self.sampler.generate(ids, sampling, Keys(seed, 0))

    @torch.no_grad()
    def score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> list[np.ndarray]:
        """The trainer's logprobs [C] fp32 of each (prompt_ids, completion_ids), from one forward over all. Raises ValueError."""
        batch = pack(pairs)
        logp, _ = logprobs(self.decoder, batch, Distribution(temperature, top_k, top_p))
        return [x.numpy() for x in logp.cpu().split(batch.completion_lengths)]

    def evaluate(
        self, task: TaskConfig, split: str = "held_out", problems: int = 256, samples: int = 1, temperature: float = 0.0,
        max_tokens: int = 32, seed: int = 0,
    ) -> Evaluation:  # fmt: skip
        """Rewards [P, G] on a split of a task. A model made by `zerokl init` or trained on the task brings its options along."""
        options = dict(task.options)
        if not options and (found := task_of(self.folder)) and found["task"] == task.name:
            options = found["options"]
        made = load_task(task.name, options)
        if split not in ("train", "held_out"):
            raise ValueError(f"split ({split}) must be train or held_out")
        if problems < 1:
            raise ValueError(f"problems ({problems}) must be at least 1")
        chosen = problems_of(made, task.name, split)[:problems]
        if not chosen:
            raise ValueError(f"task {task.name}: the split {split} has no problems")
        ids = self.text.encode_problems(chosen, made.chat)
        keys = Keys(seed, 0, Stream.EVALUATE)
        reward = load_reward(made, task.reward)
        return evaluate(self.sampler, self.text, chosen, ids, reward, Distribution(temperature), samples, max_tokens, keys)


def load_policy(model: str, dtype: str = "float32", device: str = "auto") -> Policy:
    """Load a model folder or hub name in float32, bfloat16 or float16, on "cpu", "cuda" or where there is a GPU. Raises ValueError."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    return Policy(resolve_model(model), DTYPES[dtype], find_device(device))


def check_law(
    model: str | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    sequences: int = 12,
    longest: int = 80,
    seed: int = 0,
    device: str = "auto",
) -> list[Check]:
    """The law's checks for a model, or a tiny random one: a line each with `comparisons` and `unequal`. Raises ValueError."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    folder = None if model is None else resolve_model(model)
    return list(run_checks(folder, dtypes, sequences, longest, seed, find_device(device)))
