"""The recorder on TRL's real GRPOTrainer: what it writes, and that the run does not notice it."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from zerokl.audit.formats.registry import read_rollouts
from zerokl.cli import main
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.integrations.trl import record
from zerokl.kernels.sampling_params import SamplingParams

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
STEPS, P, G = 3, 2, 4


def write_model(folder: Path, dropout: float) -> Path:
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=len(tokenizer),
        attention_dropout=dropout,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 0.0)


def train(model: Path, out: Path, log: Path | None = None, **options) -> GRPOTrainer:
    set_seed(7)
    settings = dict(
        output_dir=str(out),
        per_device_train_batch_size=P * G,
        num_generations=G,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=1e-2,
        temperature=0.7,
        report_to=[],
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        str(model),
        lambda completions, **_: [float(sum(c.isdigit() for c in text)) for text in completions],
        args=GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": ["1+2=", "17+4=", "3+33=", "2+2="] * 4}),
        processing_class=character_tokenizer(),
    )
    if log:
        record(trainer, log)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def log(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(model, folder / "out", folder / "log.jsonl")
    return folder / "log.jsonl"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[GRPOTrainer, GRPOTrainer]:
    """A run without and one with the recorder. With dropout, one forward too many moves the generator."""
    folder = tmp_path_factory.mktemp("pair")
    model = write_model(folder / "model", 0.1)
    return train(model, folder / "plain"), train(model, folder / "recorded", folder / "log.jsonl")


def test_the_run_is_the_same_with_and_without_the_recorder(pair, tmp_path):
    plain, recorded = pair
    for (name, a), (_, b) in zip(
        plain.model.state_dict().items(), recorded.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    timed = ("time", "runtime", "per_second")
    histories = [
        [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in t.state.log_history]
        for t in (plain, recorded)
    ]
    assert histories[0] == histories[1]
    states = [Path(t.args.output_dir) / f"checkpoint-{STEPS}" / "trainer_state.json" for t in pair]
    assert main(["diff", *map(str, states)]) == 0


def test_control_a_draw_too_many_is_seen(pair, tmp_path, monkeypatch):
    """Without its care for the random generator, the recorder would change this run."""
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    model = Path(pair[0].args.output_dir).parent / "model"
    changed = train(model, tmp_path / "changed", tmp_path / "log.jsonl")
    states = [t.model.state_dict().values() for t in (pair[0], changed)]
    assert any(not torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_every_completion_is_a_line_with_both_columns(log):
    rollouts = [rollout for _, rollout in read_rollouts(log)]
    assert len(rollouts) == STEPS * P * G
    for index, rollout in enumerate(rollouts):
        assert rollout.step == index // (P * G)
        assert rollout.weight_span == (rollout.step, rollout.step)
        assert (rollout.prompt, rollout.sample) == (index % (P * G) // G, index % G)
        assert rollout.sampling_params == SamplingParams(0.7)
        assert not np.isnan(rollout.logprobs).any()
        assert not np.isnan(rollout.trainer_logprobs).any()
    groups = [rollouts[i : i + G] for i in range(0, len(rollouts), G)]
    assert all(len({r.prompt_ids for r in group}) == 1 for group in groups)
    for group in groups:  # TRL's advantage is the reward minus the mean of its group, scaled
        centred = np.array([r.reward for r in group]) - np.mean([r.reward for r in group])
        assert (np.sign(centred) == np.sign(np.round([r.advantage for r in group], 6))).all()


def test_the_sampling_logprobs_are_those_of_the_weights_of_their_step(log, model, tmp_path):
    words = ["audit", str(log), "--model", str(model), "--dtype", "float32", "--trainer", "hf"]

    def largest(version: int) -> float:
        out = tmp_path / str(version)
        assert main([*words, "--weight_version", str(version), "--out", str(out)]) in (0, 1)
        report = json.loads((out / "audit.json").read_text())
        assert report["logged"] == P * G
        return report["max_abs"]

    # fp32 keeps 7 digits; the padded batch and the cache of generate cost at most two of them.
    assert largest(0) < 1e-4 < 1e-2 < largest(2)


def test_the_columns_are_compared_without_a_model(log, tmp_path):
    assert main(["audit", str(log), "--out", str(tmp_path / "out"), "--band", "strict"]) == 0
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert 0 < report["max_abs"] < 1e-4
    assert [row["weight_version"] for row in report["by_version"]] == [0, 1, 2]


def test_an_equal_run_has_an_equal_log(log, model, tmp_path, capsys):
    train(model, tmp_path / "again", tmp_path / "again.jsonl")
    assert main(["diff", str(log), str(tmp_path / "again.jsonl")]) == 0
    train(model, tmp_path / "other", tmp_path / "other.jsonl", learning_rate=2e-2)
    capsys.readouterr()
    assert main(["diff", str(log), str(tmp_path / "other.jsonl")]) == 1
    assert "at step 1" in capsys.readouterr().out


def test_trls_own_files_are_compared_and_not_audited(model, tmp_path, capsys):
    folder = tmp_path / "completions"
    train(model, folder, log_completions=True, max_steps=1)
    (parquet,) = folder.rglob("*.parquet")
    assert main(["diff", str(parquet), str(parquet)]) == 0
    assert main(["audit", str(parquet), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "row 1: holds text and no token ids; record the run with zerokl.integrations.trl.record" in error


def test_another_trainer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="object is no GRPOTrainer"):
        record(object(), tmp_path / "log.jsonl")
    assert not (tmp_path / "log.jsonl").exists()
