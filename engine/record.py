"""What the loop writes to the run's ledger (verify/ledger.py): which settings decide bits, and the hash of each quantity of a step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.weights import fingerprint
from ..verify.divergence import compare_lines
from ..verify.environment import environment
from ..verify.files import hash_json
from ..verify.ledger import Head, Ledger, LedgerFile, Line, Tree, digest, digest_ids, hash_tree
from .config import Config
from .learner import Learner
from .ranks import Ranks
from .rollout import Rollout
from .tasks.base import Problem

# The head's setting that stands for the frozen reference.
REFERENCE = "loss.reference"
# Keys of the configuration that decide no bit of the training, and why. They are not chained, and a resumed run may change them.
FREE = {
    "micro_batch": "sequences of one pass; the law",
    "threads": "the law",
    "workers": "the law",
    "native": "the sampler's limits; the law",
    "vllm": "the sampler's limits; the law",
    "sampler": "native and vllm draw the same tokens (is_free: others do not)",
    "exact": "decides whether a run stops, not what it computes (is_free: vllm-stock draws otherwise)",
    "evaluation": "reads the weights, with random numbers of its own",
    "checkpoint": "what is kept",
    "ledger.detail": "what is kept; the roots are the same",
    "loss.preset": "a name for the choices, which are chained one by one",
    "model": "a place; the architecture and the weights that lie there are chained instead",
    REFERENCE: "a place; the weights that lie there are chained instead",
}
# The scale of the loss leaves no trace in the bits unless a gradient over- or underflows, which the gradient's hash shows. So it is not
# chained either; but a resumed run goes on with the scale it had.
_SCALE = tuple(f"precision.{key}" for key in ("scaling", "scale", "growth_interval", "backoff", "minimum", "maximum"))


def flat_settings(config: Config) -> dict[str, Any]:
    """Every key of the configuration with its value, the loss resolved."""
    flat: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping) and f"{prefix}{name}" not in ("task.options", "vllm.engine"):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    walk(config.model_dump(mode="json") | {"loss": config.loss.resolve().model_dump(mode="json")}, "")
    return flat


def is_free(key: str, config: Config) -> bool:
    """Whether a key decides no bit. The number of steps decides bits through the schedule of the learning rate only."""
    if key == "steps":
        return config.optimizer.schedule == "constant"
    if key == "sampler":
        return config.sampler in ("native", "vllm")
    if key == "exact":  # vLLM's own model is drawn from with the run's keys when exact, with its own random numbers else
        return config.sampler != "vllm-stock"
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def binding(config: Config) -> dict[str, Any]:
    """The settings that decide bits, which the ledger chains."""
    return {key: value for key, value in flat_settings(config).items() if not is_free(key, config) and key not in _SCALE}


class _Scorer(Protocol):
    decoder: Decoder


class _State(Protocol):
    """What the ledger reads of a TrainState."""

    config: Config
    policy: Decoder
    learner: Learner
    reference: "_Scorer | None"
    problems: Sequence[Problem]
    prompt_ids: Sequence[Sequence[int]]
    step: int


def run_head(state: _State, process: Mapping[str, Any]) -> Head:
    """The head of the ledger of a run that has not taken a step. `process`: how this process is set up."""
    config = state.config
    settings = binding(config)
    settings |= {f"model.{name}": value for name, value in _architecture(state.policy.config).items()}
    free = {key: value for key, value in flat_settings(config).items() if key not in settings}
    tree = state.learner.hash_weights()
    data = hash_json([digest_ids(state.prompt_ids), [[p.id, p.prompt, repr(p.answer)] for p in state.problems]])
    where = environment(Path(__file__).parents[1], state.policy.flat.device, {**process, "threads": torch.get_num_threads()})
    where |= {f"process.{key}": value for key, value in free.items()}
    names = list(state.policy.layout.checkpoint_views(state.policy.flat))
    return Head(settings | {REFERENCE: _reference(state)}, config.seed, data, tree.root, names, tree.leaves, where)


def _architecture(config: ModelConfig) -> dict[str, Any]:
    """What of a model's config.json decides bits. The length of its context does not: it only limits."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.compare and f.name != "max_positions"}


