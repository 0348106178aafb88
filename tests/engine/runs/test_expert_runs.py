"""Runs of a mixture of experts: exactly on-policy, and the same bits however the work is cut."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.config.perturb_section import PerturbConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout.types import Completion, Request, Sampler
from zerokl.engine.runs import samplers
from zerokl.engine.runs.checks.verify import check_law
from zerokl.engine.runs.init import random_decoder
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.monitor import MismatchError
from zerokl.kernels.combine_experts import combine_experts
from zerokl.kernels.expert_rows import ExpertRows
from zerokl.kernels.passes import Pass
from zerokl.kernels.topk_softmax import topk_softmax
from zerokl.model.blocks import experts
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.context import PackedContext
from zerokl.model.operation import Work
from zerokl.model.operations import forward_flops
from zerokl.model.routing import RecordedRouting
from zerokl.verify.compare_runs import open_run
from zerokl.verify.ledger import digest

from tests.engine.runs.exact_runs import faults, forget_end, train_exactly
from tests.helpers import fingerprint
from tests.random_model import EXPERTS, random_model

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(DTYPES[0], marks=pytest.mark.proof),
        DTYPES[1],
        pytest.param(DTYPES[2], marks=pytest.mark.full),
    ],
)
def plain(request, config, moe) -> Config:
    return config(dtype=request.param, model=moe, checkpoint__every=2)


@pytest.fixture(scope="module")
def run(plain, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "run"
    train_exactly(plain, path)
    return path


def test_every_expert_and_the_router_are_trained(run, moe):
    before = load_decoder(moe, torch.float32)
    after = load_decoder(run / "checkpoints" / "step-000003", torch.float32)
    old, new = (decoder.layout.checkpoint_views(decoder.flat.detach()) for decoder in (before, after))
    assert [name for name in old if torch.equal(old[name], new[name])] == []


@pytest.mark.parametrize(
    "cut_up",
    [
        pytest.param({"workers": 2, "micro_batch": 2}, marks=pytest.mark.full),
        {"shards_in_flight": 3, "micro_batch": 5, "recompute": "layer"},
        pytest.param({"micro_batch": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_how_the_work_is_cut_decides_no_bit(plain, run, tmp_path, cut_up):
    assert train(plain.model_copy(update=cut_up), tmp_path / "run").fingerprint == fingerprint(run)


def test_a_run_goes_on_and_is_verified(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "run")
    forget_end(path)
    assert faults(path) == []
    resume(path)
    assert (path / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()


@pytest.mark.full
def test_the_laws_checks_hold(moe):
    """zerokl verify MODEL: order, padding, chunks, decode, threads, concurrency and micro-batches."""
    checks = check_law(str(moe), ["bfloat16"], sequences=4, longest=24)
    assert len(checks) >= 8
    assert [check for check in checks if check.unequal or not check.comparisons] == []


def test_the_ledger_binds_what_the_experts_are(run):
    assert open_run(run).head.settings["model.experts"] == {
        "number": 6,
        "per_token": 2,
        "size": 48,
        "renormalise": True,
        "layers": [1],
    }


def test_frozen_experts_and_routers_keep_every_bit(config, moe, tmp_path):
    settings = config(model=moe, frozen=("*.mlp.gate.weight", "*.experts.*.down_proj.weight"))
    train_exactly(settings, tmp_path / "run")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (moe, tmp_path / "run/checkpoints/step-000003")
    )
    kept = {name for name in before if torch.equal(before[name], after[name])}
    frozen = {name for name in before if re.search(r"mlp\.gate\.|experts.*down_proj", name)}
    assert kept == frozen
    assert len(frozen) == 1 + 6


def test_one_expert_of_many_cannot_be_frozen(config, moe, tmp_path):
    one, first = (
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
    )
    message = re.escape(f"frozen ({one}): is one matrix with {first} and 4 more; freeze all or none")
    with pytest.raises(ValueError, match=message):
        train(config(model=moe, frozen=(one,)), tmp_path / "run")


# The chosen experts


def lines_of(run: Path) -> list[dict[str, str]]:
    return [line.quantities for line in open_run(run).lines]


def metrics_of(run: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_ledger_has_the_experts_of_each_token(run, moe, plain):
    """By whole sequences of one forward each, from the first weights."""
    policy, chosen = load_decoder(moe, getattr(torch, plain.dtype)), []
    c = policy.config
    for text in (run / "rollouts.jsonl").read_text().splitlines():
        if (line := json.loads(text))["step"] == 0:
            prompt, ids = line["prompt_ids"], line["prompt_ids"] + line["completion_ids"][:-1]
            routing = RecordedRouting(c.experts)
            with torch.no_grad():
                policy.hidden(torch.tensor(ids), PackedContext([len(ids)], c, routing=routing))
            chosen.append(routing.taken()[len(prompt) - 1 :])
    assert list(lines_of(run)[0])[3:5] == ["experts", "trainer_logprobs"]
    assert lines_of(run)[0]["experts"] == digest(torch.cat(chosen))
    chosen[-1][-1, 0, 0] ^= 1
    assert lines_of(run)[0]["experts"] != digest(torch.cat(chosen)), "control"


def test_a_dense_model_has_no_experts_in_its_ledger(config, tmp_path):
    train(config(steps=1), tmp_path / "run")
    assert "experts" not in lines_of(tmp_path / "run")[0]


def test_the_monitor_counts_tokens_with_other_experts_and_a_replay_has_none(config, moe, tmp_path):
    shares = {}
    for routing in ("free", "replayed"):
        perturb = {"exact": False, "precision__sampler_dtype": "bfloat16", "perturb__routing": routing}
        train(config(model=moe, **perturb), tmp_path / routing)
        shares[routing] = max(metrics_of(tmp_path / routing, "mismatch/other_experts"))
    assert 0.0 < shares["free"] < 0.5
    assert shares["replayed"] == 0.0


@pytest.fixture(scope="module")
def first_layer(tmp_path_factory) -> Path:
    """Experts in the first of two layers: nobody reads what a prompt's rows are after the last one."""
    return random_model(tmp_path_factory.mktemp("first"), EXPERTS | {"mlp_only_layers": [1]})


