"""Faults planted in one engine or one checkpoint: the audit names operation, engine, and what it does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3 import modeling_qwen3
from zerokl.audit.as_json import as_json
from zerokl.audit.engines.engine import Engine, ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.faults.all_faults import changed_operations
from zerokl.audit.faults.operations.weights import fp8_everywhere, in_fp8
from zerokl.audit.operations.locate import locate
from zerokl.audit.operations.operation_errors import FAULT, excess
from zerokl.audit.operations.plain_operations import Checkpoint, cut
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.operation import Equation

from tests.audit.settings import audit_config, audit_json
from tests.model.checkpoints import save_random
from tests.random_model import EXPERTS, random_model

LAYERS = 4
PAIR = ((5, 6, 7, 8, 9, 30, 31), (10, 11, 12, 13, 14, 15, 40, 41, 42))
SAMPLING = SamplingParams(0.7, 0, 0.95)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDTHS = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers. No norm has a weight of ones, as none has after training."""
    folder = random_model(tmp_path_factory.mktemp("deep"), WIDTHS, 3.0)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, w in weights.items():
        if "norm" in name:
            w.copy_(0.5 + torch.rand(w.shape, generator=generator))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- sound pairs ---


def test_the_rounding_of_one_huge_output_is_no_fault():
    """In real checkpoints, a few outputs of a projection are thousands of times larger than the others."""
    expected = torch.randn(60, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected[0, 3] = 20_000
    plain = expected.float().double()
    rounded = plain.clone()
    rounded[0, 3] *= 1 + 2.4e-7  # two units in the last place, from another order of the sum
    assert excess(rounded, expected, plain - expected, torch.float32) < FAULT
    # control: all outputs too large by as much
    assert excess(plain * (1 + 4e-5), expected, plain - expected, torch.float32) > FAULT


def located(*args) -> dict:
    """What `locate` says, as audit.json has it."""
    return as_json(locate(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sound_pair_has_no_jump(deep, dtype, attention):
    checkpoint = Checkpoint.load(deep, DTYPES[dtype])
    engines = HfEngine(deep, DTYPES[dtype], attention), ZeroklEngine(deep, DTYPES[dtype])
    for params in (SAMPLING, SamplingParams()):
        report = located(*engines, PAIR, params, (checkpoint, checkpoint))
        assert report["first_divergence"] is not None, "control: the two round otherwise"
        assert report["jump"] is None
        assert {len(errors) for errors in report["own_errors"].values()} == {len(report["operations"])}


@pytest.mark.full
def test_two_dtypes_are_no_fault(deep):
    report = audit_json(audit_config(str(deep), sampler="hf", sampler_dtype="float32", n=2, max_tokens=6))
    assert report["first_divergence"]["op"] == "embed"
    assert report["jump"] is None
    assert report["cause"]["kind"] == "dtype"


# --- faults in transformers' model ---

Plant = Callable[[torch.nn.Module], None]
_MODELS = {Equation.EXPERTS: "moe", Equation.CONV_SILU: "hybrid"}
# Every plant of audit/faults/operations/, with the model that it fits.
PLANTS = [
    pytest.param(plant, plant.family or _MODELS.get(changed.equations[0], "deep"), id=plant.plant.__name__)
    for changed in dict.fromkeys(changed_operations().values())
    for plant in changed.plants
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS, 3.0)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def deepseek_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its routers are in 16 bits, as published ones: transformers does not round them, and we do."""
    folder = save_random("deepseek_v2", tmp_path_factory.mktemp("deepseek_v2"))
    weights = load_file(folder / "model.safetensors")
    routers = {name: w.bfloat16().float() for name, w in weights.items() if name.endswith("gate.weight")}
    save_file(weights | routers, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("deepseek_v3 yarn", tmp_path_factory.mktemp("deepseek_v3"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated delta net and gated attention. dt_bias, which begins at 0, is random."""
    folder = save_random("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.linear_attn.dt_bias"].copy_(torch.linspace(-2, 2, 4))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("planted", "kind"), PLANTS)
def test_a_fault_between_transformers_and_zerokl_is_named(request, dtype, planted, kind):
    model = request.getfixturevalue(kind)
    broken, ours = HfEngine(model, DTYPES[dtype]), ZeroklEngine(model, DTYPES[dtype])
    with torch.no_grad():
        planted.plant(broken.model)
    _assert_named(model, dtype, broken, ours, planted.op, "hf", planted.words)


def test_every_kind_of_operation_has_its_changes():
    assert set(changed_operations()) == set(Equation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_in_our_own_engine_is_ours(deep, dtype):
    sound, broken = HfEngine(deep, DTYPES[dtype]), ZeroklEngine(deep, DTYPES[dtype])
    with torch.no_grad():
        broken.decoder.w["layers.1.down"].mul_(0.5)
    _assert_named(deep, dtype, sound, broken, "layers.1.down_proj", "zerokl", "its outputs are 0.5")


def _assert_named(deep: Path, dtype: str, sampler: Engine, trainer: Engine, op: str, engine: str, words: str):
    checkpoint = Checkpoint.load(deep, DTYPES[dtype])
    report = located(sampler, trainer, PAIR, SAMPLING, (checkpoint, checkpoint))
    jump = report["jump"]
    assert report["first_divergence"]["op"].startswith("layers.0."), "a harmless rounding comes first"
    assert (jump["op"], jump["engine"]) == (op, engine)
    assert words in jump["explanation"]
    assert jump["both_engines"] is False


class _CutMlp(torch.nn.Module):
    """An MLP that cuts silu(gate) * up off towards 0, as some kernels do."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).double(), self.up_proj(x).double()
        return self.down_proj(cut(torch.nn.functional.silu(gate) * up, x.dtype).to(x.dtype))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cutting_off_is_rounding_and_is_said(deep, dtype):
    cuts, ours = HfEngine(deep, DTYPES[dtype]), ZeroklEngine(deep, DTYPES[dtype])
    cuts.model.model.layers[1].mlp = _CutMlp(cuts.model.model.layers[1].mlp)
    checkpoint = Checkpoint.load(deep, DTYPES[dtype])
    report = located(cuts, ours, PAIR, SAMPLING, (checkpoint, checkpoint))
    assert report["jump"] is None
    assert [e["op"] for e in report["own_errors"]["hf"] if e["cut_off"]] == ["layers.1.silu_mul"]
    assert not any(e["cut_off"] for e in report["own_errors"]["zerokl"])


def test_cut_goes_one_step_towards_0_at_most():
    x = torch.tensor([1.0, -1.0, 1.00390625, -1.0039, 0.0, 3.14159], dtype=torch.float64)
    shortened = cut(x, torch.bfloat16)
    assert shortened.tolist() == [1.0, -1.0, 1.0, -1.0, 0.0, 3.140625]


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """An fp32 number as TF32 has it: cut off after ten bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class _Tf32Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(_tf32(x), _tf32(self.weight))


def _attention_in_tf32(module, query, key, value, attention_mask, scaling, **kwargs):
    """transformers' eager attention, its second product in TF32. The trace reads the first one's factors."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (_tf32(weights) @ _tf32(value)).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize("op", ["layers.0.attention", "layers.1.o_proj"])
def test_products_in_tf32_are_named_in_fp32(deep, op, monkeypatch):
    """vLLM's attention on a GPU is such a one; to float16 the error alone would point."""
    broken, ours = HfEngine(deep, torch.float32, "eager"), ZeroklEngine(deep, torch.float32)
    if op == "layers.0.attention":
        monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", _attention_in_tf32)
    else:
        broken.model.model.layers[1].self_attn.o_proj.__class__ = _Tf32Linear
    _assert_named(deep, "float32", broken, ours, op, "hf-eager", "float16, or with products in TF32")


@pytest.mark.full
def test_a_cache_in_fewer_bits_is_named(deep):
    """Both engines trace the same keys and values; the one that rounds them before attention is at fault."""
    checkpoint = Checkpoint.load(deep, torch.bfloat16)
    narrow, plain = ZeroklEngine(deep, torch.bfloat16), HfEngine(deep, torch.bfloat16)
    narrow.decoder.numerics = narrow.decoder.numerics._replace(cache=torch.float8_e4m3fn)
    report = located(narrow, plain, PAIR, SAMPLING, (checkpoint, checkpoint))
    assert (report["jump"]["op"], report["jump"]["engine"]) == ("layers.0.attention", "zerokl")
    assert "rounded to fp8 e4m3: the cache's dtype" in report["jump"]["explanation"]


def test_all_operations_at_fault_are_counted(deep):
    broken, ours = HfEngine(deep, torch.bfloat16), ZeroklEngine(deep, torch.bfloat16)
    with torch.no_grad():
        fp8_everywhere(broken.model)
    checkpoint = Checkpoint.load(deep, torch.bfloat16)
    jump = located(broken, ours, PAIR, SAMPLING, (checkpoint, checkpoint))["jump"]
    assert jump["others"] == 7 * LAYERS - 1
    assert jump["other_kinds"] == sorted(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))


# --- two checkpoints ---


def _swapped_heads(weight: torch.Tensor) -> None:
    heads = weight.view(-1, 16, weight.shape[1])
    heads[[0, 1]] = heads[[1, 0]]


def _changed(deep: Path, folder: Path, weights: Plant | None = None, **config: object) -> Path:
    """A copy of the model with changed weights or a changed config."""
    shutil.copytree(deep, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _double_theta(raw: dict) -> dict:
    return {
        "rope_parameters": raw["rope_parameters"] | {"rope_theta": 2 * raw["rope_parameters"]["rope_theta"]}
    }


def _audit(a: Path, b: Path, out: Path, *more: str) -> tuple[int, dict]:
    words = ["audit", str(a), str(b), "-n", "3", "--max-tokens", "6", "--out", str(out), *more]
    code = main(words)
    return code, json.loads((out / "audit.json").read_text())


def test_a_checkpoint_is_equal_to_itself(deep, tmp_path):
    code, report = _audit(deep, deep, tmp_path / "out")
    assert code == 0
    assert report["checkpoints"]["tensors_unequal"] == 0
    assert report["cause"]["kind"] == "equal"


@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_another_theta_is_named(deep, tmp_path, capsys, sampler):
    raw = json.loads((deep / "config.json").read_text())
    other = _changed(deep, tmp_path / "other", **_double_theta(raw))
    code, report = _audit(deep, other, tmp_path / "out", "--sampler", sampler)
    assert code == 1
    assert report["checkpoints"]["config"] == {"rope_theta": [10000.0, 20000.0]}
    assert report["jump"]["op"] == "layers.0.q_rope"
    assert "rope_theta is 10000.0 and 20000.0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "change", "op"),
    [
        ("model.layers.2.self_attn.q_proj.weight", _swapped_heads, "layers.2.q_proj"),
        ("model.layers.1.mlp.down_proj.weight", in_fp8, "layers.1.down_proj"),
        ("model.layers.3.post_attention_layernorm.weight", lambda w: w[0].mul_(2), "layers.3.post_norm"),
        ("model.embed_tokens.weight", lambda w: w.mul_(1.1), "embed"),
    ],
)
def test_another_weight_is_named(deep, tmp_path, capsys, name, change, op):
    other = _changed(deep, tmp_path / "other", lambda tensors: change(tensors[name]))
    code, report = _audit(deep, other, tmp_path / "out", "--dtype", "bfloat16")
    assert code == 1
    assert [row["name"] for row in report["checkpoints"]["unequal"]] == [name]
    assert report["cause"]["kind"] == "checkpoints"
    assert report["jump"]["op"] == op
    out = " ".join(capsys.readouterr().out.split())
    assert name in out
    assert f"The forward feels it first at {op}" in out


def _without_qk_norm(deep: Path, folder: Path) -> Path:
    """The same weights as a Llama, which normalises neither queries nor keys."""

    def drop(tensors: dict) -> None:
        for name in [n for n in tensors if ".q_norm." in n or ".k_norm." in n]:
            del tensors[name]

    return _changed(deep, folder, drop, architectures=["LlamaForCausalLM"], model_type="llama")


@pytest.mark.parametrize("first", ["with", "without"])
def test_an_operation_that_one_side_lacks_is_the_finding(deep, tmp_path, capsys, first):
    folders = [deep, _without_qk_norm(deep, tmp_path / "llama")]
    side = "sampler" if first == "with" else "trainer"
    code, report = _audit(
        *(folders if first == "with" else folders[::-1]), tmp_path / "out", "--sampler", "hf"
    )
    assert code == 1
    assert report["one_sided"][side][:2] == ["layers.0.q_norm", "layers.0.k_norm"]
    assert report["checkpoints"]["config"]["qk_norm"] == ([True, False] if first == "with" else [False, True])
    assert (report["jump"]["op"], report["jump"]["absent"]) == ("layers.0.q_rope", "layers.0.q_norm")
    assert "q_norm" in report["jump"]["explanation"]
    assert "layers.0.self_attn.q_norm.weight" in " ".join(capsys.readouterr().out.split())
    assert "q_norm" in (tmp_path / "out" / "audit.html").read_text()


def test_an_engine_that_skips_an_operation_of_its_checkpoint_is_at_fault(deep, tmp_path):
    """transformers runs the weights as a Llama, zerokl as the Qwen3 that they are."""
    llama = HfEngine(_without_qk_norm(deep, tmp_path / "llama"), torch.bfloat16)
    checkpoint = Checkpoint.load(deep, torch.bfloat16)
    report = located(llama, ZeroklEngine(deep, torch.bfloat16), PAIR, SAMPLING, (checkpoint, checkpoint))
    assert (report["jump"]["op"], report["jump"]["engine"]) == ("layers.0.q_rope", "hf")
    assert report["jump"]["explanation"] == "q_norm is missing before it"
    assert report["one_sided"]["trainer"][0] == "layers.0.q_norm"


def test_models_of_other_shapes_are_compared_by_their_tokens(deep, tmp_path):
    other = random_model(tmp_path, WIDTHS | {"num_hidden_layers": 2, "intermediate_size": 64})
    code, report = _audit(deep, other, tmp_path / "out")
    assert code == 1
    assert report["cause"]["kind"] == "checkpoints"
    assert report["checkpoints"]["config"]["layers"] == [4, 2]
    assert "layers.0.gate_proj" in report["other_shapes"]
    assert "layers.2.input_norm" in report["one_sided"]["sampler"]


def test_another_vocabulary_is_refused(deep, tmp_path, capsys):
    raw = json.loads((deep / "config.json").read_text())
    other = _changed(deep, tmp_path / "other", vocab_size=raw["vocab_size"] + 1)
    assert main(["audit", str(deep), str(other), "--out", str(tmp_path / "out")]) == 2
    assert "tokens of one have no probability under the other" in capsys.readouterr().err
