"""A model with its tokenizer, for use from Python: sample, score, evaluate."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...kernels.backend import find_device
from ...kernels.philox import Stream
from ...kernels.sampling_params import PENALTIES, SamplingParams, refuse_penalties
from ...model.causal_lm import CausalLM
from ...model.checkpoint import DTYPES, load_decoder, resolve_model
from ...model.config import ModelConfig
from ...model.scoring import logprobs, pack
from ..config.precision_section import full_dtype
from ..config.run_config import EnvironmentConfig, TaskConfig
from ..tasks.loading import load_task, problems_of
from ..tasks.perfectible import task_of
from ..tasks.tokenizer import Tokenizer
from .episodes import Episodes
from .given_answers import GivenAnswers
from .native import NativeSampler
from .players import make_player, open_judge, turn_limits
from .types import GenerationParams, RngKey, Rollout, complete


class Policy:
    """A decoder in one dtype, a native sampler with the same weights, and the tokenizer.

    `load_policy` makes one. module: the decoder as a torch module over the same memory (model/causal_lm.py).
    Whoever changes its Parameters in place calls sampler.sync_weights(version) before the next draw.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | None = None):
        self.folder = folder
        self.tokenizer = Tokenizer(folder, ModelConfig.from_file(folder).vocab_size)
        self.decoder = load_decoder(folder, dtype, device)
        self.sampler = NativeSampler(self.decoder)
        self.module = CausalLM.over(self.decoder)
        self.module.companions = folder

    def sample(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        max_tokens: int = 64,
        seed: int = 0,
        chat: bool = False,
        system: str = "",
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        **penalties: float,
    ) -> list[Rollout]:
        """n completions of each prompt, prompt by prompt, each with the logprobs [C] of its C tokens.

        prompts: text or token ids. chat, system: whether texts go through the tokenizer's chat template, and
        the system prompt before them. logit_bias: token id -> what is added to its logit, in nats.
        allowed_token_ids: the only tokens that are drawn; None allows all.

        Raises ValueError for a prompt that is empty or too long, a setting out of range, or a penalty.
        """
        _no_penalty("sample", penalties)
        ids = [self.tokenizer.encode(p, chat, system) if isinstance(p, str) else list(p) for p in prompts]
        generation_params = GenerationParams(
            SamplingParams.of(temperature, top_k, top_p, min_p, logit_bias, allowed_token_ids),
            n,
            max_tokens,
            self.tokenizer.stop_ids,
        )
        return complete(self.sampler, ids, generation_params, RngKey(seed, 0))

    @torch.no_grad()
    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        **penalties: float,
    ) -> list[np.ndarray]:
        """The trainer's logprobs [C] fp32 of each (prompt_ids, completion_ids), from one forward over all.

        The parameters are those of `sample`. A token that they leave out has -inf. Raises ValueError for an
        empty or too long sequence, a setting out of range, or a penalty.
        """
        _no_penalty("score", penalties)
        params = SamplingParams.of(temperature, top_k, top_p, min_p, logit_bias, allowed_token_ids)
        logp, _ = logprobs(self.decoder, batch := pack(pairs), params)
        return [x.numpy() for x in logp.cpu().split(batch.drawn_lengths)]

    def evaluate(
        self,
        task: TaskConfig,
        split: str = "held_out",
        problems: int = 256,
        num_generations: int = 1,
        temperature: float = 0.0,
        max_tokens: int = 32,
        seed: int = 0,
        environment: EnvironmentConfig | None = None,
    ) -> Episodes:
        """Rewards [P, G] on a split of a task.

        Without task.options, a model that `zerokl init` made for the task, or that was trained on it, brings
        its options along. max_tokens: of a completion, or of a turn. environment: how the trajectories of a
        task with an environment are played.
        """
        options = dict(task.options)
        if not options and (model_task := task_of(self.folder)) and model_task["task"] == task.name:
            options = model_task["options"]
        loaded_task = load_task(task.name, options, task.directory)
        if split not in ("train", "held_out"):
            raise ValueError(f"split ({split}) must be train or held_out")
        if problems < 1:
            raise ValueError(f"problems ({problems}) must be at least 1")
        chosen = problems_of(loaded_task, task.name, split, task.directory)[:problems]
        if not chosen:
            raise ValueError(f"task {task.name}: the split {split} has no problems")
        rng_key = RngKey(seed, 0, Stream.EVALUATE)
        generation_params = GenerationParams(
            SamplingParams(temperature), num_generations, max_tokens, self.tokenizer.stop_ids
        )
        task = task.model_copy(update={"options": options})
        environment = environment or EnvironmentConfig()
        context, prefix = self.decoder.config.max_positions, task.answer_prefix
        with open_judge(loaded_task, task, environment) as judge:
            player = make_player(
                loaded_task,
                judge,
                self.tokenizer,
                turn_limits(environment, max_tokens, context),
                environment.render,
                answers=GivenAnswers(prefix, SamplingParams()) if prefix else None,
            )
            player.check(chosen, max_tokens, context)
            return player.play(self.sampler, chosen, generation_params, rng_key)


def _no_penalty(function: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for a penalty that is not off, and TypeError for an unknown option."""
    for name in options.keys() - PENALTIES.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    refuse_penalties(function, options)


def load_policy(model: str, dtype: str = "float32", device: str = "auto") -> Policy:
    """Load a model folder or hub name.

    dtype: float32, bfloat16 or float16; fp32, bf16 and fp16 will do. device: cpu, cuda, or auto, which is a
    GPU where there is one.

    Raises ValueError.
    """
    if (dtype := full_dtype(dtype)) not in DTYPES:
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    return Policy(resolve_model(model), DTYPES[dtype], find_device(device))
