"""The law for a whole tiny model on Triton's kernels, interpreted: forward and backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.shard import micro_batches
from zerokl.kernels import tiles
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import DEFAULT_TABLE, TileTable
from zerokl.model.config import ModelConfig
from zerokl.model.context import Buffers
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.prompts import Prompts
from zerokl.model.scoring import cached_scores, logprobs, pack
from zerokl.model.weights import Layout

from tests.helpers import DTYPES, randint, randn, total_unequal

RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
# A dense layer, and one with experts.
SPARSE = RAW | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
# The second pair crosses a key tile.
PAIRS = [
    (randint(i, 61, p).tolist(), randint(50 + i, 61, c).tolist())
    for i, (p, c) in enumerate([(2, 3), (28, 7), (1, 4)])
]
SAMPLING = SamplingParams(0.7)


def _decoder(dtype: torch.dtype, raw: dict = RAW) -> Decoder:
    config = ModelConfig.from_dict(raw)
    layout = Layout(config)
    flat = randn(0, layout.numel, scale=0.15)
    for view in layout.views(flat).values():
        if view.dim() == 1:
            view.fill_(1.0)
    return Decoder(config, flat.to(dtype), layout)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def decoder(request) -> Decoder:
    return _decoder(request.param)


@torch.no_grad()
def _score(decoder: Decoder, pairs: list) -> list[torch.Tensor]:
    batch = pack(pairs)
    return list(logprobs(decoder, batch, SAMPLING)[0].split(batch.drawn_lengths))


@pytest.fixture(scope="module")
def together(decoder) -> list[torch.Tensor]:
    return _score(decoder, PAIRS)


def _tiles_along_k(table: TileTable) -> set[int]:
    """BLOCK_K of every product of training, scoring and sampling with a decoder that has this table."""
    plain = _decoder(torch.bfloat16)
    model = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(tiles=table))
    pairs, completions = PAIRS[::2], GenerationParams(SAMPLING, 1, 2, frozenset())
    prompts = [prompt for prompt, _ in pairs]
    with recorded_launches(and_run=True) as launches:
        logprobs(model, pack(pairs), SAMPLING)[0].sum().backward()
        read = Prompts(model, prompts)
        logprobs(model, pack(pairs, read.prompt_of_sample), SAMPLING, prompts=read)[0].sum().backward()
        read.backward()
        _score(model, pairs)
        cached_scores(model, pairs, SAMPLING, 13)
        complete(NativeSampler(model), prompts, completions, RngKey(0, 0))
    products = [launch for launch in launches if launch.kernel.__name__ == "_matmul"]
    assert len(products) > 80
    return {launch.options["BLOCK_K"] for launch in products}


@pytest.mark.full
def test_every_product_has_the_decoders_tiles():
    """The table of a decoder reaches the products of all its uses; by default it is vLLM 0.32's."""
    plain = _decoder(torch.bfloat16)
    shapes = [tuple(w.shape) for w in plain.matrices()]
    both_ways = (*shapes, *(shape[::-1] for shape in shapes))  # the products of input gradients too
    assert _tiles_along_k(TileTable("of this test", {"hopper": {16: both_ways}})) == {16}
    assert _tiles_along_k(DEFAULT_TABLE) == {64}


def test_batch_and_padding(decoder, together):
    assert total_unequal([_score(decoder, [p])[0] for p in PAIRS], together) == 0
    assert total_unequal(_score(decoder, PAIRS[::-1])[::-1], together) == 0
    padded = _score(decoder, [(prompt, [*completion, *[0] * 35]) for prompt, completion in PAIRS])
    assert total_unequal([a[: len(c)] for a, (_, c) in zip(padded, PAIRS, strict=True)], together) == 0


def test_chunked_prefill(decoder, together):
    assert total_unequal(cached_scores(decoder, PAIRS, SAMPLING, 13), together) == 0


def test_decode_against_prefill(decoder, together):
    pairs = [PAIRS[0], PAIRS[2]]
    assert total_unequal(cached_scores(decoder, pairs, SAMPLING, 1), [together[0], together[2]]) == 0


def test_prompts_read_once(decoder, together):
    pairs = [PAIRS[1], (PAIRS[1][0], [9, 8, 7]), PAIRS[2]]
    with torch.no_grad():
        prompts = Prompts(decoder, [prompt for prompt, _ in pairs])
        batch = pack(pairs, prompts.prompt_of_sample)
        once = logprobs(decoder, batch, SAMPLING, prompts=prompts)[0].split(batch.drawn_lengths)
    assert total_unequal([once[0], once[2]], together[1:]) == 0
    assert total_unequal([once[1]], _score(decoder, pairs[1:2])) == 0


