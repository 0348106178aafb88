"""What a training step reads and changes, and what it leaves behind for reports.

Shapes: P prompts, G generations of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...model.decoder import Decoder
from ..config.run_config import Config
from ..rollout.episodes import EpisodePlayer, Episodes
from ..rollout.older_weights import OlderWeights
from ..rollout.stopwatch import Stopwatch
from ..rollout.types import GenerationParams, Sampler
from ..tasks.base import Problem
from ..tasks.equivalence import Equivalence
from ..tasks.tokenizer import Tokenizer
from .ahead import Ahead
from .loss_scaling import LossScaler
from .losses.advantage import StepAdvantages
from .optimizer import Optimizer
from .parallel.data_parallel import RankedEquivalence, RankedScorer, RankedWorkers
from .parallel.process_group import Ranks
from .parallel.scorer import Scorer
from .parallel.workers import Workers


@dataclass
class TrainState:
    """Everything a step reads and changes.

    It is whole when it is made. A step changes the weights, the optimizer's state and the loss scale in
    place, and counts `step` and `version`.
    """

    config: Config
    policy: Decoder
    optimizer: Optimizer
    scaler: LossScaler
    sampler: Sampler
    evaluator: Sampler  # draws from the trainer's policy
    # Scores with the trainer's weights at the sampler's version; None where that is always the current one.
    old_policy: Scorer | RankedScorer | None
    parallel: Workers | RankedWorkers
    micro_batch: int  # sequences of one pass
    ref_policy: Scorer | RankedScorer | None  # frozen; None where the loss has none
    critic: Scorer | RankedScorer | None  # scores values with the trainer's weights; None without a critic
    tokenizer: Tokenizer
    player: EpisodePlayer  # plays the episodes, and rewards them
    # Says which completions mean the same; None where the loss does not ask.
    equivalence: Equivalence | RankedEquivalence | None
    problems: Sequence[Problem]  # for training
    # The prompt of each of these problems; empty where only an environment knows it.
    prompt_ids: Sequence[Sequence[int]]
    max_tokens: int  # drawn tokens of a rollout at most
    stopwatch: Stopwatch  # measures the stations of a step; the samplers have the same one
    # Of the steps before, which a lagged sampler draws with. A checkpoint holds them. None without one.
    older_weights: OlderWeights | None = None
    ahead: Ahead | None = None  # collects coming steps; None where a step collects its own rollouts
    step: int = 0  # steps that are done
    version: int = 0  # of the weights: the number of optimizer updates so far

    @property
    def ranks(self) -> Ranks:
        """The ranks over which the optimizer's state is spread."""
        return self.optimizer.slices.ranks

    @property
    def generation_params(self) -> GenerationParams:
        """How the completions, or the turns, of a training step are drawn."""
        cfg = self.config
        return GenerationParams(
            cfg.sampling.sampling_params,
            cfg.num_generations,
            cfg.sampling.max_tokens,
            self.tokenizer.stop_ids,
            self.compares_experts,
        )

    @property
    def compares_experts(self) -> bool:
        """Whether the sampler names the experts of its tokens: for the monitor, or for a replay of them."""
        cfg = self.config
        asked_for = not cfg.exact or cfg.perturb.routing == "replayed"
        # A CUDA graph of vLLM's calls nobody (rollout/vllm/experts.py).
        in_graphs = cfg.sampler.startswith("vllm-") and cfg.vllm.cuda_graphs
        return bool(self.policy.config.experts) and asked_for and not in_graphs

    def close(self) -> None:
        """End the other processes of this run."""
        for part in (self.sampler, self.old_policy, self.ref_policy, self.parallel):
            if part is not None:
                part.close()


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves behind for reports."""

    metrics: dict[str, float]
    episodes: Episodes  # P prompts x G generations
    advantages: StepAdvantages
    # Of each rollout, with the weights that it was drawn with; None for one that is not trained on. This is
    # None in an exact run: they are the sampler's.
    trainer_logprobs: list[np.ndarray | None] | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # metrics that are not numbers