def planting(monkeypatch: pytest.MonkeyPatch, sampler: type, in_prompt: bool) -> None:
    """From now on a sampler names another expert for one row of its first completion, of the first layer.

    The row is the prompt's first, or the one that predicts the first drawn token.
    """
    generate = sampler.generate

    def planted(self: Sampler, requests: Sequence[Request]) -> list[Completion]:
        first, *others = generate(self, requests)
        named = first.experts.copy()
        row = named[0 if in_prompt else len(requests[0].ids) - 1, 0]
        row[0] = next(expert for expert in range(6) if expert not in row)
        return [replace(first, experts=named), *others]

    monkeypatch.setattr(sampler, "generate", planted)


@pytest.mark.parametrize("in_prompt", [False, True], ids=["drawn", "prompt"])
@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_one_planted_expert_is_the_whole_share_and_a_replay_computes_with_it(
    config, first_layer, tmp_path, monkeypatch, sampler, in_prompt
):
    settings = {"model": first_layer, "sampler": sampler, "exact": False, "steps": 1}
    sound = train(config(**settings, perturb__routing="replayed"), tmp_path / "sound")
    assert sound.mismatch_max_abs < 1e-5
    assert metrics_of(tmp_path / "sound", "mismatch/other_experts") == [0.0]
    class_of = {"native": samplers.WorkersSampler, "hf": samplers.ExternalSampler}
    planting(monkeypatch, class_of[sampler], in_prompt)
    free = train(config(**settings), tmp_path / "free")
    (tokens,) = metrics_of(tmp_path / "free", "tokens")
    share = 0.0 if in_prompt else 1.0 / tokens  # of drawn tokens and the one layer with experts
    assert metrics_of(tmp_path / "free", "mismatch/other_experts") == [share]
    assert free.mismatch_max_abs < 1e-5
    replayed = train(config(**settings, perturb__routing="replayed"), tmp_path / "replayed")
    assert metrics_of(tmp_path / "replayed", "mismatch/other_experts") == [0.0]
    assert replayed.mismatch_max_abs > 1e-3