def _gradient(
    pairs: list, micro_batch: int, dtype: torch.dtype, in_flight: int = 1, raw: dict = RAW
) -> torch.Tensor:
    """The gradient of two virtual shards, each of half the pairs, `micro_batch` sequences at a time.

    Prompts are read once. in_flight: shards that are computed together.
    """
    sums, half = ShardSum(_decoder(dtype, raw), 2, in_flight), len(pairs) // 2

    def work(decoder: Decoder, shards: list, buffers: Buffers) -> list[None]:
        together = [pair for shard in shards for pair in shard]
        shard_of = [i for i, shard in enumerate(shards) for _ in shard]
        prompts = Prompts(decoder, [prompt for prompt, _ in together], shards=shard_of, buffers=buffers)
        for rows in micro_batches(len(together), micro_batch):
            batch = pack(together[rows], prompts.prompt_of_sample[rows], shard_of[rows])
            logprobs(decoder, batch, SAMPLING, prompts=prompts)[0].sum().backward()
        prompts.backward()
        return [None] * len(shards)

    sums.add(work, [pairs[:half], pairs[half:]])
    return sums.tree.take()


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", [d if d is torch.bfloat16 else pytest.param(d, marks=pytest.mark.proof) for d in DTYPES], ids=str
)
def test_gradient_micro_batch(dtype):
    # Together, one by one, and (control) in another order.
    pairs = [PAIRS[0], (PAIRS[0][0], [4, 4, 2]), PAIRS[2], (PAIRS[2][0], [7, 8])]
    whole = _gradient(pairs, 2, dtype)
    assert whole.abs().max() > 0
    assert total_unequal([_gradient(pairs, 1, dtype)], [whole]) == 0
    # With both shards in one pass. The law's property (test_law.py) draws other splits.
    for micro_batch in (1, 3, 4) if dtype == torch.bfloat16 else (3,):
        assert total_unequal([_gradient(pairs, micro_batch, dtype, in_flight=2)], [whole]) == 0
    assert total_unequal([_gradient([pairs[i] for i in (0, 2, 1, 3)], 2, dtype)], [whole]) > 0


def test_experts_alone_in_chunks_and_token_by_token():
    decoder, pairs = _decoder(torch.bfloat16, SPARSE), [PAIRS[0], ([5] * 16, [9, 8])]
    together = _score(decoder, pairs)
    assert total_unequal(_score(decoder, pairs[1:]), together[1:]) == 0
    assert total_unequal(cached_scores(decoder, pairs, SAMPLING, 13), together) == 0
    assert total_unequal(cached_scores(decoder, pairs[:1], SAMPLING, 1), together[:1]) == 0


def test_gradient_of_experts_in_any_micro_batch():
    pairs = [PAIRS[0], (PAIRS[0][0], [4, 4, 2]), PAIRS[2], (PAIRS[2][0], [7, 8])]
    raw = SPARSE | {"num_hidden_layers": 1, "mlp_only_layers": []}
    whole = _gradient(pairs, 2, torch.bfloat16, raw=raw)
    assert whole.abs().max() > 0
    assert total_unequal([_gradient(pairs, 3, torch.bfloat16, in_flight=2, raw=raw)], [whole]) == 0


class _Called(TorchDispatchMode):
    """The names of torch's operations that are called inside."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__.rstrip("_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_no_operation_of_torch_that_adds_with_atomics_is_called():
    """The operations are those that torch.use_deterministic_algorithms names.

    test_binaries.py searches the binaries of our own kernels for atomics.
    """
    atomic = {
        "index_add",
        "scatter_add",
        "scatter_reduce",
        "embedding_dense_backward",
        "put",
        "cumsum",
        "histc",
        "bincount",
        "kthvalue",
    }
    with _Called() as called:
        _gradient([PAIRS[0], (PAIRS[0][0], [4, 4, 2])], 2, torch.bfloat16, raw=SPARSE)
    assert {"index_select", "sort"} <= called.names
    assert called.names & atomic == set()
    with _Called() as called:
        torch.ones(3, requires_grad=True).index_select(0, torch.tensor([1, 1])).sum().backward()
    assert called.names & atomic == {"index_add"}, "control"


def test_control_another_tile_along_k_is_found(monkeypatch):
    # In fp32: at these widths bf16's rounding of the outputs hides the difference.
    decoder = _decoder(torch.float32)
    before = _score(decoder, PAIRS[:1])
    monkeypatch.setattr(tiles, "_32_BIT", 16)
    assert total_unequal(_score(decoder, PAIRS[:1]), before) > 0