def _reference(state: _State) -> str:
    """The hash of the frozen reference, empty where the loss has none. Its weights in the compute dtype are all that is read of them."""
    if state.reference is None:
        return ""
    decoder = state.reference.decoder
    return f"sha256:{hash_json([_architecture(decoder.config), fingerprint(decoder.layout, decoder.flat.detach())])}"


class Recorder:
    """Writes the ledger of a run, step by step. With `found`, goes on from a ledger that was read."""

    def __init__(self, path: Path | None, head: Head, config: Config, found: LedgerFile | None = None):
        self.head, self.ledger = head, Ledger(path, head, found)
        self._detail, self._state_every = config.ledger.detail, config.ledger.state_every
        self._updates: dict[str, str] = {}
        self._leaves: dict[str, list[str]] = {}
        self._scales: list[float] = []
        self._seconds = 0.0
        self.listener: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # given logp and gradient of each update

    @contextmanager
    def updating(self, learner: Learner, logp: torch.Tensor, gradient: torch.Tensor, scale: float = 1.0) -> Iterator[None]:
        """Around each update of a step: the trainer's logp [C] and the gradient of the loss times `scale`, as the learner takes it.

        The gradient is hashed beside the update.
        """
        began, n = time.perf_counter(), len(self._scales)
        self._scales.append(scale)
        suffix = f".{n}" if n else ""
        self._updates[f"trainer_logprobs{suffix}"] = digest(logp)
        # A power of two leaves no trace in the bits, so runs at different loss scales have one ledger.
        gradient = gradient if scale == 1.0 else gradient / scale
        hashing = learner.slices.hashing(gradient)
        self._seconds += time.perf_counter() - began
        yield
        began = time.perf_counter()
        self._keep(self._updates, f"gradient{suffix}", learner.slices.hash_tree(hashing))
        self._seconds += time.perf_counter() - began
        if self.listener:
            self.listener(logp, gradient)

    def record(self, state: _State, rollouts: Sequence[Rollout], rewards: np.ndarray, A: np.ndarray) -> float:
        """The end of a step: write its line. Returns the seconds that all of the step's hashing took."""
        began, step = time.perf_counter(), state.step
        trainer = [(name, h) for name, h in self._updates.items() if name == "trainer_logprobs"]
        quantities = {
            "prompts": digest_ids([r.prompt_ids for r in rollouts]),
            "tokens": digest_ids([r.completion_ids for r in rollouts]),
            "sampler_logprobs": digest(np.concatenate([r.logprobs for r in rollouts])),
            **dict(trainer),
            "rewards": digest(rewards),
            "advantages": digest(A),
            **{name: h for name, h in self._updates.items() if name != "trainer_logprobs"},
        }
        if (step + 1) % self._state_every == 0:
            self._state(quantities, state)
        keys = {"seed": state.config.seed, "step": step}
        self.ledger.append(Line(step, keys, quantities, self._leaves, {"loss_scale": self._scales}))
        seconds = self._seconds + time.perf_counter() - began
        self._updates, self._leaves, self._scales, self._seconds = {}, {}, [], 0.0
        return seconds

    def _state(self, quantities: dict[str, str], state: _State) -> None:
        learner = state.learner
        self._keep(quantities, "optimizer", learner.slices.hash_tree(learner.slices.hashing(*learner.moments)))
        self._keep(quantities, "weights", learner.hash_weights())
        if not learner.in_place:
            self._keep(quantities, "compute_weights", hash_tree(learner.layout.checkpoint_views(state.policy.flat)))

    def _keep(self, quantities: dict[str, str], name: str, tree: Tree) -> None:
        quantities[name] = tree.root
        if self._detail == "full" or (self._detail == "gradients" and name.startswith("gradient")):
            self._leaves[name] = tree.leaves

    def check_ranks(self, ranks: Ranks) -> None:
        """Compare the step's line over all ranks. Raises ChildProcessError naming rank and quantity: their states have parted."""
        if ranks.size == 1:
            return
        line = self.ledger.last
        chains = ranks.gather(lambda: line.chain)
        if len(set(chains)) > 1:
            every = ranks.gather(lambda: line)
            rank = next(r for r, chain in enumerate(chains) if chain != chains[0])
            raise ChildProcessError(f"rank {rank} has other bits than rank 0: {compare_lines(self.head, every[0], every[rank])}")

    def close(self) -> None:
        """Close the file."""
        self.ledger.close()
