"""A mixture of experts in transformers beside ours: a sound pair has no fault, and planted ones are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.audit.as_json import as_json
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.operations.experts import experts_difference
from zerokl.audit.operations.locate import locate
from zerokl.audit.operations.plain_operations import Checkpoint
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.context import PackedContext
from zerokl.model.routing import RecordedRouting

from tests.random_model import EXPERTS, MIXTURES, random_model

PAIR = ((5, 6, 7, 8, 9, 30, 31), (10, 11, 12, 13, 14, 15, 40, 41, 42))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS, sharper=3.0)


@pytest.fixture(scope="module")
def tied(moe, tmp_path_factory) -> Path:
    """Experts 0, 1 and 2 have equal logits, and so have 3, 4 and 5."""
    folder = shutil.copytree(moe, tmp_path_factory.mktemp("tied") / "model")
    weights = load_file(folder / "model.safetensors")
    router = weights["model.layers.1.mlp.gate.weight"]
    router.copy_(router[[0, 0, 0, 3, 3, 3]])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Router(torch.nn.Module):
    """transformers' router, with a rule for ties. It may compute in another dtype."""

    def __init__(self, gate: torch.nn.Module, lower_wins: bool = True, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight, self.k, self.lower_wins, self.dtype = gate.weight, gate.top_k, lower_wins, dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtype = self.dtype or x.dtype
        logits = (x.to(dtype) @ self.weight.to(dtype).T).to(x.dtype)
        p = torch.softmax(logits.float(), dim=1)
        order = p if self.lower_wins else p.flip(1)
        ids = order.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
        ids = ids if self.lower_wins else p.shape[1] - 1 - ids
        q = p.gather(1, ids)
        return logits, (q / q.sum(1, keepdim=True)).to(x.dtype), ids


def located(model: Path, dtype: str, plant: Callable[[torch.nn.Module], None]) -> dict:
    """What `locate` says, as audit.json has it. plant: changes the MLP of transformers' sparse layer."""
    broken, ours = HfEngine(model, DTYPES[dtype]), ZeroklEngine(model, DTYPES[dtype])
    plant(broken.model.model.layers[1].mlp)
    checkpoint = Checkpoint.load(model, DTYPES[dtype])
    return as_json(locate(broken, ours, PAIR, SamplingParams(0.7, 0, 0.95), (checkpoint, checkpoint)))


def router(**options: object) -> Callable[[torch.nn.Module], None]:
    return lambda mlp: setattr(mlp, "gate", Router(mlp.gate, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["moe", "tied"])
def test_a_sound_pair_has_no_jump(request, kind, dtype):
    plant = router() if kind == "tied" else lambda mlp: None
    report = located(request.getfixturevalue(kind), dtype, plant)
    assert report["jump"] is None
    assert {"layers.1.router", "layers.1.experts"} <= {row["op"] for row in report["operations"]}
    assert {len(errors) for errors in report["own_errors"].values()} == {len(report["operations"])}
    assert report["one_sided"] == {"sampler": [], "trainer": []}


def _exchanged(mlp: torch.nn.Module) -> None:
    with torch.no_grad():
        mlp.experts.gate_up_proj.copy_(mlp.experts.gate_up_proj.roll(1, 0))


@pytest.mark.parametrize(
    ("dtype", "kind", "plant", "op", "words"),
    [
        ("float32", "tied", router(lower_wins=False), "experts", "the one with the higher index"),
        ("bfloat16", "tied", router(lower_wins=False), "experts", "the one with the higher index"),
        ("float32", "moe", router(dtype=torch.bfloat16), "router", "as if it were computed in bfloat16"),
        ("float32", "moe", _exchanged, "experts", ""),
    ],
    ids=["ties", "ties in bf16", "router in bf16", "experts rotated"],
)
def test_a_fault_is_named(request, dtype, kind, plant, op, words):
    jump = located(request.getfixturevalue(kind), dtype, plant)["jump"]
    assert (jump["op"], jump["engine"], jump["both_engines"]) == (f"layers.1.{op}", "hf", False)
    assert words in jump["explanation"]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    return {name: random_model(tmp_path_factory.mktemp(name), widths) for name, widths in MIXTURES.items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_sound_pair_of_another_family_has_no_jump(mixtures, family):
    assert located(mixtures[family], "float32", lambda mlp: None)["jump"] is None


def _without_bias(mlp: torch.nn.Module) -> None:
    mlp.gate.e_score_correction_bias.zero_()


def _without_scale(mlp: torch.nn.Module) -> None:
    mlp.gate.routed_scaling_factor = 1.0


@pytest.mark.parametrize(
    ("plant", "words"),
    [(_without_bias, "e_score_correction_bias is lost"), (_without_scale, "routed_scaling_factor (1.5) is")],
    ids=["bias", "scale"],
)
def test_what_a_sigmoid_router_lost_is_named(mixtures, plant, words):
    jump = located(mixtures["glm4_moe"], "float32", plant)["jump"]
    assert (jump["op"], jump["engine"]) == ("layers.1.experts", "hf")
    assert words in jump["explanation"]


def test_the_first_token_and_layer_with_other_experts_is_found(moe):
    config = ModelConfig.from_file(moe)
    a = ZeroklEngine(moe, torch.float32).trace(PAIR, SamplingParams())
    assert experts_difference(a, a, Checkpoint(config, {})).differ == 0
    b = dict(a)
    b["layers.1.router"] = a["layers.1.router"].clone()
    b["layers.1.router"][9] *= -1
    difference = experts_difference(a, b, Checkpoint(config, {}))
    assert (difference.places, difference.differ) == (15, 1)
    assert (difference.first_layer, difference.first_token) == (1, 9)


@pytest.mark.full
def test_an_audit_names_another_norm_topk_prob_of_two_checkpoints(moe, tmp_path, capsys):
    other = shutil.copytree(moe, tmp_path / "other")
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"norm_topk_prob": False}))
    words = ["--sampler", "hf", "-n", "3", "--max-tokens", "6", "--out"]
    assert main(["audit", str(moe), str(moe), *words, str(tmp_path / "clean")]) == 1
    clean = json.loads((tmp_path / "clean" / "audit.json").read_text())
    assert (clean["jump"], clean["cause"]["kind"]) == (None, "rounding")
    assert main(["audit", str(moe), str(other), *words, str(tmp_path / "out")]) == 1
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert report["checkpoints"]["config"] == {"experts.renormalise": [True, False]}
    assert report["jump"]["op"] == "layers.1.experts"
    assert "experts.renormalise is True and False" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("rows", ["sequence", "completion"])
