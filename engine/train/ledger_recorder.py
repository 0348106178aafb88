"""Writes the run's ledger (verify/ledger.py): the hash of each quantity of a step."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ...files.writing import hash_json
from ...verify.compare_runs import compare_lines
from ...verify.ledger import Head, Ledger, LedgerFile, Line, Tree, digest, digest_ids
from ..config.run_config import LedgerConfig
from ..rollout.episodes import Episodes
from ..rollout.types import Rollout
from .losses.advantage import StepAdvantages
from .optimizer import Optimizer


def hash_rollouts(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """The ledger's hashes of what the sampler gave in a step, in causal order.

    `between_turns` is of what nobody drew after the prompts: for each rollout the starts of its turns, then
    those ids and their places. A step whose rollouts have one turn each has no such hash.
    """
    between = {}
    if any(r.turns > 1 for r in rollouts):
        between["between_turns"] = digest_ids([ids for r in rollouts for ids in _between_turns(r)])
    return {
        "prompts": digest_ids([r.prompt_ids for r in rollouts]),
        "tokens": digest_ids([r.drawn_ids for r in rollouts]),
        **between,
        "sampling_logprobs": digest(np.concatenate([r.logprobs for r in rollouts])),
    }


def _between_turns(rollout: Rollout) -> tuple[Sequence[int], ...]:
    places = np.flatnonzero(~rollout.drawn)[len(rollout.prompt_ids) :].tolist()
    return rollout.turn_starts, [rollout.ids[i] for i in places], places


def hash_ends(episodes: Episodes) -> dict[str, str]:
    """The ledger's hash of how trajectories ended, and of the reward of each turn.

    There is none where no environment was played.
    """
    if episodes.turn_rewards is None:
        return {}
    ends = [r.finish for r in episodes.rollouts]
    return {"ends": hash_json([list(pair) for pair in zip(ends, episodes.turn_rewards, strict=True)])}


def hash_rewards(
    rewards: np.ndarray, A: StepAdvantages, critic: Mapping[str, Sequence[np.ndarray]] | None = None
) -> dict[str, str]:
    """The ledger's hashes of rewards [P, G], of what a critic adds (Shard.critic), and of advantages.

    What is of tokens is hashed one after another; the hash of the tokens has the number of each sample's.
    """
    hashes = {name: digest(np.concatenate(rows)) for name, rows in (critic or {}).items()}
    return {"rewards": digest(rewards), **hashes, "advantages": digest(A.values)}


class Recorder:
    """Writes the ledger of a run, step by step."""

    def __init__(
        self,
        path: Path | None,
        head: Head,
        config: LedgerConfig,
        optimizer: Optimizer,
        previous: LedgerFile | None = None,
    ):
        """path: the ledger's file; None for a ledger in memory only.

        optimizer: its state and weights are hashed. previous: a ledger that was read, to go on from.
        """
        self.head, self.ledger = head, Ledger(path, head, previous)
        self._config, self._optimizer = config, optimizer
        self._updates: dict[str, str] = {}
        self._leaves: dict[str, list[str]] = {}
        self._scales: list[float] = []
        self._seconds = 0.0

    @contextmanager
    def updating(
        self,
        logp: torch.Tensor,
        gradient: torch.Tensor,
        scale: float = 1.0,
        experts: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Record an update of the weights. The update runs inside this context.

        logp [C]: the trainer's. gradient: of the loss times `scale`. Other threads hash the gradient during
        the update, so the update must not change it. experts [C, L, k] (model/routing.py): those that the
        trainer computed each token's row with, token by token in canonical order; None in a dense model.
        """
        began_s, n = time.perf_counter(), len(self._scales)
        self._scales.append(scale)
        suffix = f".{n}" if n else ""
        if experts is not None:
            self._updates[f"experts{suffix}"] = digest(experts)
        self._updates[f"trainer_logprobs{suffix}"] = digest(logp)
        # Division by the scale, a power of two, is exact. So runs at different loss scales have one ledger.
        gradient = gradient if scale == 1.0 else gradient / scale
        slices = self._optimizer.slices
        hashing = slices.hashing(gradient)
        self._seconds += time.perf_counter() - began_s
        yield
        began_s = time.perf_counter()
        self._keep(self._updates, f"gradient{suffix}", slices.hash_tree(hashing))
        self._seconds += time.perf_counter() - began_s

    def record(
        self,
        step: int,
        episodes: Episodes,
        A: StepAdvantages,
        scaler: Mapping[str, float],
        critic: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> float:
        """Write the line of a finished step. Returns the seconds that the step's hashing took.

        A: the advantages. scaler: the state of the loss scaler after the step. critic: see
        Shard.critic.
        """
        began_s = time.perf_counter()
        first_forward = {
            name: h for name, h in self._updates.items() if name in ("experts", "trainer_logprobs")
        }
        quantities = {
            **hash_rollouts(episodes.rollouts),
            **first_forward,
            **hash_ends(episodes),
            **hash_rewards(episodes.rewards, A, critic),
            **{name: h for name, h in self._updates.items() if name not in first_forward},
        }
        if (step + 1) % self._config.state_every == 0:
            self._hash_state(quantities)
        keys = {"seed": self.head.seed, "step": step}
        # By the law the scale decides no bit, so it is not chained. Checkpoints are compared with it.
        notes = {"loss_scale": self._scales, "scaler": dict(scaler)}
        self.ledger.append(Line(step, keys, quantities, self._leaves, self._optimizer.updates, notes))
        seconds = self._seconds + time.perf_counter() - began_s
        self._updates, self._leaves, self._scales, self._seconds = {}, {}, [], 0.0
        return seconds

    def _hash_state(self, quantities: dict[str, str]) -> None:
        """Add the hashes of the optimizer's state and of the weights to `quantities`."""
        optimizer = self._optimizer
        self._keep(quantities, "optimizer", optimizer.hash_moments())
        self._keep(quantities, "weights", optimizer.weights.hash())
        if (tree := optimizer.weights.hash_compute()) is not None:
            self._keep(quantities, "compute_weights", tree)

    def _keep(self, quantities: dict[str, str], name: str, tree: Tree) -> None:
        """Add the root of `tree` to `quantities`, and keep its leaves where ledger.detail asks for them."""
        quantities[name] = tree.root
        detail = self._config.detail
        if not tree.leaves:
            return
        if detail == "full" or (detail == "gradients" and name.startswith("gradient")):
            self._leaves[name] = tree.leaves

    def check_ranks(self) -> None:
        """Compare the step's line in all ranks.

        Raises ChildProcessError, which names a rank and a quantity, where the ranks have different bits.
        """
        ranks = self._optimizer.slices.ranks
        if ranks.size == 1:
            return
        line = self.ledger.last
        chains = ranks.gather(lambda: line.chain)
        if len(set(chains)) > 1:
            lines = ranks.gather(lambda: line)
            rank = next(r for r, chain in enumerate(chains) if chain != chains[0])
            difference = compare_lines(self.head, lines[0], lines[rank])
            raise ChildProcessError(f"rank {rank} has other bits than rank 0: {difference}")

    def close(self) -> None:
        """Close the file."""
        self.ledger.close()
