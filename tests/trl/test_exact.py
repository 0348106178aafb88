"""TRL's own trainers over zerokl's kernels: TRL's metric of the mismatch is 0.0 at every generation."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import trl
from transformers import ProcessorMixin
from trl import GRPOTrainer
from zerokl.cli import main
from zerokl.engine.train.monitor import MismatchError
from zerokl.files.bitwise import equal
from zerokl.integrations import exact_trl
from zerokl.integrations.exact_trl import ExactGRPOTrainer, ExactRLOOTrainer
from zerokl.integrations.transformers import ExactModel, StaleWeightsError
from zerokl.integrations.trl import record
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import torchrun
from tests.model.checkpoints import FAMILIES
from tests.trl.exact_runs import (
    MAX,
    STEPS,
    G,
    P,
    SeenGRPO,
    SeenRLOO,
    make_trainer,
    mismatches,
    prompts,
    write_model,
)

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
# TRL's own forward of this release needs Triton on a CPU too.
NO_FORWARD_WITHOUT_TRITON = ("1.15.0",)
HALF = dict(per_device_train_batch_size=P * G // 2)
TRUNCATED = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
CASES = {
    "fp32": {},
    "bf16": dict(dtype="bfloat16"),
    "fp16": dict(dtype="float16"),
    "bf16 over fp32": dict(bf16=True),
    "fp16 over fp32": dict(fp16=True),
    "checkpointing": dict(gradient_checkpointing=True, bf16=True),
    "beta": dict(beta=0.04, bf16=True),
    "accumulation": HALF | dict(gradient_accumulation_steps=2),
    "iterations": dict(num_iterations=2, max_steps=2 * STEPS, learning_rate=1e-1),
    "truncated": TRUNCATED | dict(dtype="bfloat16"),
    "truncated, off-policy": TRUNCATED | dict(num_iterations=2, max_steps=2 * STEPS, learning_rate=1e-1),
    "several batches a generation": HALF | dict(steps_per_generation=2, max_steps=2 * STEPS),
    "completions masked": dict(mask_truncated_completions=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def check_run(trainer) -> None:
    """0.0 at each of STEPS generations, each of which was drawn with the weights of its own step."""
    assert mismatches(trainer) == [0.0] * STEPS
    hashes = [weights for weights, _ in trainer.seen]
    assert len(set(hashes)) == STEPS
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_mismatch_of_grpo_is_zero_at_every_generation(case, model, tmp_path):
    trainer = make_trainer(SeenGRPO, model, tmp_path, **CASES[case])
    trainer.train()
    if case != "completions masked":
        check_run(trainer)
        return
    assert mismatches(trainer) == [0.0] * STEPS
    all_cut = [share == 1.0 for share in mismatches(trainer, "completions/clipped_ratio")]
    assert True in all_cut  # nothing of such a step is trained on
    assert [norm == 0.0 for norm in mismatches(trainer, "grad_norm")] == all_cut


# Families with a buffer beside their Parameters, of which no copy is kept.
WITH_BUFFER = "glm4_moe", "glm4_moe_lite", "deepseek_v3"


def test_a_family_with_a_buffer_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"e_score_correction_bias of a Glm4MoeForCausalLM is a buffer beside"
    ):
        make_trainer(SeenGRPO, write_model(tmp_path / "model", WITH_BUFFER[0]), tmp_path, bf16=True)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3", *WITH_BUFFER)])
def test_the_mismatch_is_zero_for_every_family(family, tmp_path):
    options = dict(bf16=True, beta=0.04, router_aux_loss_coef=0.0)
    trainer = make_trainer(SeenGRPO, write_model(tmp_path / "model", family), tmp_path, **options)
    trainer.train()
    check_run(trainer)


@pytest.mark.parametrize("case", ["fp32", "checkpointing", "beta", "accumulation", "truncated"])
def test_the_mismatch_of_rloo_is_zero_at_every_generation(case, model, tmp_path):
    trainer = make_trainer(SeenRLOO, model, tmp_path, **dict(beta=0.0) | CASES[case])
    trainer.train()
    check_run(trainer)


@pytest.mark.parametrize("case", ["fp32", "bf16 over fp32", "truncated"])
def test_the_audit_says_equal_and_of_plain_trl_it_does_not(case, model, tmp_path):
    """Both columns of the log, and the log beside the checkpoint of its step, which a Decoder reads alone."""
    options = CASES[case]
    trainer = make_trainer(
        ExactGRPOTrainer, model, tmp_path / "run", **options, save_strategy="steps", save_steps=1
    )
    record(trainer, tmp_path / "exact.jsonl")
    trainer.train()
    assert audit(tmp_path / "exact.jsonl") == (0, 0.0)
    dtype = "float32" if case == "fp32" else "bfloat16"
    words = ("--weight_version", "2", "--trainer", "zerokl", "--dtype", dtype)
    newest, older = (str(tmp_path / "run" / f"checkpoint-{step}") for step in (2, 1))
    assert audit(tmp_path / "exact.jsonl", "--model", newest, *words) == (0, 0.0)
    assert audit(tmp_path / "exact.jsonl", "--model", older, *words)[0] == 1
    if trl.__version__ in NO_FORWARD_WITHOUT_TRITON and not find_spec("triton"):
        return
    plain = make_trainer(GRPOTrainer, model, tmp_path / "plain", **options, max_steps=1)
    record(plain, tmp_path / "plain.jsonl")
    plain.train()
    code, largest = audit(tmp_path / "plain.jsonl")
    print(f"plain TRL {trl.__version__} with transformers, {case}: {largest}")
    # Under the cuts TRL scores another distribution. Elsewhere its two sides only round, which is sound.
    assert code == (case == "truncated")
    assert largest > 0.0


def audit(log: Path, *words: str) -> tuple[int, float]:
    """The exit code of `zerokl audit`, and the largest difference of a log-probability."""
    with TemporaryDirectory() as out:
        code = main(["audit", str(log), *words, "--out", f"{out}/audit"])
        return code, json.loads((Path(out) / "audit" / "audit.json").read_text())["max_abs"]


@pytest.mark.parametrize("trainer_class", [SeenGRPO, SeenRLOO])
def test_evaluation_is_exact_and_draws_other_numbers(trainer_class, model, tmp_path):
    options = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=P * G)
    trainer = make_trainer(trainer_class, model, tmp_path, eval_dataset=prompts().select(range(2)), **options)
    trainer.train()
    assert mismatches(trainer) == [0.0] * STEPS
    assert mismatches(trainer, f"eval_{MAX}") == [0.0] * STEPS
    assert len({str(drawn) for _, drawn in trainer.seen}) == 2 * STEPS
    alone = make_trainer(trainer_class, model, tmp_path)
    alone.train()
    # A generation, then an evaluation. The second update has other bits: TRL shuffles a batch with torch's
    # generator, from which the evaluation's loader draws.
    assert trainer.seen[:4:2] == alone.seen[:2]


def test_no_two_completions_share_random_numbers(model, tmp_path):
    trainer, keys = make_trainer(ExactGRPOTrainer, model, tmp_path), []
    for step in (0, 0, 1):
        trainer.state.global_step = step
        for training in (True, False):
            trainer.model.train(training)
            keys += trainer._keys(P * G, G) + trainer._keys(P * G, G)
    assert len(set(keys)) == len(keys) == 12 * P * G


def test_a_resumed_run_goes_on_with_the_same_bits(model, tmp_path):
    whole = make_trainer(SeenGRPO, model, tmp_path, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = make_trainer(SeenGRPO, model, tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.seen == whole.seen[1:]
    pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    assert all(equal(a, b) for a, b in pairs)


def test_two_ranks_draw_what_one_draws(model, tmp_path):
    command = torchrun(2, "-m", "tests.trl.exact_runs", str(model), str(tmp_path))
    subprocess.run(command, cwd=PACKAGE_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    one = make_trainer(SeenGRPO, model, tmp_path / "one", per_device_train_batch_size=G)
    one.train()
    assert ranks[0]["mismatches"] == [0.0] * STEPS  # TRL gathers the largest of all ranks
    assert ranks[0]["last"] == ranks[1]["last"]
    first = [row for rank in ranks for row in rank["seen"][0][1]]
    assert first == json.loads(json.dumps(one.seen[0][1]))


def test_control_weights_that_are_stale_on_both_sides_are_found(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ExactModel, "sync", lambda self: None)
    with pytest.raises(StaleWeightsError, match=r"copy of model\.embed_tokens\.weight is not the Parameter"):
        make_trainer(ExactGRPOTrainer, model, tmp_path).train()

    monkeypatch.undo()
    trainer = make_trainer(ExactGRPOTrainer, model, tmp_path)
    monkeypatch.setattr(ExactModel, "sync", lambda self: None)
    monkeypatch.setattr(ExactModel, "check_fresh", lambda *_: "")
    trainer.train()
    assert mismatches(trainer) == [0.0] * STEPS  # which alone does not see it


def test_control_a_copy_that_fails_is_found(model, tmp_path, monkeypatch):
    trainer = make_trainer(ExactGRPOTrainer, model, tmp_path)
    monkeypatch.setattr(ExactModel, "_copy", lambda self: None)
    with pytest.raises(StaleWeightsError, match="Parameters differ"):
        trainer.train()


@pytest.mark.parametrize("trainer_class", [ExactGRPOTrainer, ExactRLOOTrainer])
def test_control_a_sampler_that_is_one_bit_off_stops_the_run(trainer_class, model, tmp_path, monkeypatch):
    trainer = make_trainer(trainer_class, model, tmp_path)
    draw = trainer.sampler.generate

    def off_by_a_bit(requests):
        completions = draw(requests)
        completions[-1].logprobs.view("int32")[0] ^= 1
        return completions

    monkeypatch.setattr(trainer.sampler, "generate", off_by_a_bit)
    with pytest.raises(MismatchError, match=r"step 0, prompt 1, sample 3, position 0 .* 1 ulp apart"):
        trainer.train()


REFUSED = {
    "use_transformers_continuous_batching": True,
    "cast_lm_head_to_fp32": True,
    "use_liger_kernel": True,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"num_beams": 2},
    "cache_implementation": "static",
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "torch_compile": True,
    "deepspeed": "config.json",
    "fsdp": "full_shard",
}


@pytest.mark.parametrize("name", exact_trl._REFUSED)
@pytest.mark.parametrize("trainer_class", [ExactGRPOTrainer, ExactRLOOTrainer])
def test_a_setting_that_cannot_be_exact_is_refused_by_name(trainer_class, name, model, tmp_path):
    config = make_trainer(trainer_class, model, tmp_path).args
    setattr(config, name, REFUSED[name])
    with pytest.raises(ValueError, match=rf"^exact_trl: {name} \(.*\) is refused: [^\n]+$"):
        trainer_class(str(model), [], args=config)


@pytest.mark.parametrize("name", exact_trl._REFUSED_ARGUMENTS)
def test_an_argument_that_cannot_be_exact_is_refused_by_name(name, model):
    with pytest.raises(ValueError, match=rf"^exact_trl: {name} is refused: [^\n]+$"):
        ExactGRPOTrainer(str(model), [], **{name: object()})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed: tests/trl/test_vllm.py")
def test_use_vllm_without_vllm_says_what_is_missing(model, tmp_path):
    with pytest.raises(ValueError, match=r"^vllm: is not installed in this environment"):
        make_trainer(ExactGRPOTrainer, model, tmp_path, use_vllm=True)


def test_a_vision_model_is_refused():
    with pytest.raises(ValueError, match="a vision model is refused"):
        exact_trl._refuse_trainer(SimpleNamespace(processing_class=object.__new__(ProcessorMixin)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), r"temperature \(0.0\) is refused: TRL trains on draws"),
        (dict(beta=0.1, top_k=5), r"beta \(0.1\) with top_k is refused: the KL is infinite"),
        (dict(loss_type="cispo", top_p=0.9), r"loss_type \('cispo'\) with top_p is refused"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(ExactGRPOTrainer, model, tmp_path, **options)


def test_an_auxiliary_loss_of_experts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is refused: .* set it to 0\.0$"):
        make_trainer(ExactGRPOTrainer, write_model(tmp_path / "model", "qwen3_moe"), tmp_path)


def test_another_release_of_trl_is_refused(model, tmp_path, monkeypatch):
    assert trl.__version__ in exact_trl.SUPPORTED
    monkeypatch.setattr(trl, "__version__", "1.13.0")
    with pytest.raises(
        ValueError, match=r"TRL 1\.13\.0 is not supported; supported are 1\.14\.2, 1\.15\.0, 1\.16\.0$"
    ):
        make_trainer(ExactGRPOTrainer, model, tmp_path)
