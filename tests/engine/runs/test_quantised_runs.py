"""Runs with quantised weights: on both sides, where they are exact, and on the sampler's side alone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.engine.config.run_config import Config, OptimizerConfig
from zerokl.engine.runs import samplers
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.monitor import MismatchError
from zerokl.engine.train.optimizer import GradientOverflowError, Optimizer
from zerokl.engine.train.parallel.tree_hash import hash_tree
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.quantise import quantise
from zerokl.model.checkpoint import read_weights
from zerokl.model.compute_weights import compute_weights
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.quantisation import Quantisation
from zerokl.model.weights import Layout
from zerokl.verify.compare_runs import open_run

from tests.engine.runs.exact_runs import faults, train_exactly
from tests.helpers import fingerprint, randn

# What a test's own rounding takes, for each setting.
HOW = {
    "float8_e4m3fn/block32": ("float8_e4m3fn", 32, False),
    "int8/row": ("int8", 1, False),
    "float8_e5m2/tensor/pow2": ("float8_e5m2", 0, True),
    "float8_e4m3fn/tensor": ("float8_e4m3fn", 0, False),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def by_name(tensors: dict[str, torch.Tensor], dtype: torch.dtype, text: str) -> dict[str, torch.Tensor]:
    """What a model with these fp32 tensors computes with, tensor by tensor, in `dtype`."""
    rounded = {name: w.to(dtype) for name, w in tensors.items()}
    for name, w in rounded.items():
        if any(f".{projection}.weight" in name for projection in PROJECTIONS):
            rounded[name] = quantise(w, *HOW[text]).to(dtype)
    return rounded


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    return shutil.copytree(model, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", "float8_e4m3fn/block32"), marks=pytest.mark.full),
        ("bfloat16", "float8_e4m3fn/block32"),
        pytest.param(("float16", "float8_e5m2/tensor/pow2"), marks=pytest.mark.full),
        pytest.param(("float32", "int8/row"), marks=pytest.mark.proof),
        pytest.param(("bfloat16", "float8_e4m3fn/tensor"), marks=pytest.mark.proof),
    ],
    ids="-".join,
)
def both(request, config, base) -> Config:
    dtype, text = request.param
    return config(dtype=dtype, model=base, precision__weights=text, checkpoint__every=2)


@pytest.fixture(scope="module")
def run(both, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("both") / "run"
    train_exactly(both, path)
    return path


def test_the_ledger_has_the_rounded_weights_and_a_checkpoint_the_masters(both, run):
    ledger, dtype = open_run(run), getattr(torch, both.dtype)
    assert ledger.head.settings["precision.weights"] == both.precision.weights
    folder = run / "checkpoints" / "step-000003"
    layout, masters = Layout(ModelConfig.from_file(folder)), load_file(folder / "model.safetensors")
    flat = torch.zeros(layout.numel, dtype=dtype)
    computed = by_name(masters, dtype, both.precision.weights)
    for name, view in layout.checkpoint_views(flat).items():
        view.copy_(computed[name])
    assert hash_tree(layout.blocks, flat).root == ledger.lines[-1].quantities["compute_weights"]
    moved = {name for name, w in masters.items() if count_unequal(w.to(dtype), computed[name])}
    assert moved == {name for name in masters if "_proj.weight" in name}


@pytest.mark.full
def test_the_first_step_is_that_of_a_plain_run_whose_model_has_the_rounded_weights(both, run, base, tmp_path):
    """So the gradient is that of the rounded weights (straight-through); the update is of the masters."""
    model = shutil.copytree(base, tmp_path / "model")
    rounded = by_name(
        load_file(model / "model.safetensors"), getattr(torch, both.dtype), both.precision.weights
    )
    file = model / "model.safetensors"
    save_file({name: w.float() for name, w in rounded.items()}, file, metadata={"format": "pt"})
    plain = both.model_copy(
        update={"model": str(model), "precision": both.precision.model_copy(update={"weights": ""})}
    )
    train(plain, tmp_path / "plain")
    (a, *_, a_last), (b, *_, b_last) = (open_run(path).lines for path in (run, tmp_path / "plain"))
    for name in ("tokens", "sampling_logprobs", "trainer_logprobs", "gradient", "optimizer"):
        assert a.quantities[name] == b.quantities[name], name
    assert a.quantities["weights"] != b.quantities["weights"], "control: other masters"
    assert a_last.quantities["sampling_logprobs"] != b_last.quantities["sampling_logprobs"], "control"


@pytest.mark.full
@pytest.mark.parametrize(
    "cut_up",
    [
        {"workers": 2, "micro_batch": 2},
        pytest.param({"shards_in_flight": 3, "micro_batch": 5, "recompute": "layer"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_how_the_work_is_cut_decides_no_bit(both, run, tmp_path, cut_up):
    train(both.model_copy(update=cut_up), tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(run)


@pytest.mark.full
def test_a_run_goes_on_is_replayed_and_verified(run, cut, tmp_path):
    assert faults(cut) == []
    assert main(["replay", str(cut), "--step", "1", "--trace", str(tmp_path / "t.safetensors")]) == 0
    resume(cut, {"workers": 2})
    assert [line.chain for line in open_run(cut).lines] == [line.chain for line in open_run(run).lines]


def test_a_run_does_not_go_on_with_other_weights(cut):
    with pytest.raises(ValueError, match=r"^run: precision\.weights .* decides bits"):
        resume(cut, {"precision.weights": "int8/tensor"})


@pytest.mark.full
def test_off_is_the_run_without_the_setting(config, base, tmp_path):
    train(config(model=base, steps=1), tmp_path / "run")
    settings = open_run(tmp_path / "run").head.settings
    assert not settings.keys() & {"precision.weights", "perturb.weights", "perturb.weights_of"}
    assert "perturb.round_weights" in settings, "control"


LAGGED = {"max_staleness": 1, "staleness_schedule": "lagged"}


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": 1, "updates_per_rollout": 2},
        *(
            pytest.param(more, marks=pytest.mark.full)
            for more in (
                LAGGED,
                {"max_staleness": 1, "dtype": "bfloat16", "loss__kl_coef": 0.1},
                {"frozen": ("model.layers.0.*",), "dtype": "float16"},
                {"loss__preset": "ppo"},
            )
        ),
    ],
    ids=str,
)
def test_exact_with_what_has_weights_of_its_own(config, base, tmp_path, settings):
    """Older weights and the scorer of them, a reference, frozen weights, a critic; in exact runs."""
    cfg = config(model=base, precision__weights="float8_e4m3fn/block32", **settings)
    train_exactly(cfg, tmp_path / "run")
    if "loss__kl_coef" in settings:
        assert load_run(tmp_path / "run").metrics["ref/k3"][0] == 0.0, "the reference is rounded alike"


@pytest.mark.parametrize("separate", [{"max_staleness": 1}, pytest.param(LAGGED, marks=pytest.mark.full)])
def test_control_a_sampler_with_other_blocks_is_seen(config, base, tmp_path, monkeypatch, separate):
    """The fault is planted where a sampler takes weights of its own."""
    cfg = config(model=base, precision__weights="float8_e4m3fn/block32", **separate)

    def other_blocks(config, layout, master):
        return compute_weights(layout, master, torch.float32, Quantisation("float8_e4m3fn", 16))

    monkeypatch.setattr(samplers, "sampled_weights", other_blocks)
    with pytest.raises(MismatchError):
        train(cfg, tmp_path / "run")


# The optimizer


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16])
def test_compute_weights_are_the_rounded_masters_frozen_ones_too(base, dtype):
    """After updates, an overflow and a load."""
    how = Quantisation("int8", 1)
    layout = Layout(ModelConfig.from_file(base), ["layers.0.qkv", "layers.1.down"])
    weights = read_weights(base, layout)
    decoder = Decoder(layout.config, weights.to(dtype, copy=True), layout)
    optimizer = Optimizer(SlicedWeights(decoder, weights, quantisation=how), OptimizerConfig(lr=1e-2), 9)

    def follow() -> bool:
        expected = compute_weights(layout, optimizer.weights.whole(), dtype, how)
        return count_unequal(decoder.flat.detach(), expected) == 0

    assert follow()
    for seed in range(3):
        before = decoder.flat.detach().clone()
        optimizer.update(randn(seed, layout.trained_numel))
        assert follow()
        assert count_unequal(before, decoder.flat.detach()) > 0
    before = decoder.flat.detach().clone()
    with pytest.raises(GradientOverflowError):
        optimizer.update(torch.full((layout.trained_numel,), torch.inf))
    assert count_unequal(before, decoder.flat.detach()) == 0
    optimizer.weights.load(weights)
    assert follow()
    assert count_unequal(optimizer.weights.whole(), weights) == 0


# The sampler alone


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "settings", "equal"),
    [
        ("float32", {"weights_of": "masters"}, True),
        ("bfloat16", {"weights_of": "compute"}, True),
        pytest.param("bfloat16", {"weights_of": "masters"}, False, marks=pytest.mark.full),
        pytest.param("float32", {"weights_of": "masters", "gain": 2.0}, False, marks=pytest.mark.full),
    ],
)
def test_a_sampler_rounded_as_the_trainer_is_exact(config, base, tmp_path, dtype, settings, equal):
    """Two ways to the same weights: perturb.weights of the sampler, precision.weights of the trainer."""
    text = "float8_e4m3fn/block32"
    perturb = {f"perturb__{key}": value for key, value in settings.items()}
    cfg = config(
        model=base, dtype=dtype, exact=False, precision__weights=text, perturb__weights=text, **perturb
    )
    summary = train(cfg, tmp_path / "run")
    assert (summary.tokens_unequal == 0) == equal


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "float8_e5m2/tensor"},
        pytest.param({"weights": "int8/block", "weights_of": "compute"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_sampler_with_quantised_weights_has_a_mismatch(config, base, tmp_path, settings):
    """The sampler's log-probabilities of the first step are those of a model with the rounded weights."""
    cfg = config(
        model=base, dtype="bfloat16", exact=False, **{f"perturb__{k}": v for k, v in settings.items()}
    )
    summary = train(cfg, tmp_path / "run")
    assert summary.tokens_unequal > 0
    assert load_run(tmp_path / "run").metrics["mismatch/k3"][0] > 0
    assert open_run(tmp_path / "run").head.settings["perturb.weights"] == settings["weights"]


