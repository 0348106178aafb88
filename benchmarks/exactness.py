"""The law on a model, for device.sh: what must not change a bit is changed, and every bit compared."""

from collections.abc import Iterator, Sequence

import torch
from zerokl.benchmarks.machine import Machine, Row, name_of
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.runs.checks.verify import as_step
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.shard import ShardWork
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder


def exactness(m: Machine) -> Iterator[Row]:
    """The law on a model of two layers, in each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoder = m.decoder(m.first_shape, 2, min(m.vocab, 4096), dtype)
        yield from law(decoder, f"law {name_of(dtype)}", SMALL_LENGTHS if m.small else LENGTHS)


# Tokens of the sequences: at the edges of tiles, and beside them.
SMALL_LENGTHS, LENGTHS = (9, 40, 5), (9, 300, 33, 130, 5, 64, 257)


def law(decoder: Decoder, what: str, lengths: Sequence[int]) -> Iterator[Row]:
    """A row for each way to compute what a packed batch computes, and its unequal bits.

    A sequence is computed alone, in a batch, in chunks, token by token, and after prompts that are read once.
    The gradient is computed by micro-batches of two sizes.
    """
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(100, (n,), generator=generator).tolist() for n in lengths]
    unequal = _forward_ways(decoder, ids)
    pairs = [(x[:4], completion) for x in ids for completion in (x[4:], x[:3])]
    step, gradients = as_step(decoder, pairs), []
    whole = torch.cat([torch.from_numpy(r.logprobs) for r in step.rollouts])
    for size in (len(pairs), 1):
        shard = ShardSum(decoder, 1)
        (scored,) = shard.add(ShardWork(SamplingParams(), LossConfig(), size), [step])
        logp = torch.cat([part.logp for part in scored])
        unequal[f"prompts once, {size} sequences at a time"] = count_unequal(logp, whole)
        gradients.append(shard.tree.take().clone())
    unequal["gradient by micro-batches"] = count_unequal(*gradients)
    for way, n in unequal.items():
        yield {"what": f"{what}: {way}", "unequal": n}


@torch.no_grad()
def _forward_ways(decoder: Decoder, sequences: list[list[int]]) -> dict[str, int]:
    """For each other way to compute the hidden states: elements whose bits differ from the packed batch's."""
    lengths = [len(x) for x in sequences]
    packed = torch.tensor([token for x in sequences for token in x])
    together = decoder.hidden(packed, PackedContext(lengths, decoder.config)).split(lengths)
    unequal = {"alone": 0, "chunks of 32": 0, "token by token": 0}
    for x, expected in zip(sequences, together, strict=True):
        alone = decoder.hidden(torch.tensor(x), PackedContext([len(x)], decoder.config))
        unequal["alone"] += count_unequal(alone, expected)
        unequal["chunks of 32"] += count_unequal(_cached(decoder, x, 32), expected)
        if len(x) <= 70:
            unequal["token by token"] += count_unequal(_cached(decoder, x, 1), expected)
    return unequal


def _cached(decoder: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    """The hidden states of a sequence that is read through the cache, `chunk` tokens at a time."""
    cache = BlockCache(
        decoder.config,
        len(ids) // KEY_TILE + 1,
        decoder.cache_dtype,
        decoder.device,
        slots=1,
        compute=decoder.dtype,
    )
    blocks, slots = cache.allocate(cache.blocks), [cache.take_slot()]
    parts = [(a, ids[a : a + chunk]) for a in range(0, len(ids), chunk)]
    return torch.cat(
        [
            decoder.hidden(torch.tensor(p), CachedContext(cache, [len(p)], [a], [blocks], slots=slots))
            for a, p in parts
        ]
    )
