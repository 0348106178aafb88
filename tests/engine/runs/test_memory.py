"""Memory is predicted before a run: activations beside measured ones, and sizes that fit or are refused."""

import json

import pytest
import torch
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs import memory
from zerokl.engine.runs.memory import (
    CPU_MICRO_BATCH,
    PassSizes,
    RunShape,
    activation_bytes,
    fit,
    fit_into,
    footprint,
)
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.freezing import frozen_weights
from zerokl.model.operations import layer_bytes_per_token
from zerokl.model.prompts import Prompts
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import DTYPES, sums_of, total_unequal, zero_buffers

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
SMALL = Layout(ModelConfig.from_dict(QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}))
LARGE = Layout(ModelConfig.from_dict(QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}))
GIB = 1 << 30


def kept_bytes(decoder: Decoder, rows: int) -> int:
    """Bytes of the tensors that a forward of `rows` rows keeps for its backward, weights left out."""
    storages: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    # Where a layer keeps a state, the prompt is read with the sample.
    prompt = [3] if decoder.config.states else [3, 4]
    prompts = Prompts(decoder, [prompt])
    weights = {decoder.flat.untyped_storage().data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logp, _ = logprobs(decoder, pack([(prompt, [5] * rows)], [0]), SamplingParams(), prompts=prompts)
    assert logp.requires_grad
    return sum(n for address, n in storages.items() if address not in weights)


@pytest.mark.parametrize(
    ("patterns", "layers"),
    [
        ([], 2),
        (["model.layers.0.*"], 2),  # the embedding before it is trained
        (["model.embed_tokens.*", "model.layers.0.self_attn.*"], 2),
        (["model.embed_tokens.*", "model.layers.0.*"], 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predicted_activations_are_those_that_are_kept(model, dtype, patterns, layers):
    decoder, rows = load_decoder(model, dtype), 96
    layout = Layout(decoder.config, frozen_weights(decoder.config, patterns))
    decoder = Decoder(decoder.config, torch.zeros(layout.numel, dtype=dtype), layout)
    predicted = activation_bytes(layout, dtype, rows, recompute=False)
    layer = layer_bytes_per_token(decoder.config, dtype.itemsize) * rows
    assert predicted == layer * (layers + 1)
    measured = kept_bytes(decoder, rows)
    assert 0.8 < measured / (predicted - layer) < 1.25, (measured, predicted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputing_layers_changes_no_bit_and_keeps_less(model, dtype):
    plain = load_decoder(model, dtype)
    pairs = [([9, 8, 7], [5, 6, 7, 8]), ([9, 8, 7], [4, 3]), ([2] * 40, [3] * 30)]

    def again() -> Decoder:
        return Decoder(plain.config, plain.flat.detach(), plain.layout, recompute=True)

    def gradient(decoder: Decoder) -> list[torch.Tensor]:
        buffers = zero_buffers([*decoder.w.values(), decoder.lm_head])
        prompts = Prompts(decoder, [prompt for prompt, _ in pairs], buffers=buffers)
        logp = logprobs(decoder, pack(pairs, prompts.prompt_of_sample), SamplingParams(), prompts=prompts)[0]
        logp.sum().backward()
        prompts.backward()
        return [logp.detach(), *sums_of(buffers)]

    assert total_unequal(gradient(again()), gradient(plain)) == 0
    assert kept_bytes(again(), 96) < kept_bytes(plain, 96) / 2


def test_eight_long_samples_of_a_1_7b_fit_80_gb_with_recompute():
    config = Config(
        prompts=1,
        num_generations=8,
        sampling={"max_tokens": 8192},
        dtype="bfloat16",
        recompute="layer",
        micro_batch=1,
        shards_in_flight=1,
    )
    run, free = RunShape(config, LARGE, 1, 200), int(79.1 * GIB)
    fitted = fit_into(run, free)
    assert fitted == (1, 1, 8)
    predicted = footprint(run, fitted, free)
    # bf16 weights; fp32 masters and two moments of AdamW.
    assert (predicted.weights, predicted.optimizer) == (2 * LARGE.numel, 12 * LARGE.numel)
    matrices = sum(x.numel for name, x in LARGE.entries.items() if name[:2] == "la" and len(x.shape) == 2)
    for settings, expected in (
        ({"moments": "bfloat16"}, 8 * LARGE.numel),
        ({"moments": "int8"}, 6 * LARGE.numel + 8 * LARGE.numel // 256),
        # One moment, and six temporaries of the largest matrix.
        ({"name": "muon"}, 12 * LARGE.numel - 4 * matrices + 24 * 2048 * 6144),
    ):
        other = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=settings)})
        assert footprint(RunShape(other, LARGE, 1, 200), fitted, free).optimizer == expected
    # Two inputs of every layer in bf16, and one layer's activations twice, of a sample and its prompt.
    rows = 8192 + 200
    assert predicted.activations > rows * (28 * 2 * 2048 * 2 + 2 * layer_bytes_per_token(LARGE.config, 2))
    plain = config.model_copy(update={"recompute": "none", "micro_batch": 4})
    with pytest.raises(ValueError, match=r'^memory: a step needs about .* GiB free; set recompute = "layer"'):
        fit_into(RunShape(plain, LARGE, 1, 200), 79 * GIB)


def test_passes_become_as_large_as_the_memory_allows():
    config = Config(prompts=8, num_generations=8, sampling={"max_tokens": 256}, dtype="bfloat16")
    run = RunShape(config, SMALL, 1, 128)
    sizes = [fit_into(run, gib * GIB) for gib in (139, 79, 30)]
    assert sizes == [(64, 8, 8), (32, 4, 8), (8, 2, 8)]
    with pytest.raises(ValueError, match=r"lower sampling\.max_tokens, or spread the run over more ranks"):
        fit_into(run, 8 * GIB)


# The step of benchmarks/device/step.py, measured: the recorded peak, and the memory that its GPU has, in GiB.
MEASURED = {"h100/2026-11-28-d842e98-step.json": 79.1, "h200/2026-11-26-182d6e4-step.json": 139.8}


def _predicted_over_measured(file: str, gib: float) -> float:
    """The predicted peak of the benchmark's step with the native sampler, over the measured one."""
    rows = json.loads((PACKAGE_ROOT / "benchmarks" / "results" / file).read_text())["rows"]
    (step,) = (row for row in rows if "native sampler" in row["what"] and "peak_memory_bytes" in row)
    config = Config(prompts=8, num_generations=8, sampling={"max_tokens": 256}, dtype="bfloat16")
    run, free = RunShape(config, SMALL, 1, 128), int(gib * GIB)
    return sum(footprint(run, fit_into(run, free), free)) / step["peak_memory_bytes"]


@pytest.mark.parametrize(("file", "gib"), MEASURED.items())
def test_the_predicted_peak_is_the_one_that_a_gpu_measured(file, gib):
    assert 1.0 <= _predicted_over_measured(file, gib) < 1.05


def test_control_activations_that_are_forgotten_are_missed_in_what_a_gpu_measured(monkeypatch):
    monkeypatch.setattr(memory, "layer_bytes_per_token", lambda *sizes: layer_bytes_per_token(*sizes) // 2)
    for file, gib in MEASURED.items():
        assert _predicted_over_measured(file, gib) < 0.95


def test_adapters_of_a_1_7b_fit_24_gib():
    """The base lies beside the weights, and nothing else has their size. Over ranks the same holds."""
    settings = dict(prompts=8, num_generations=8, sampling={"max_tokens": 1024}, recompute="layer")
    config = Config(dtype="bfloat16", lora={"rank": 16}, **settings)
    layout = adapted_layout(LARGE.config, config.lora.shape)
    adapters, free = AdapterLayout(layout, config.lora.shape), 24 * GIB
    for ranks in (1, 2):
        run = RunShape(config, layout, ranks, 128, adapters=adapters, base=torch.bfloat16)
        predicted = footprint(run, fit_into(run, free), free)
        assert sum(predicted) <= 0.92 * free
        assert predicted.gradients < 8 * (4 + 4) * adapters.numel
        assert predicted.other_weights == 2 * layout.trained_numel
    with pytest.raises(ValueError, match=r"gradients 26\.8"):
        fit_into(RunShape(config.model_copy(update={"lora": Config().lora}), LARGE, 1, 128), free)


def test_what_is_frozen_has_no_state_and_no_gradient():
    config = Config(prompts=8, num_generations=8, sampling={"max_tokens": 256}, dtype="bfloat16")
    model = SMALL.config
    embedding = model.vocab_size * model.hidden_size  # and lm_head
    half = Layout(model, frozen_weights(model, ["model.embed_tokens.*", "model.layers.[0-9].*"]))
    runs = [RunShape(config, layout, 2, 128) for layout in (SMALL, half)]
    whole, frozen = (footprint(run, PassSizes(16, 2, 4), 79 * GIB) for run in runs)
    assert (whole.optimizer, frozen.optimizer) == (6 * SMALL.numel, 6 * half.trained_numel)
    # Two shards in flight, the tree of the 4 shards of a rank, and the sum over the ranks, of a half.
    assert whole.gradients == 4 * (2 * (SMALL.numel + embedding) + 2 * SMALL.numel) + 2 * SMALL.numel
    assert frozen.gradients == (4 * 4 + 2) * half.trained_numel
    assert abs(frozen.weights - whole.weights) <= 2 * 4096, "all weights are needed"
    assert frozen.activations < whole.activations
    sizes = [fit_into(RunShape(config, layout, 1, 128), 30 * GIB) for layout in (SMALL, half)]
    assert sizes[1].micro_batch * sizes[1].shards_in_flight > sizes[0].micro_batch * sizes[0].shards_in_flight


def test_a_cpu_takes_one_shard_at_a_time_and_what_is_named_stays():
    cpu = torch.device("cpu")
    assert fit(RunShape(Config(), SMALL), cpu) == (CPU_MICRO_BATCH, 1, 8)
    assert fit(RunShape(Config(micro_batch=3, shards_in_flight=16), SMALL, 2), cpu) == (3, 4, 4)


@pytest.mark.parametrize(("context", "chunks"), [(500, 0), (8192 + 200, 17)])
def test_the_states_of_chunks_are_counted_where_a_row_has_several(context, chunks):
    """m, l and acc in fp32, of each row that is drawn, each head and each chunk of 512 keys."""
    sizes = dict(prompts=1, num_generations=8, sampling={"max_tokens": context - 200}, dtype="bfloat16")
    sizes |= dict(recompute="layer", micro_batch=1, shards_in_flight=1, evaluation={"every": 0})
    caches, free = [], int(79.1 * GIB)
    for order in ("vllm", "chunked-512"):
        run = RunShape(Config(precision={"attention": order}, **sizes), LARGE, 1, 200)
        caches.append(footprint(run, fit_into(run, free), free).cache)
    assert caches[1] - caches[0] == 8 * LARGE.config.heads * chunks * (LARGE.config.head_dim + 2) * 4
