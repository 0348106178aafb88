"""The engines of a capsule: each is opened alone, draws or scores, and is let go before the next one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...engine.rollout.types import GenerationParams, Rollout
from ...engine.tasks.tokenizer import Tokenizer
from ...kernels.sampling_params import SamplingParams
from ...model.checkpoint import check_weights, resolve_model
from ...model.config import ModelConfig
from ...model.weights import Layout
from ..compare import score
from ..config import AuditConfig
from ..drawing import requests
from ..engines.engine import Engine
from ..engines.engine_settings import machine_settings
from ..engines.make import device_of, library_errors, make_engines
from ..formats.record import LoggedRollout
from .capsule import Drawn


@dataclass(frozen=True)
class Computed:
    """What an engine computed, and its settings."""

    logprobs: list[np.ndarray]  # [C] fp32 of each completion
    settings: dict[str, str]  # "sampler: attention backend" -> value
    completions: list[tuple[int, ...]] | None = None  # the ids, where it drew


def checked_folder(model: str) -> Path:
    """The folder of a model that can compute. Raises ValueError."""
    folder = resolve_model(model)
    check_weights(folder, Layout(ModelConfig.from_file(folder)))
    return folder


@contextmanager
def _opened(cfg: AuditConfig, side: str) -> Iterator[tuple[Engine, dict[str, str]]]:
    """The engine cfg.trainer over cfg.model, and its settings as those of `side`."""
    folder, device = checked_folder(cfg.model), device_of(cfg)
    with library_errors(cfg, "start"):
        _, engine = make_engines(cfg, [folder, folder], device)
    settings = {f"{side}: {name}": str(value) for name, value in engine.settings().items()}
    settings |= {f"machine: {name}": str(value) for name, value in machine_settings(device).items()}
    with library_errors(cfg, "compute"):
        yield engine, settings | {side: engine.name}


def as_sampler(cfg: AuditConfig, name: str) -> AuditConfig:
    """The configuration in which the engine `name` computes alone, in the dtypes of the sampler."""
    dtypes = {"dtype": cfg.dtypes.sampler_dtype, "head_dtype": cfg.dtypes.sampler_head_dtype}
    return cfg.model_copy(update={"trainer": name} | dtypes)


def score_again(cfg: AuditConfig, side: str, rollouts: Sequence[LoggedRollout]) -> Computed:
    """The logprobs that the engine cfg.trainer gives to logged completions.

    Raises ValueError for a completion that the model cannot score.
    """
    model = ModelConfig.from_file(checked_folder(cfg.model))
    pairs = []
    for index, rollout in enumerate(rollouts):
        largest = max(*rollout.prompt_ids, *rollout.completion_ids)
        if largest >= model.vocab_size:
            raise ValueError(
                f"capsule: completion {index} holds the id {largest}, outside the vocabulary of {cfg.model} "
                f"({model.vocab_size})"
            )
        if rollout.sampling_params is None:
            raise ValueError(f"capsule: completion {index} does not say how it was drawn (temperature)")
        one = Rollout.of_one_turn(
            index, 0, rollout.prompt_ids, rollout.completion_ids, rollout.logprobs, "", 0
        )
        pairs.append((one, rollout.sampling_params))
    with _opened(cfg, side) as (engine, settings):
        return Computed(score(engine, pairs), settings)


def draw_again(
    cfg: AuditConfig, drawn: Drawn, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Computed:
    """Draw one completion of each prompt with the engine cfg.trainer, as `drawn` says."""
    generation = GenerationParams(params.check(), 1, drawn.max_tokens, frozenset(drawn.stop_ids))
    with _opened(cfg, "sampler") as (engine, settings):
        rollouts = engine.generate([list(prompt) for prompt in prompts], generation, drawn.seed)
    completions = [tuple(int(token) for token in rollout.completion_ids) for rollout in rollouts]
    return Computed([rollout.logprobs for rollout in rollouts], settings, completions)


def prompts_of(cfg: AuditConfig) -> tuple[list[list[int]], int, list[int]]:
    """The ids of cfg.n prompts, the tokens that may follow, and the ids that end a completion."""
    folder = checked_folder(cfg.model)
    model = ModelConfig.from_file(folder)
    tokenizer = Tokenizer(folder, model.vocab_size)
    prompts, max_tokens = requests(cfg, tokenizer, model.max_positions)
    return [prompts[i % len(prompts)] for i in range(cfg.n)], max_tokens, sorted(tokenizer.stop_ids)