@pytest.mark.full
@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_the_sampler_draws_with_the_rounded_weights(config, base, tmp_path, gain):
    """Its tokens and logprobs are those of a plain run of a model that a test has rounded."""
    text, file = "float8_e5m2/tensor/pow2", "model.safetensors"
    model = shutil.copytree(base, tmp_path / "model")
    masters = load_file(model / file)
    rounded = by_name(masters, torch.float32, text)
    moved = {name: w + (rounded[name] - w) * gain for name, w in masters.items()}
    save_file(moved, model / file, metadata={"format": "pt"})
    perturbed = {"exact": False, "perturb__weights": text, "perturb__gain": gain}
    train(config(model=base, dtype="bfloat16", steps=1, **perturbed), tmp_path / "run")
    train(config(model=model, dtype="bfloat16", steps=1), tmp_path / "plain")
    a, b = (open_run(tmp_path / name).lines[0].quantities for name in ("run", "plain"))
    assert (a["tokens"], a["sampling_logprobs"]) == (b["tokens"], b["sampling_logprobs"])
    assert a["trainer_logprobs"] != b["trainer_logprobs"]


# What is refused

WEIGHTS = {"precision__weights": "int8/row"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"perturb__weights": "int8/row"}, "perturb.* make sampler and trainer differ; set exact = false"),
        (WEIGHTS | {"lora__rank": 2}, 'precision.weights ("int8/row") with lora.rank (2): this is not built'),
        (WEIGHTS | {"parallel__engine": "fsdp"}, '("fsdp") with precision.weights ("int8/row"): this is not'),
        (
            WEIGHTS | {"perturb__round_weights": "bfloat16", "exact": False},
            'perturb.round_weights ("bfloat16") with perturb.weights or precision.weights',
        ),
        (WEIGHTS | {"sampler": "hf"}, "no trainer has its bits"),
    ],
)
def test_refusals(config, tmp_path, settings, message):
    with pytest.raises(ValueError, match=r"^config: ") as refusal:
        train(config(**settings), tmp_path / "run")
    assert message in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["precision__weights", "perturb__weights"])
def test_an_unknown_format_is_refused_by_name(config: Callable[..., Config], key):
    with pytest.raises(ValueError, match=f"{key.replace('__', '.')}.*float8/row must be FORMAT/SCALE"):
        config(**{key: "float8/row"})


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_is_given_the_rounded_weights(config, base, tmp_path, dtype):
    """hf rounds by itself: what it draws differs from the trainer by rounding, not by the quantisation."""
    cfg = config(model=base, dtype=dtype, exact=False, sampler="hf", precision__weights="float8_e5m2/tensor")
    train(cfg, tmp_path / "run")
    plain = cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"weights": ""})})
    wrong = {"perturb": plain.perturb.model_copy(update={"weights": "float8_e5m2/tensor"})}
    train(plain.model_copy(update=wrong), tmp_path / "wrong")
    k3, control = (load_run(tmp_path / name).metrics["mismatch/k3"][0] for name in ("run", "wrong"))
    assert k3 < control / 3