def test_replayed_experts_change_no_bit_of_an_exact_run(plain, run, tmp_path):
    cut_up = {"workers": 2, "micro_batch": 3, "recompute": "layer"}
    settings = plain.model_copy(update={"perturb": PerturbConfig(routing="replayed"), **cut_up})
    train(settings, tmp_path / "run")
    assert lines_of(tmp_path / "run") == lines_of(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"perturb__routing": "replayed"},
        {"precision__router_dtype": "float32"},
        {"loss__router_aux_coef": 0.1},
        {"precision__sampler_router_dtype": "float32", "exact": False},
    ],
    ids=str,
)
def test_a_dense_model_has_no_settings_of_experts(config, tmp_path, settings):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts; set it to"):
        train(config(**settings), tmp_path / "run")


# The load-balancing loss


@pytest.mark.full
def test_load_is_balanced_by_the_same_bits_however_the_work_is_cut(config, moe, tmp_path):
    settings = {"model": moe, "dtype": "bfloat16", "steps": 6, "optimizer__lr": 3e-3}
    spread = {}
    for coef in (1e-9, 5.0):
        train(config(**settings, loss__router_aux_coef=coef), tmp_path / str(coef))
        spread[coef] = metrics_of(tmp_path / str(coef), "router/load_balance")
    assert spread[1e-9][0] == spread[5.0][0] > 2.0, "k is the least"
    assert spread[5.0][-1] < min(spread[1e-9][-1], spread[5.0][0])
    cut_up = {"workers": 2, "micro_batch": 3, "recompute": "layer", "loss__router_aux_coef": 5.0}
    train(config(**settings, **cut_up), tmp_path / "cut up")
    assert lines_of(tmp_path / "cut up") == lines_of(tmp_path / "5.0")


# Routers in fp32


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_routers_in_fp32_are_exact_and_trained_and_decide_bits(config, moe, tmp_path, dtype):
    settings = config(model=moe, dtype=dtype, precision__router_dtype="float32", checkpoint__every=3)
    summary = train_exactly(settings, tmp_path / "run")
    cut_up = {"workers": 2, "micro_batch": 2, "recompute": "layer"}
    again = train(settings.model_copy(update=cut_up), tmp_path / "again")
    assert again.fingerprint == summary.fingerprint
    before, after = (
        load_file(folder / "model.safetensors") for folder in (moe, tmp_path / "run/checkpoints/step-000003")
    )
    assert not torch.equal(*(weights["model.layers.1.mlp.gate.weight"] for weights in (before, after)))
    narrow = train(config(model=moe, dtype=dtype), tmp_path / "narrow")
    assert narrow.weights != summary.weights


def test_a_router_in_fp32_on_one_side_is_a_mismatch_that_a_replay_cannot_hide(config, moe, tmp_path):
    settings = {"dtype": "bfloat16", "exact": False, "precision__sampler_router_dtype": "float32"}
    summary = train(config(model=moe, **settings, perturb__routing="replayed"), tmp_path / "run")
    assert summary.mismatch_max_abs > 0.0
    assert max(metrics_of(tmp_path / "run", "mismatch/other_experts")) == 0.0


