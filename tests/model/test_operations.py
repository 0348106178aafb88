"""The operations of the blocks: their rows hold for what the decoder computes, and no other list is kept."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.operations.operation_errors import own_errors
from zerokl.audit.operations.plain_operations import Checkpoint, Operations
from zerokl.engine.train.performance import training_flops
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model import operations
from zerokl.model.blocks.attention import Attention
from zerokl.model.blocks.block import Block, Mixer
from zerokl.model.blocks.gated_attention import GatedAttention
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES
from zerokl.model.lora import TARGETS
from zerokl.model.operation import Equation, Operation, Site, Work
from zerokl.model.operations import (
    KINDS_OF_LAYERS,
    OTHER_KINDS,
    forward_flops,
    input_names,
    known,
    known_operation,
    layer_bytes_per_token,
    operation,
    operation_names,
)
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.model.checkpoints import save_random

LAYERS = 2
PAIR = ([3, 1, 4, 1], [5, 9, 2])
SIZES = dict(
    vocab_size=70,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
FAMILIES = {
    "with qk_norm": Qwen3Config(head_dim=16, architectures=["Qwen3ForCausalLM"], **SIZES),
    "without": Qwen2Config(architectures=["Qwen2ForCausalLM"], **SIZES | {"hidden_size": 64}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(folder)
    return folder


def test_every_operation_has_the_width_and_reads_what_the_table_says(folder):
    config = ModelConfig.from_file(folder)
    names = operation_names(config)
    for engine in (ZeroklEngine(folder, torch.float32), HfEngine(folder, torch.float32)):
        trace = engine.trace(PAIR, SamplingParams())
        assert list(trace) == names
        for i, (name, x) in enumerate(trace.items()):
            assert x.shape == (3 if name == "logprob" else 6, operation(name, config).width), name
            assert set(input_names(name, config)) <= set(names[:i]), name


def test_the_experts_of_a_sparse_layer_are_in_the_table(tmp_path):
    folder = save_random("qwen3_moe", tmp_path)
    config = ModelConfig.from_file(folder)
    trace = ZeroklEngine(folder, torch.float32).trace(PAIR, SamplingParams())
    mlps = [name for name in trace if "gate_proj" in name or "router" in name or "experts" in name]
    assert mlps == ["layers.0.gate_proj", "layers.1.router", "layers.1.experts"]
    assert operation_names(config) == list(trace)
    for i, (name, x) in enumerate(trace.items()):
        assert x.shape[1] == operation(name, config).width, name
        assert set(input_names(name, config)) <= set([*trace][:i]), name
    assert input_names("layers.1.mlp_residual", config) == ("layers.1.attention_residual", "layers.1.experts")
    assert input_names("layers.0.mlp_residual", config)[1] == "layers.0.down_proj"


def test_flops_of_experts_are_those_of_the_matrices_that_a_token_uses(tmp_path):
    config = ModelConfig.from_file(save_random("qwen3_moe", tmp_path))
    attention, dense, router, expert = 64 * (4 + 2 + 2 + 4) * 32, 3 * 64 * 96, 64 * 6, 3 * 64 * 48
    assert forward_flops(config, Work(1, 0, 0)) == 2 * (2 * attention + dense + router + 2 * expert)


def test_flops_are_those_of_the_matrices_and_the_scores():
    config = ModelConfig.from_dict(FAMILIES["without"].to_dict())
    linear = sum(
        p.numel()
        for p in AutoModelForCausalLM.from_config(FAMILIES["without"]).model.layers.parameters()
        if p.dim() == 2
    )
    assert forward_flops(config, Work(1, 0, 0)) == 2 * linear
    assert forward_flops(config, Work(0, 1, 0)) == LAYERS * 2 * 2 * 64
    assert forward_flops(config, Work(0, 0, 1)) == 2 * 64 * 70


# A row that the decoder lacks: the values once more. What transformers shows of it is the module's output.
AGAIN = Operation(
    name="v_again",
    equation=Equation.LINEAR,
    reads=("input_norm",),
    width=2 * 16,
    flops=Work(tokens=1000),
    kept=7,
    transformers=Site("self_attn.v_proj"),
    vllm=None,
    remedy="Look twice.",
)


@pytest.fixture
def fresh_table():
    """The table of the known operations is built anew before a test that changes a block, and after it."""
    operations._known_by_name.cache_clear()
    yield
    operations._known_by_name.cache_clear()


@pytest.mark.usefixtures("fresh_table")
def test_a_new_operation_is_one_row(folder, monkeypatch):
    config, rows = ModelConfig.from_file(folder), Attention.operations
    before = training_flops(config, [(4, 3, 3, True, False)]), layer_bytes_per_token(config, 2)
    monkeypatch.setattr(
        Attention, "operations", lambda self, c, x: (*rows(self, c, x)[:3], AGAIN, *rows(self, c, x)[3:])
    )
    config = ModelConfig.from_file(folder)
    assert training_flops(config, [(4, 3, 3, True, False)]) == before[0] + LAYERS * 1000 * 6
    assert layer_bytes_per_token(config, 2) == before[1] + 7 * 2
    trace = HfEngine(folder, torch.float32).trace(PAIR, SamplingParams())
    assert list(trace).index("layers.1.v_again") == list(trace).index("layers.1.v_proj") + 1
    exact = Operations(Checkpoint.load(folder, torch.float32), *PAIR, SamplingParams())
    (error,) = own_errors(trace, exact, ["layers.1.v_again"])
    assert not error.at_fault
    assert known_operation(error.op).remedy == "Look twice."


def test_the_known_layers_have_every_block():
    in_layers = {type(branch.block) for layer in KINDS_OF_LAYERS + OTHER_KINDS for branch in layer}
    assert in_layers == {*Block.__subclasses__(), *Mixer.__subclasses__(), GatedAttention} - {Mixer}


def test_adapters_are_of_the_linear_operations():
    linear = [row.name for _, _, row in known(1) if row.equation is Equation.LINEAR]
    adapted = [name.removeprefix("shared_") for name in linear if name.endswith("_proj")]
    latent = [name for name in adapted if name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")]
    assert set(adapted) - set(latent) == set(TARGETS)
    assert len(adapted) - len(latent) == len(TARGETS) + len(("gate", "up", "down")), "a shared expert's, too"


# The blocks have the only list


def lists_of_operations(root: Path, folders: tuple[str, ...]) -> Iterator[str]:
    """The places of literals, outside the blocks, that hold three names of operations or more."""
    names = {row.name for _, _, row in known(1)}
    for file in sorted(f for folder in folders for f in (root / folder).rglob("*.py")):
        if root / "model" / "blocks" in file.parents or file == root / "model" / "lora.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            members = getattr(node, "keys", None) or getattr(node, "elts", None) or ()
            if len({m.value for m in members if isinstance(m, ast.Constant)} & names) >= 3:
                yield f"{file.relative_to(root)}:{node.lineno}"


def test_no_other_module_lists_operations():
    folders = ("audit", "benchmarks", "cli", "engine", "integrations", "model", "verify")
    assert list(lists_of_operations(PACKAGE_ROOT, folders)) == []


@pytest.mark.parametrize(
    "line", ['X = ("embed", "norm", "logits")', 'X = {"q_proj": 1, "o_proj": 2, "silu_mul": 3}']
)
def test_control_another_list_is_found(tmp_path, line):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "wrong.py").write_text(line)
    assert list(lists_of_operations(tmp_path, ("audit",))) == ["audit/wrong.py:1"]


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_every_operation_of_a_family_is_shown_and_is_what_its_equation_says(family, tmp_path):
    """Ours all of them; transformers' model those that one of its modules shows. No engine is at fault."""
    folder = save_random(family, tmp_path)
    config = ModelConfig.from_file(folder)
    exact = Operations(Checkpoint.load(folder, torch.float32), *PAIR, SamplingParams())
    for kind, has_all in ((ZeroklEngine, True), (HfEngine, False)):
        engine = kind(folder, torch.float32)
        trace = engine.trace(PAIR, SamplingParams())
        names = operation_names(config)
        assert list(trace) == (names if has_all else [name for name in names if name in trace])
        inner = [name for name in trace if ".attention" in name or ".down_proj" in name or ".experts" in name]
        assert len(inner) >= 2 * config.layers
        computed = [name for name in trace if set(input_names(name, config)) <= trace.keys()]
        faults = [error.op for error in own_errors(trace, exact, computed) if error.at_fault]
        assert faults == []
