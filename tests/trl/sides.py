"""TRL's own trainers, with drawn numbers in place of the results of models and of a reward function.

The tests draw these numbers. TRL's code goes from rewards and log-probabilities to advantages, importance
ratios and loss, in torch's default dtype.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from zerokl.engine.tasks.tokenizer import character_tokenizer


@dataclass
class Step:
    """The drawn numbers of a step.

    rewards [P G]. A list of lists holds the log-probabilities [C] of each sequence. `masked` marks the
    sequences that `mask_truncated_completions` takes out of the loss.
    """

    rewards: list[float]
    logprobs: list[list[float]]
    old_logprobs: list[list[float]]
    sampling_logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    masked: list[bool]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(x) for x in self.logprobs]


class _Drawn:
    """Replaces generation, the forwards of the models and the rewards; the rest is the trainer's code."""

    step: Step
    # [P G, longest]. The loss is differentiated by this leaf.
    logp: torch.Tensor

    def take(self, step: Step) -> dict[str, Any]:
        """The trainer's inputs of the loss: advantages, ratios and masks."""
        self.step, self.logp = step, _padded(step.logprobs).requires_grad_()
        return self._generate_and_score_completions([{"prompt": "a"}] * len(step.rewards))

    def loss_and_gradient(self, inputs: dict[str, Any]) -> tuple[float, list[list[float]]]:
        """The loss, and its derivative by each log-probability of each sequence."""
        self.logp.grad = None
        loss = self._compute_loss(self.model, inputs)
        loss.backward()
        rows = zip(self.logp.grad, self.step.lengths, strict=True)
        return loss.item(), [row[:n].tolist() for row, n in rows]

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
    """[rows, longest]. TRL masks the padding; a padding that is not zero shows a missing mask."""
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


def _write_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A tiny model that is never run."""
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
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_trainers(folder: Path) -> tuple[DrawnGRPO, DrawnRLOO]:
    """One trainer of each kind. Tests set the options of a trainer before each step."""
    tokenizer = character_tokenizer()
    _write_model(folder / "model", tokenizer)
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
    trainers = []
    for trainer_class, options in (
        (DrawnGRPO, GRPOConfig(use_bias_correction_kl=False, **shared)),
        (DrawnRLOO, RLOOConfig(**shared)),
    ):
        trainer = trainer_class(
            str(folder / "model"),
            lambda **_: [],
            args=options,
            train_dataset=data,
            processing_class=tokenizer,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainers.append(trainer)
    return tuple(trainers)