# Controls


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(["q_proj", "o_proj"], marks=pytest.mark.full),
        ["gate_proj", "down_proj", "v_proj"],
    ],
    ids=str,
)
def test_adapters_are_trained_however_the_work_is_cut(config, moe, tmp_path, targets):
    """Of the attention beside experts, and of each expert."""
    cfg = config(model=moe, dtype="bfloat16", lora__rank=3, lora__targets=targets)
    train_exactly(cfg, tmp_path / "run")
    train(cfg.model_copy(update={"workers": 2, "micro_batch": 2}), tmp_path / "other")
    assert fingerprint(tmp_path / "other") == fingerprint(tmp_path / "run")
    stored = load_file(tmp_path / "run" / "checkpoints" / "step-000003" / "adapter_model.safetensors")
    b = {name: x for name, x in stored.items() if "lora_B" in name}
    assert all(x.any() for x in b.values()), "each adapter has moved"
    assert sum(".experts." in name for name in b) == (12 if "down_proj" in targets else 0)


@pytest.fixture(scope="module")
def with_ties(tmp_path_factory) -> Path:
    """A model whose experts 0, 1 and 2 have equal logits, and so have 3, 4 and 5."""
    folder = random_model(tmp_path_factory.mktemp("ties"), EXPERTS)
    weights = load_file(folder / "model.safetensors")
    router = weights["model.layers.1.mlp.gate.weight"]
    router.copy_(router[[0, 0, 0, 3, 3, 3]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def higher_wins(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, ids = topk_softmax(logits.flip(1), k, renormalise)
    return q, logits.shape[1] - 1 - ids


def in_order_of_experts(
    h: torch.Tensor, w: torch.Tensor, q: torch.Tensor, rows: ExpertRows, in_pass: Pass
) -> torch.Tensor:
    """The experts' outputs added in the order of their numbers where a sampler draws."""
    if not torch.is_grad_enabled():
        rows.places = rows.places.sort(1).values
    return combine_experts(h, w, q, rows, in_pass)


@pytest.mark.parametrize("side", [True, False], ids=["trainer", "sampler"])
def test_control_another_rule_for_ties_on_one_side_stops_the_run(
    config, with_ties, tmp_path, monkeypatch, side
):
    settings = config(model=with_ties)
    assert train(settings, tmp_path / "sound").mismatch_max_abs == 0.0

    def route(*args):
        return (higher_wins if torch.is_grad_enabled() == side else topk_softmax)(*args)

    monkeypatch.setattr(experts, "topk_softmax", route)
    with pytest.raises(MismatchError):
        train(settings, tmp_path / "run")


def test_control_another_order_of_the_slots_on_one_side_stops_the_run(config, tmp_path, monkeypatch):
    """Of three slots: two have one sum only."""
    settings = config(model=random_model(tmp_path, EXPERTS | {"num_experts_per_tok": 3}))
    assert train(settings, tmp_path / "sound").mismatch_max_abs == 0.0
    monkeypatch.setattr(experts, "combine_experts", in_order_of_experts)
    with pytest.raises(MismatchError):
        train(settings, tmp_path / "run")


def test_transformers_draws_from_the_weights_that_are_trained(config: Callable[..., Config], moe, tmp_path):
    """Two fp32 engines differ by rounding; weights that were not handed over differ far more."""
    summary = train(config(model=moe, sampler="hf", exact=False, optimizer__lr=3e-2), tmp_path / "run")
    assert summary.steps == 3
    assert 0.0 < summary.mismatch_max_abs < 1e-4


def test_vllm_as_it_comes_is_refused_on_a_cpu(config, moe, monkeypatch):
    """Its reload of experts gives other weights."""
    monkeypatch.setattr(samplers, "is_cpu_build", lambda: True)
    with pytest.raises(ValueError, match="does not take new weights of a mixture of experts"):
        samplers.refuse_model(config(model=moe, sampler="vllm", exact=False), ModelConfig.from_file(moe))


def test_a_token_of_the_moe_preset_takes_the_products_of_the_tiny_one_and_the_router():
    moe, tiny = (random_decoder(preset, 64, 0).config for preset in ("moe", "tiny"))
    router = 2 * moe.layers * moe.hidden_size * moe.experts.number
    assert forward_flops(moe, Work(1, 1, 1)) == forward_flops(tiny, Work(1, 1, 1)) + router