def test_a_log_that_names_its_experts_is_compared(moe, tmp_path, capsys, rows):
    """Experts of our decoder, as vLLM names them: of all layers. Then one of them is changed."""
    decoder = load_decoder(moe, torch.float32)
    routing, ids = RecordedRouting(decoder.config.experts), [*PAIR[0], *PAIR[1]]
    with torch.no_grad():
        decoder.hidden(torch.tensor(ids), PackedContext([len(ids)], decoder.config, routing=routing))
    (logp,) = ZeroklEngine(moe, torch.float32).score([PAIR], SamplingParams())
    experts = routing.taken()
    experts = torch.cat([torch.zeros_like(experts), experts], dim=1)
    if rows == "completion":
        experts = experts[len(PAIR[0]) - 1 : -1]
    named = []
    for name in ("sound", "changed"):
        line = {"prompt_ids": PAIR[0], "completion_ids": PAIR[1], "logprobs": [float(x) for x in logp]}
        line |= {"routed_experts": experts.tolist(), "weight_version": 0, "temperature": 1.0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        words = ["audit", str(moe), "--sampler", str(tmp_path / f"{name}.jsonl"), "--dtype", "float32"]
        main([*words, "--out", str(tmp_path / name)])
        report = json.loads((tmp_path / name / "audit.json").read_text())["experts"]
        named.append([report[key] for key in ("differ", "first_layer", "first_token", "sequence")])
        experts[8 if rows == "sequence" else 2, 1, 0] = next(
            e for e in range(6) if e not in experts[8 if rows == "sequence" else 2, 1]
        )
    assert named == [[0, None, None, None], [1, 1, 8, 0]]
    assert "first in layer 1 at token 8 of completion 0" in " ".join(capsys.readouterr().out.split())
