"""The sampler's cache: the whole decoder reads it with the trainer's bits.

What a block held before never matters.
"""

import pytest
import torch
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.checkpoint import load_decoder
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.scoring import cached_scores, logprobs, pack

from tests.helpers import DTYPES, randint, total_unequal
from tests.model.checkpoints import FAMILIES, JUDGED_FAMILIES, save_random


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: save_random(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@torch.no_grad()
def read(
    decoder: Decoder,
    cache: BlockCache,
    sequences: list[torch.Tensor],
    blocks: list[list[int]],
    chunk: int,
    start: int = 0,
    slots: list[int] | None = None,
) -> list[torch.Tensor]:
    """The hidden states of the sequences from token `start` on, read `chunk` tokens at a time.

    The blocks, and the slots of layers with a state, hold the tokens before `start`.
    """
    slots = slots or [cache.take_slot() for _ in sequences]
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for a in range(start, max(map(len, sequences)), chunk):
        active = [s for s, ids in enumerate(sequences) if len(ids) > a]
        pieces = [sequences[s][a : a + chunk] for s in active]
        lengths = [len(p) for p in pieces]
        tables = [a] * len(active), [blocks[s] for s in active]
        context = CachedContext(cache, lengths, *tables, slots=[slots[s] for s in active])
        hidden = decoder.hidden(torch.cat(pieces), context)
        for s, piece in zip(active, hidden.split(lengths), strict=True):
            rows[s].append(piece)
    return [torch.cat(r) for r in rows]


@torch.no_grad()
def whole(decoder: Decoder, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(ids) for ids in sequences]
    return list(decoder.hidden(torch.cat(sequences), PackedContext(lengths, decoder.config)).split(lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", JUDGED_FAMILIES)
def test_decoder_on_the_cache_has_the_bits_of_whole_sequences(folders, family, dtype):
    decoder = load_decoder(folders[family], dtype)
    sequences = [randint(s, 128, n) for s, n in enumerate((70, 1, 33, 64))]
    expected = whole(decoder, sequences)
    for chunk in (1, 7, 100):
        cache = BlockCache(decoder.config, 10, dtype, slots=4)
        cache.data.fill_(float("nan"))  # as an earlier owner may have left it
        cache._free.reverse()
        blocks = [cache.allocate(-(-len(ids) // KEY_TILE)) for ids in sequences]
        assert total_unequal(expected, read(decoder, cache, sequences, blocks, chunk)) == 0


def _cached(
    decoder: Decoder, sequences: list[torch.Tensor], dtype: torch.dtype, chunk: int
) -> tuple[list[torch.Tensor], int]:
    """The hidden states read through a cache in `dtype`, and the bytes of the cache."""
    cache = BlockCache(decoder.config, 10, dtype)
    blocks = [cache.allocate(-(-len(ids) // KEY_TILE)) for ids in sequences]
    return read(decoder, cache, sequences, blocks, chunk), cache.data.nbytes


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_narrower_cache_is_half_as_large_with_the_same_bits(folders, narrow, chunk):
    plain = load_decoder(folders["qwen3"], torch.float32)
    decoder = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(cache=narrow))
    sequences = [randint(s, 128, n) for s, n in enumerate((70, 1, 33, 64))]
    assert decoder.cache_dtype == narrow
    stored, small = _cached(decoder, sequences, narrow, chunk)
    rounded, large = _cached(decoder, sequences, torch.float32, chunk)
    assert 2 * small == large
    assert total_unequal(stored, rounded) == 0
    assert total_unequal(stored, whole(decoder, sequences)) == 0
    unrounded, _ = _cached(plain, sequences, narrow, chunk)
    remark = "control: the cache rounds, and the trainer does not"
    assert total_unequal(unrounded, whole(plain, sequences)) > 0, remark


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float32, None)],
)
def test_a_cache_dtype_that_saves_nothing_is_stored_in_the_compute_dtype(folders, dtype, cache):
    plain = load_decoder(folders["llama"], dtype)
    decoder = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(cache=cache))
    assert decoder.cache_dtype == dtype


def test_a_narrower_cache_rounds_no_state(folders):
    """Keys and values are rounded for sampler and trainer alike; what a layer with a state keeps is not."""
    plain = load_decoder(folders["qwen3_5_text"], torch.float32)
    decoder = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(cache=torch.bfloat16))
    pairs = [([1, 2, 3], [4, 5, 6]), ([7] * 60, [8, 9] * 8)]
    expected = logprobs(decoder, pack(pairs), SamplingParams())[0].detach().split([3, 16])
    assert total_unequal(cached_scores(decoder, pairs, SamplingParams(), 5), expected) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "dtype", torch.bfloat16)
        # Control: slots in the dtype of the cache do not take what is to be kept.
        with pytest.raises(RuntimeError, match="dtypes match"):
            cached_scores(decoder, pairs, SamplingParams(), 5)


def test_control_a_wrong_block_is_found(folders):
    decoder = load_decoder(folders["qwen3"], torch.float32)
    sequences = [randint(s, 128, 70) for s in range(2)]
    cache = BlockCache(decoder.config, 6, torch.float32)
    blocks = [cache.allocate(3), cache.allocate(3)]
    blocks[1][0] = blocks[0][0]
    assert total_unequal(whole(decoder, sequences), read(decoder, cache, sequences, blocks, 7)) > 0


def test_samples_share_the_full_blocks_of_a_prompt_and_copy_the_last(folders):
    decoder = load_decoder(folders["qwen2"], torch.float32)
    prompt = randint(0, 128, 40)
    sequences = [torch.cat([prompt, randint(s, 128, 20)]) for s in (1, 2)]
    cache = BlockCache(decoder.config, 3, torch.float32)
    first = cache.allocate(2)
    read(decoder, cache, [prompt], [first], chunk=40)
    second = [*cache.share(first[:1]), *cache.allocate(1)]
    cache.copy(first[1:], second[1:])
    rows = read(decoder, cache, sequences, [first, second], chunk=1, start=40)
    assert total_unequal([r[40:] for r in whole(decoder, sequences)], rows) == 0


def test_block_is_free_when_its_last_owner_releases_it(folders):
    cache = BlockCache(load_decoder(folders["llama"], torch.float32).config, 4, torch.bfloat16)
    blocks = cache.allocate(3)
    assert len(cache._free) == 1
    cache.share(blocks[:1])
    cache.release(blocks)
    assert len(cache._free) == 3
    cache.release(blocks[:1])
    assert len(cache._free) == 4
    with pytest.raises(IndexError):
        cache.allocate(5)


def test_bytes_per_block_is_the_memory_of_a_block(folders):
    config = load_decoder(folders["llama"], torch.float32).config
    block_bytes = BlockCache.bytes_per_block(config, torch.bfloat16)
    assert BlockCache(config, 7, torch.bfloat16).data.nbytes == 7 * block_bytes
