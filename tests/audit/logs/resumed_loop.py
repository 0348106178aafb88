"""A training loop of another kind than zerokl's: plain torch, REINFORCE on a small recurrent model.

It logs as anybody would: rollouts by a Recorder, metrics as JSON lines. It can be resumed from its
checkpoint, and each of its states can be left out of the resume alone. Adam is written out, since importing
torch.optim's compiler takes seconds.
"""

import json
import random
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from zerokl.integrations.recorder import Recorder

STATES = ("weights", "optimizer", "loader", "generator", "scheduler", "scaler")
V, P, G, T, PROMPTS = (
    12,
    2,
    3,
    6,
    14,
)  # vocabulary, prompts a step, completions of one, tokens, prompts in all


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(V, 16)
        self.rnn = torch.nn.GRU(16, 16, batch_first=True)
        self.head = torch.nn.Linear(16, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, T, V] of the next token."""
        return self.head(self.rnn(self.embed(ids))[0]).log_softmax(-1)


@dataclass
class Loader:
    """Prompts in an order that is shuffled anew for each epoch."""

    seed: int = 0
    place: int = 0

    def next(self) -> list[int]:
        batch = []
        for i in range(self.place, self.place + P):
            order = list(range(PROMPTS))
            random.Random(f"{self.seed} {i // PROMPTS}").shuffle(order)
            batch.append(order[i % PROMPTS])
        self.place += P
        return batch


@dataclass
class Loop:
    """The states of a run."""

    seed: int = 0
    data_seed: int = 0
    growth: int = 2  # good steps after which the loss scale doubles
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)  # every run begins with the same weights
        self.policy = Policy()
        self.optimizer = {
            "updates": 0,
            "moments": [torch.zeros(2, *w.shape) for w in self.policy.parameters()],
        }
        self.warmed = 0  # the scheduler's step
        self.loader = Loader(self.data_seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.scaler = {"scale": 4.0, "good": 0}

    def state(self) -> dict[str, Any]:
        return {
            "weights": {k: v.clone() for k, v in self.policy.state_dict().items()},
            "optimizer": deepcopy(self.optimizer),
            "loader": self.loader.place,
            "generator": self.generator.get_state(),
            "scheduler": self.warmed,
            "scaler": dict(self.scaler),
        }

    def load(self, state: dict[str, Any], without: tuple[str, ...] = ()) -> None:
        if "weights" not in without:
            self.policy.load_state_dict(state["weights"])
        if "optimizer" not in without:
            self.optimizer = deepcopy(state["optimizer"])
        if "loader" not in without:
            self.loader.place = state["loader"]
        if "generator" not in without:
            self.generator.set_state(state["generator"])
        if "scheduler" not in without:
            self.warmed = state["scheduler"]
        if "scaler" not in without:
            self.scaler = dict(state["scaler"])

    @property
    def rate(self) -> float:
        return 0.05 * min(1.0, 0.2 + 0.08 * self.warmed)

    @torch.no_grad()
    def update(self) -> float:
        """One step of Adam. Returns the norm of the gradient."""
        self.optimizer["updates"] += 1
        corrections = [1 - beta ** self.optimizer["updates"] for beta in (0.9, 0.999)]
        norms = []
        for w, (m, v) in zip(self.policy.parameters(), self.optimizer["moments"], strict=True):
            w.grad /= self.scaler["scale"]  # a power of two: no bit changes
            norms.append(w.grad.norm())
            m.lerp_(w.grad, 0.1)
            v.lerp_(w.grad.square(), 0.001)
            w -= self.rate * (m / corrections[0]) / ((v / corrections[1]).sqrt() + 1e-8)
            w.grad = None
        return torch.stack(norms).norm().item()

    def step(self, number: int, recorder: Recorder) -> dict[str, float]:
        prompts = [[p % V, 3 * p % V, p // V] for p in self.loader.next() for _ in range(G)]
        ids = torch.tensor(prompts)
        with torch.no_grad():
            columns = []
            for _ in range(T):
                logp = self.policy(ids)[:, -1]
                token = torch.multinomial(logp.exp(), 1, generator=self.generator)
                columns.append(logp.gather(1, token))
                ids = torch.cat([ids, token], 1)
        drawn, logprobs = ids[:, 3:], torch.cat(columns, 1)
        rewards = (drawn % 3 == 0).float().mean(1)
        A = rewards - rewards.mean()
        scored = self.policy(ids[:, :-1])[:, 2:].gather(2, drawn[:, :, None])[..., 0]
        loss = -(A[:, None] * scored).mean()
        (loss * self.scaler["scale"]).backward()
        metrics = {
            "step": number,
            "loss": loss.item(),
            "lr": self.rate,
            "loss_scale": self.scaler["scale"],
            "grad_norm": self.update(),
            "time/step_s": random.random(),
        }
        self.warmed += 1
        self.scaler["good"] += 1
        if self.scaler["good"] % self.growth == 0:
            self.scaler["scale"] *= 2
        for i, prompt in enumerate(prompts):
            recorder.record(
                prompt,
                drawn[i],
                logprobs[i],
                trainer_logprobs=scored[i],
                reward=rewards[i].item(),
                step=number,
                prompt=i // G,
                sample=i % G,
            )
        return metrics


def run(loop: Loop, folder: Path, steps: range, save_at: int | None = None) -> dict[str, Any] | None:
    """Do steps, and log them to a folder. Returns the state before step `save_at`."""
    folder.mkdir(exist_ok=True)
    saved = None
    with (
        Recorder(folder / "rollouts.jsonl", temperature=1.0) as recorder,
        open(folder / "metrics.jsonl", "w") as metrics,
    ):
        for number in steps:
            if number == save_at:
                saved = loop.state()
            metrics.write(json.dumps(loop.step(number, recorder)) + "\n")
    return saved
