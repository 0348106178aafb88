"""Runs that freeze weights: the bits of what is trained, and what binds the rest.

Resume, replay and `verify run` refuse other frozen weights.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from zerokl.cli import main
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import resume, train
from zerokl.files.bitwise import count_unequal
from zerokl.verify.compare_runs import open_run

from tests.engine.runs.exact_runs import faults, train_exactly
from tests.forged_run import assert_another_frozen_weight_is_refused, assert_checkpoint_is_not_used

PATTERNS = ("lm_head.*", "model.layers.0.*")  # lm_head is the embedding in this model
EMBEDDING = "model.embed_tokens.weight"


def is_frozen(name: str) -> bool:
    return name == EMBEDDING or name.startswith("model.layers.0.")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    """A copy of the model, because tests change weights of it."""
    return shutil.copytree(model, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.proof), "bfloat16"])
def plain(request, config, base) -> Config:
    """The run in which every weight is trained."""
    return config(dtype=request.param, model=base, checkpoint__every=2)


@pytest.fixture(scope="module")
def frozen(plain) -> Config:
    return plain.model_copy(update={"frozen": PATTERNS})


@pytest.fixture(scope="module")
def run(frozen, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "run"
    train_exactly(frozen, path)
    return path


def test_the_first_gradient_of_a_trained_weight_has_the_bits_of_the_run_that_trains_all(plain, run, tmp_path):
    train(plain, tmp_path / "plain")
    whole, part = open_run(tmp_path / "plain"), open_run(run)
    assert part.head.names == [name for name in whole.head.names if not is_frozen(name)]
    assert 0 < len(part.head.names) < len(whole.head.names)

    def gradients(step: int) -> list[dict[str, str]]:
        """The hash of each weight's gradient in both runs."""
        leaves = ((r.head.names, r.lines[step].leaves["gradient"]) for r in (whole, part))
        return [dict(zip(names, hashes, strict=True)) for names, hashes in leaves]

    (first, first_of_part), (second, second_of_part) = gradients(0), gradients(1)
    assert first_of_part == {name: first[name] for name in first_of_part}
    for name in ("tokens", "sampling_logprobs", "trainer_logprobs", "advantages"):
        assert part.lines[0].quantities[name] == whole.lines[0].quantities[name]
    assert second_of_part != {name: second[name] for name in second_of_part}, "control: other weights by then"


def test_frozen_weights_keep_every_bit_and_the_others_move(run, base):
    before, after = weights_of(base), weights_of(run / "checkpoints" / "step-000003")
    assert before.keys() == after.keys(), "a checkpoint is a whole model"
    unequal = {name: count_unequal(before[name], after[name]) for name in before}
    assert all((n == 0) == is_frozen(name) for name, n in unequal.items()), unequal
    state = load_file(run / "checkpoints" / "step-000003" / "trainer" / "state.safetensors")
    trained = sum(w.numel() for name, w in before.items() if not is_frozen(name))
    assert all(trained <= moment.numel() < trained + 4096 + 64 * len(before) for moment in state.values())


CUTS = [
    pytest.param({"micro_batch": 1}, marks=pytest.mark.full),
    pytest.param({"workers": 2, "micro_batch": 2}, marks=pytest.mark.full),
    {"shards_in_flight": 3, "micro_batch": 5},
    pytest.param({"recompute": "layer"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("cut_up", CUTS, ids=str)
def test_how_the_work_is_cut_decides_no_bit(frozen, run, tmp_path, cut_up):
    summary = train(frozen.model_copy(update=cut_up), tmp_path / "run")
    assert summary.fingerprint == json.loads((run / "summary.json").read_text())["fingerprint"]


@pytest.mark.full
def test_the_same_weights_named_otherwise_are_the_same_run(frozen, run, tmp_path):
    named = {"frozen": (EMBEDDING, "model.layers.0.[!m]*", "*.0.mlp.*", "*.0.mlp.*")}
    summary = train(frozen.model_copy(update=named), tmp_path / "run")
    assert summary.fingerprint == json.loads((run / "summary.json").read_text())["fingerprint"]


def test_the_head_binds_the_frozen_weights_and_only_them(plain, run, tmp_path, capsys):
    train(plain, tmp_path / "plain")
    settings = [open_run(path).head.settings for path in (tmp_path / "plain", run)]
    more = {
        key.removeprefix("frozen."): value for key, value in settings[1].items() if key not in settings[0]
    }
    assert settings[1].items() >= settings[0].items()
    assert sorted(more) == sorted(filter(is_frozen, weights_of(run / "checkpoints" / "step-000003")))
    assert all(value.startswith("sha256:") for value in more.values())
    assert main(["diff", str(tmp_path / "plain"), str(run)]) == 1
    assert f"configuration frozen.{EMBEDDING}: None and 'sha256:" in " ".join(capsys.readouterr().out.split())


def test_a_run_goes_on_is_replayed_traced_and_verified(run, cut, tmp_path):
    assert faults(cut) == []
    command = ["replay", str(cut), "--step", "1", "--trace", str(tmp_path / "t.safetensors")]
    assert main(command) == 0
    names = load_file(tmp_path / "t.safetensors").keys()
    assert any("model.layers.1.mlp.down_proj.weight" in name for name in names)
    assert not any("model.layers.0." in name for name in names)
    resume(cut)
    assert (cut / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.0.mlp.up_proj.weight"])
def test_another_frozen_weight_of_the_model_is_refused_by_name(cut, tmp_path, name):
    assert_another_frozen_weight_is_refused(cut, tmp_path / "model", name)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.layers.0.*"], f"{EMBEDDING} is trained now, and was frozen in the run"),
        ([*PATTERNS, "model.norm.*"], "model.norm.weight is frozen now, and was trained in the run"),
        ([], "is trained now, and was frozen in the run; set frozen as it was"),
        (["model.embd_tokens.*"], "matches no weight of the model; did you mean 'model.embed_tokens.*'"),
    ],
)
@pytest.mark.full
def test_a_run_does_not_go_on_with_other_patterns(cut, patterns, message):
    with pytest.raises(ValueError, match=r"^(resume: |frozen )") as error:
        resume(cut, {"frozen": patterns})
    assert message in str(error.value)


@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.0.input_layernorm.weight", "model.norm.weight"])
def test_a_checkpoint_with_another_frozen_weight_is_not_used(run, cut, capsys, name):
    """The last name is of a trained weight."""
    what = f"frozen weights ({name})" if is_frozen(name) else "weights"
    assert_checkpoint_is_not_used(cut, run, "model.safetensors", name, what, capsys)


@pytest.mark.parametrize(
    "separate",
    [
        {"max_staleness": 1},
        *(
            pytest.param({"exact": False} | settings, marks=pytest.mark.full)
            for settings in (
                {"max_staleness": 1, "precision__sampler_dtype": "bfloat16"},
                {"perturb__round_weights": "float16", "perturb__delay": 1},
                {"sampler": "hf"},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samplers_with_weights_of_their_own(config: Callable[..., Config], tmp_path, dtype, separate):
    """The first step's tokens are those of the run that trains all; an exact run compares every bit."""
    cfg = config(dtype=dtype, frozen=PATTERNS, **separate)
    train(cfg, tmp_path / "run")
    train(cfg.model_copy(update={"frozen": ()}), tmp_path / "plain")
    a, b = (open_run(tmp_path / name).lines for name in ("run", "plain"))
    assert a[0].quantities["sampling_logprobs"] == b[0].quantities["sampling_logprobs"]
    assert a[2].quantities["sampling_logprobs"] != b[2].quantities["sampling_logprobs"], "control"
