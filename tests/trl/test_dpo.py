"""Our DPO loss and gradient beside those of TRL 1.16's DPOTrainer, on the same pairs and models, in fp32."""

import json

import pytest
import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.tasks.tokenizer import character_tokenizer

from tests.engine.runs.exact_runs import first_gradient, first_state
from tests.random_model import TWO_LAYERS, random_model

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{'xyz'[b % 3]}{'no' * (a % 3)}"}
    for a in range(6)
    for b in range(4)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy's folder and the reference's. They differ, so that no margin is 0."""
    folders = [tmp_path_factory.mktemp("models") for _ in range(2)]
    return [random_model(folder, TWO_LAYERS, x) for folder, x in zip(folders, (1.0, 1.3), strict=True)]


def ours(models, folder, beta: float):
    """The rollouts of a step of 12 pairs, the loss of its metric, and its gradient by weight."""
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = {
        "model": str(models[0]),
        "loss.ref_model": str(models[1]),
        "loss.preset": "dpo",
        "loss.beta": str(beta),
        "task.name": "pairs",
        "task.options": {"file": str(folder / "p.jsonl"), "chat": False},
        "prompts": "12",
        "num_generations": "2",
        "workers": "1",
    }
    cfg = load_config(None, None, values)
    with first_state(cfg) as state:
        batch, prepared, gradient = first_gradient(state, cfg)
    return batch.rollouts, prepared.metrics, state.policy.layout.checkpoint_views(gradient)


def trls(models, folder, beta: float, rollouts):
    """TRL's loss and gradients of the same pairs."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    args = DPOConfig(
        output_dir=str(folder / "out"),
        beta=beta,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    from transformers import AutoModelForCausalLM

    trainer = DPOTrainer(
        str(models[0]),
        AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=character_tokenizer(),
    )
    pairs = zip(rollouts[::2], rollouts[1::2], strict=True)
    examples = [
        {
            "prompt_ids": list(chosen.prompt_ids),
            "chosen_ids": list(chosen.completion_ids),
            "rejected_ids": list(rejected.completion_ids),
        }
        for chosen, rejected in pairs
    ]
    trainer.model.eval()
    loss = trainer._compute_loss(trainer.model, DataCollatorForPreference(0)(examples), False)
    loss.backward()
    return loss.item(), {name: w.grad for name, w in trainer.model.named_parameters() if w.grad is not None}


# TRL adds tens of nats in fp32. On a CPU with AVX2 its loss was 5e-7 off.
CLOSE = 1e-6


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_loss_and_gradient_are_trls(models, tmp_path, beta):
    rollouts, metrics, gradient = ours(models, tmp_path, beta)
    loss, trl_gradient = trls(models, tmp_path, beta, rollouts)
    assert metrics["dpo/loss"] == pytest.approx(loss, rel=CLOSE)
    assert abs(metrics["dpo/margin"]) > 0.01, "control: with margins of 0 any beta has the same loss"
    for name, w in trl_gradient.items():
        assert (gradient[name] - w).norm() <= 3e-6 * w.norm(), name


def test_control_another_beta_is_found(models, tmp_path):
    rollouts, metrics, _ = ours(models, tmp_path, 0.1)
    loss, _ = trls(models, tmp_path, 0.101, rollouts)
    assert metrics["dpo/loss"] != pytest.approx(loss, rel=CLOSE)
