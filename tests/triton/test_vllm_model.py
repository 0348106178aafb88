"""Our decoder on Triton has the bits of vLLM's own Qwen3, Qwen3-MoE, Qwen2 and Llama in batch-invariant mode.

Every operation, the logits and the logprobs are compared. Everything is interpreted on a CPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from zerokl.audit.engines.engine import split_fused
from zerokl.audit.engines.vllm import _hooks
from zerokl.engine.rollout.types import RngKey, Uniforms
from zerokl.kernels import tiles
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.matmul import matmul
from zerokl.kernels.rope import rope_table
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits
from zerokl.model.blocks import rope as rope_block
from zerokl.model.config import ModelConfig
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

from tests.helpers import DTYPES, randint, randn, total_unequal
from tests.triton.vllm_models import Batch, emulated_fused_add_rms_norm, logits_of, vllm_model

# No tile along K divides these widths, and vLLM pads this vocabulary.
BASE = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
RAW = {
    "qwen3": BASE
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": BASE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "head_dim": 16,
    },
    # A dense layer, and one with experts.
    "qwen3_moe": BASE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "llama": BASE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "attention_bias": False,
    },
}
LENGTHS = (5, 37, 3)  # the second sequence crosses a key tile
IDS = randint(1, 61, sum(LENGTHS))
PREFILL = Batch(LENGTHS, LENGTHS, 64)


def make_decoder(family: str, dtype: torch.dtype) -> Decoder:
    config = ModelConfig.from_dict(RAW[family])
    layout = Layout(config)
    flat = randn(0, layout.numel, scale=0.15)
    for name, view in layout.views(flat).items():
        if name.endswith("norm"):
            view.add_(1.0)
    return Decoder(config, flat.to(dtype), layout)


def model_of_vllm(
    decoder: Decoder, folder: Path, patch: pytest.MonkeyPatch, one_order: bool = True
) -> torch.nn.Module:
    """vLLM's model as exact training starts it; without `one_order`, with vLLM's own addition and norm."""
    from vllm.model_executor import custom_op
    from zerokl.engine.rollout.vllm.norm import use_one_order

    patch.setattr(custom_op, "op_registry_oot", {})
    if one_order:
        use_one_order()
    return vllm_model(decoder, folder, patch)


CASES = [
    *(("qwen3", dtype) for dtype in DTYPES),
    ("qwen2", torch.float32),
    ("llama", torch.bfloat16),
    ("qwen3_moe", torch.bfloat16),
    pytest.param(("qwen2", torch.bfloat16), marks=pytest.mark.full),
    pytest.param(("llama", torch.float32), marks=pytest.mark.full),
    pytest.param(("qwen3_moe", torch.float32), marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-{p[1]}".replace("torch.", ""))
def pair(request, batch_invariant, tmp_path_factory) -> Iterator[tuple[Decoder, torch.nn.Module]]:
    """Our decoder, and vLLM's model with its weights."""
    with pytest.MonkeyPatch.context() as patch:
        decoder = make_decoder(*request.param)
        yield decoder, model_of_vllm(decoder, tmp_path_factory.mktemp("model"), patch)


@torch.no_grad()
def our_trace(decoder: Decoder) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        outputs.update({op: part.clone() for op, part in split_fused(name, x, decoder.config).items()})

    hidden = decoder.hidden(IDS, PackedContext(LENGTHS, decoder.config), hook)
    return outputs | {"logits": matmul(hidden, decoder.lm_head)}


