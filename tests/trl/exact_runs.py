"""Short runs of TRL's trainers, exact or as they come, for the tests; as a program, one rank of a run.

torchrun --nproc_per_node 2 -m tests.trl.exact_runs MODEL OUT
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, set_seed
from trl import GRPOConfig, RLOOConfig, RLOOTrainer
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.integrations.exact_trl import ExactGRPOTrainer, ExactRLOOTrainer

from tests.model.checkpoints import FAMILIES

STEPS, P, G, TOKENS = 3, 2, 4, 6
MAX = "sampling/sampling_logp_difference/max"


def write_model(folder: Path, family: str = "qwen3") -> Path:
    """A tiny model whose distributions are sharp, so that bf16 shows its rounding. qwen3 is tied."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    config.update(
        dict(
            vocab_size=len(tokenizer),
            # Norms around blocks leave the scaled embedding alone, so its size is the logits'.
            initializer_range=0.1 if family in ("gemma2", "gemma3_text") else 0.3,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(
    trainer_class: type[Trainer],
    model: Path,
    out: Path,
    eval_dataset: Dataset | None = None,
    vllm: VllmConfig | None = None,
    **options: Any,
):
    """A trainer of STEPS steps with P x G completions each. options: of its config; dtype is the model's."""
    set_seed(7)
    settings = dict(
        output_dir=str(out),
        per_device_train_batch_size=P * G,
        num_generations=G,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    settings["model_init_kwargs"] = {"dtype": options.pop("dtype", "float32")}
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    return trainer_class(
        str(model),
        lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=config(**(settings | options)),
        train_dataset=prompts(),
        eval_dataset=eval_dataset,
        processing_class=character_tokenizer(),
        **({"vllm": vllm} if vllm else {}),
    )


def prompts() -> Dataset:
    """Prompts of different lengths, so that TRL pads them."""
    return Dataset.from_dict({"prompt": ["1+2=", "17+4=", "3+33=", "2+2="] * 4})


class _Seen:
    """Keeps what each generation drew, and the hash of the weights that drew it."""

    def _draw(self, *arguments: Any) -> list:
        rollouts = super()._draw(*arguments)
        seen = vars(self).setdefault("seen", [])
        seen.append((self.weights_drawn_with, [(r.prompt, r.sample, r.completion_ids) for r in rollouts]))
        return rollouts


class SeenGRPO(_Seen, ExactGRPOTrainer):
    """ExactGRPOTrainer with `seen`."""


class SeenRLOO(_Seen, ExactRLOOTrainer):
    """ExactRLOOTrainer with `seen`."""


def mismatches(trainer: Trainer, name: str = MAX) -> list[float]:
    """TRL's metric at each step that has it."""
    return [row[name] for row in trainer.state.log_history if name in row]


def main(model: str, out: str) -> None:
    """One rank of a run in which the completions of a prompt lie on two ranks."""
    trainer = make_trainer(SeenGRPO, Path(model), Path(out) / "run", per_device_train_batch_size=G // 2)
    trainer.train()
    rank = trainer.accelerator.process_index
    trainer.policy.sync()
    summary = dict(mismatches=mismatches(trainer), seen=trainer.seen, last=trainer.policy.check_fresh())
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(*sys.argv[1:])
