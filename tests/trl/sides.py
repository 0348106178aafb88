"""TRL's own trainers with their sources of numbers replaced: what a model and a reward function would say is
drawn by the tests.

From rewards and log-probabilities to advantages, importance ratios and loss it is TRL's code, in torch's
default dtype.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from zerokl.engine.tasks.tokenizer import character_tokenizer


@dataclass
class Step:
    """What a step is made of. rewards [P G]; every other list has each sequence's log-probabilities, [C].

    `masked` sequences are those that `mask_truncated_completions` takes out of the loss.
    """

    rewards: list[float]
    now: list[list[float]]
    old_logprobs: list[list[float]]
    sampling_logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    masked: list[bool]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(x) for x in self.now]


class _Drawn:
    """Replaces generation, the models' forwards and the rewards; everything between is the trainer's."""

    step: Step
    logp: torch.Tensor  # [P G, longest], a leaf: what the loss is differentiated by

    def take(self, step: Step) -> dict[str, Any]:
        """The trainer's inputs of the loss: its advantages, ratios and masks."""
        self.step, self.logp = step, _padded(step.now).requires_grad_()
        self._asked = []
        return self._generate_and_score_completions([{"prompt": "a"}] * len(step.rewards))

    def loss_and_gradient(self, inputs: dict[str, Any]) -> tuple[float, list[list[float]]]:
        """The loss, and its derivative by each log-probability of each sequence."""
        self.logp.grad = None
        loss = self._compute_loss(self.model, inputs)
        loss.backward()
        return loss.item(), [
            row[:n].tolist() for row, n in zip(self.logp.grad, self.step.lengths, strict=True)
        ]

    def _completions(self) -> list[list[int]]:
        stop = self.processing_class.eos_token_id
        return [
            [5] * (n - 1) + [5 if masked else stop]
            for n, masked in zip(self.step.lengths, self.step.masked, strict=True)
        ]

    def _get_per_token_logps_and_entropies(self, model, *_, **__):
        if torch.is_grad_enabled():
            values = self.logp
        else:
            values = _padded(self.step.ref_logprobs if model is self.ref_model else self.step.old_logprobs)
        return values, torch.zeros_like(values), None

    def _calculate_rewards(self, *_, **__) -> torch.Tensor:
        return torch.tensor(self.step.rewards).unsqueeze(1)


def _padded(rows: list[list[float]]) -> torch.Tensor:
    """[rows, longest]; what is behind a sequence's end is masked, and must not be zero for that to show."""
    width = max(map(len, rows))
    return torch.tensor([row + [-3.5] * (width - len(row)) for row in rows])


class DrawnGRPO(_Drawn, GRPOTrainer):
    """GRPOTrainer on drawn numbers."""

    def _generate(self, prompts):
        ids = self._completions()
        return [[3]] * len(ids), ids, None, [""] * len(ids), self.step.sampling_logprobs, {}, None, None


class DrawnRLOO(_Drawn, RLOOTrainer):
    """RLOOTrainer on drawn numbers."""

    def _generate(self, prompts):
        ids = self._completions()
        return [[3]] * len(ids), ids, [""] * len(ids)


def make_trainers(folder: Path) -> tuple[DrawnGRPO, DrawnRLOO]:
    """One trainer of each kind, over a model that is never run. Tests set their options before each step."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    data = Dataset.from_dict({"prompt": ["a"] * 8})
    shared = dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.5,
        mask_truncated_completions=True,
        model_init_kwargs={"dtype": "float32"},
    )
    made = []
    for trainer, options in (
        (DrawnGRPO, GRPOConfig(use_bias_correction_kl=False, **shared)),
        (DrawnRLOO, RLOOConfig(**shared)),
    ):
        made.append(
            trainer(
                str(folder / "model"),
                lambda **_: [],
                args=options,
                train_dataset=data,
                processing_class=tokenizer,
            )
        )
        made[-1].model.train()
        made[-1].current_gradient_accumulation_steps = 1
    return tuple(made)