def trace_of_vllm(model: torch.nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        outputs[name] = x.reshape(x.shape[0], -1).clone()

    handles = list(_hooks(model, hook, config))
    logits_of(model, IDS, PREFILL)
    for handle in handles:
        handle.remove()
    return outputs


def differing(ours: dict[str, torch.Tensor], vllm: dict[str, torch.Tensor]) -> list[str]:
    """The operations whose outputs differ, in the order of computation."""
    assert set(ours) == set(vllm)
    return [name for name in ours if total_unequal([ours[name]], [vllm[name]])]


def test_every_operation_has_the_bits_of_vllms_model(pair):
    decoder, model = pair
    ours = our_trace(decoder)
    assert len(ours) > 2 * 14
    assert differing(ours, trace_of_vllm(model, decoder.config)) == []


def test_prefill_and_then_decode_have_the_bits_of_the_whole_sequence(pair):
    decoder, model = pair
    whole = our_trace(decoder)["logits"].split(LENGTHS)
    prompts = [n - 2 for n in LENGTHS]
    ids = [x.tolist() for x in IDS.split(LENGTHS)]
    prompt_ids = torch.tensor([t for x, n in zip(ids, prompts, strict=True) for t in x[:n]])
    logits = logits_of(model, prompt_ids, Batch(prompts, prompts, 64))
    assert total_unequal(logits.split(prompts), [x[:n] for x, n in zip(whole, prompts, strict=True)]) == 0
    for step in (0, 1):
        positions = [n + step for n in prompts]
        step_ids = torch.tensor([x[i] for x, i in zip(ids, positions, strict=True)])
        logits = logits_of(model, step_ids, Batch([i + 1 for i in positions], [1] * 3, 64))
        expected = torch.stack([x[i] for x, i in zip(whole, positions, strict=True)])
        assert total_unequal([logits], [expected]) == 0


@pytest.mark.parametrize(
    "sampling_params",
    [
        SamplingParams(1.3, 10, 0.9, 0.05),
        *(
            pytest.param(SamplingParams(*alone), marks=pytest.mark.proof)
            for alone in ((0.7,), (1.3, 10, 0.9), (1.3, 0, 1.0, 0.05))
        ),
    ],
    ids=lambda d: f"{d.temperature}-{d.top_k}-{d.top_p}-{d.min_p}",
)
def test_logprobs_drawn_are_the_trainers_and_vllms(batch_invariant, pair, sampling_params):
    """Our logits processor draws from vLLM's logits, and its logprobs are compared with two others.

    These are the trainer's logprobs of the drawn tokens, and vLLM's log-softmax of the kept set. vLLM's order
    is: first the temperature.
    """
    from vllm.v1.sample.sampler import Sampler
    from zerokl.engine.rollout.vllm.draw import KeyedDraw, Row

    decoder, model = pair
    logits = logits_of(model, IDS, PREFILL).float()
    drawing = KeyedDraw(None, torch.device("cpu"), False)
    drawing._rows = {
        i: Row(sampling_params, key, 0, Uniforms(key), [], 0.0)
        for i in range(len(logits))
        for key in [RngKey(7, 0, prompt=i)]
    }
    # Only the drawn token is left finite: its logit is its logprob.
    processed = drawing.apply(logits.clone())
    drawn, ids = processed.max(dim=1)
    assert (processed.isfinite().sum(dim=1) == 1).all()
    with torch.no_grad():
        hidden = decoder.hidden(IDS, PackedContext(LENGTHS, decoder.config))
        assert total_unequal([drawn], [linear_logprob(hidden, decoder.lm_head, ids, sampling_params)[0]]) == 0
    kept = scaled_logits(logits, sampling_params)
    temperature = torch.full((len(logits),), sampling_params.temperature)
    z = Sampler.apply_temperature(logits, temperature, all_random=True)
    z = z.masked_fill(kept == float("-inf"), float("-inf"))
    expected = batch_invariant.log_softmax(z).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert total_unequal([drawn], [expected]) == 0


@pytest.fixture(scope="module")
def vllm_trace(batch_invariant, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The operations of vLLM's Qwen3 in fp32."""
    decoder, folder = make_decoder("qwen3", torch.float32), tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        return trace_of_vllm(model_of_vllm(decoder, folder, patch), decoder.config)


def first_difference(vllm_trace: dict[str, torch.Tensor]) -> str:
    return differing(our_trace(make_decoder("qwen3", torch.float32)), vllm_trace)[0]


def test_control_a_rope_table_of_another_precision_is_found(vllm_trace, monkeypatch):
    frequencies = ModelConfig.from_dict(RAW["qwen3"]).frequencies
    monkeypatch.setattr(rope_block, "rope_table_fp32", lambda *a: rope_table(frequencies, *a[3:5]))
    assert first_difference(vllm_trace) == "layers.0.q_rope"


def test_control_another_epsilon_is_found(vllm_trace, monkeypatch):
    monkeypatch.setitem(RAW["qwen3"], "rms_norm_eps", 1e-5)
    assert first_difference(vllm_trace) == "layers.0.input_norm"


def test_control_another_tile_along_k_is_found(vllm_trace, monkeypatch):
    monkeypatch.setattr(tiles, "_32_BIT", 16)
    assert first_difference(vllm_trace) == "layers.0.q_proj"


def test_control_another_tile_of_experts_is_found(batch_invariant, tmp_path, monkeypatch):
    decoder = make_decoder("qwen3_moe", torch.float32)
    model = model_of_vllm(decoder, tmp_path, monkeypatch)
    monkeypatch.setattr(tiles, "_GROUPED", 16)
    assert differing(our_trace(decoder), trace_of_vllm(model, decoder.config))[0] == "layers.1.experts"


def test_control_vllms_own_addition_and_norm_are_found(batch_invariant, tmp_path, monkeypatch):
    decoder = make_decoder("qwen3", torch.float32)
    model = model_of_vllm(decoder, tmp_path, monkeypatch, one_order=False)
    assert differing(our_trace(decoder), trace_of_vllm(model, decoder.config))[0] == "layers.0.post_norm"


@pytest.mark.parametrize(("D", "depends"), [(256, False), (1024, True)])
def test_vllms_own_addition_and_norm_depend_on_the_number_of_tokens(D, depends):
    """Why zerokl replaces the operation, shown on the emulation of its source.

    From 256 tokens on, at most 256 threads sum a row. The bits of a row change where the row is wider. On an
    H100, rows of vLLM 0.32's build differed at width 4096, and not at smaller widths.
    """
    x, residual, w = randn(0, 300, D), randn(1, 300, D), torch.ones(D)
    few, many = x[:100].clone(), x.clone()
    emulated_fused_add_rms_norm(few, residual[:100].clone(), w, 1e-6)
    emulated_fused_add_rms_norm(many, residual.clone(), w, 1e-6)
    assert (total_unequal([few], [many[:100]]) > 0) == depends
