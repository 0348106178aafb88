"""The prefix cache: a turn reads its new tokens only, and has the bits of a sampler that reads everything."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout import generation, native, prefix_cache
from zerokl.engine.rollout.decode import DecodeMemory
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.prefix_cache import PrefixCache
from zerokl.engine.rollout.types import Completion, DrawParams, Request, RngKey
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.philox import Stream
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.decoder import Decoder

from tests.gpu.device import plant
from tests.helpers import property_settings

STOP = frozenset(range(6))
KINDS = [DrawParams(SamplingParams(), STOP), DrawParams(SamplingParams(0.7, 5, 0.9), frozenset())]
TOTAL = 8 * KEY_TILE  # tokens of a trajectory at most
# Blocks of equal ids, in few kinds, so that a block often follows another one than it did before.
TILE_IDS = [(20 + i,) * KEY_TILE for i in range(2)]


class Turn(NamedTuple):
    """A turn of a trajectory."""

    place: int  # of the trajectory among those of the game
    between: tuple[int, ...]  # ids that stand before it, of the first turn the prompt
    max_tokens: int
    goes_on: bool = True


class Game:
    """Trajectories that one sampler draws turn by turn; every turn beside a sampler that has no cache."""

    def __init__(self, decoder: Decoder, **settings: int):
        flat = decoder.flat.detach().clone()
        self.decoder = Decoder(decoder.config, flat, decoder.layout, decoder.numerics)
        self.sampler = NativeSampler(self.decoder, **settings)
        self.ids: dict[int, tuple[int, ...]] = {}
        self.drawn: dict[int, int] = {}

    def request(self, turn: Turn) -> Request:
        p, between = turn.place, turn.between
        ids = (*self.ids.get(p, ()), *between)
        key = RngKey(1, 2, Stream.SAMPLE, p % 4, p // 4)
        total = TOTAL if turn.goes_on else 0
        return Request(ids, key, KINDS[p % 2], turn.max_tokens, self.drawn.get(p, 0), total)

    def play(self, turns: Sequence[Turn], beside: Sequence[Request] = ()) -> int:
        """Draw these turns, and the requests beside them, in one call. Returns how many are not equal."""
        requests = [*map(self.request, turns), *beside]
        completions = self.sampler.generate(requests)
        for turn, request, completion in zip(turns, requests, completions, strict=False):
            self.ids[turn.place] = (*request.ids, *completion.ids)
            self.drawn[turn.place] = request.drawn + len(completion.ids)
        whole = NativeSampler(self.decoder).generate([replace(r, trajectory_tokens=0) for r in requests])
        return sum(bits(a) != bits(b) for a, b in zip(completions, whole, strict=True))

    def update(self) -> None:
        """Change the weights where they lie, as the optimizer does."""
        self.decoder.flat.mul_(1.01)
        self.sampler.sync_weights(self.sampler.version + 1)

    def fits(self, turn: Turn) -> bool:
        return len(self.ids.get(turn.place, ())) + len(turn.between) + turn.max_tokens <= TOTAL


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes, str]:
    return completion.ids, completion.logprobs.tobytes(), completion.finish


def block_bytes(decoder: Decoder) -> int:
    return BlockCache.bytes_per_block(decoder.config, decoder.cache_dtype)


PROMPT = st.builds(
    lambda tiles, rest: (*(i for tile in tiles for i in tile), *rest),
    st.lists(st.sampled_from(TILE_IDS), max_size=2),
    st.lists(st.integers(6, 9), min_size=1, max_size=5),
)
TURN = st.builds(Turn, st.integers(0, 7), PROMPT, st.integers(1, 40), st.booleans())
ONE_TURN = st.builds(Request, PROMPT, st.just(RngKey(1, 3)), st.sampled_from(KINDS), st.integers(1, 40))
CALL = st.tuples(
    st.lists(TURN, min_size=1, max_size=6, unique_by=lambda turn: turn.place),
    st.lists(ONE_TURN, max_size=2),
    st.sampled_from(["", "", "", "update", "end"]),
)


@property_settings(25)
@given(
    calls=st.lists(CALL, min_size=2, max_size=6),
    concurrency=st.integers(1, 6),
    batch_tokens=st.integers(1, 120),
    blocks=st.integers(TOTAL // KEY_TILE + 1, 40),
)
def test_turns_have_the_bits_of_a_sampler_that_reads_everything(
    decoder, calls, concurrency, batch_tokens, blocks
):
    """In any order, beside requests of one turn, where blocks are evicted, and where the weights change."""
    game = Game(
        decoder,
        max_concurrency=concurrency,
        max_batch_tokens=batch_tokens,
        cache_bytes=blocks * block_bytes(decoder),
    )
    for turns, beside, then in calls:
        assert game.play([turn for turn in turns if game.fits(turn)], beside) == 0
        memory = game.sampler._memory
        assert memory is None or memory.cache.blocks <= blocks
        if then == "update":
            game.update()
        elif then == "end":
            game.sampler.end_turns()


def shows_a_fault(decoder: Decoder, blocks: int) -> bool:
    """Whether a completion is unequal in a game in which each planted fault shows."""
    first, second = TILE_IDS
    game = Game(decoder, cache_bytes=blocks * block_bytes(decoder))
    later = [Turn(p, (9, 10, 11), 20) for p in (1, 0, 2, 4)]
    # A block that follows another one than before. And completions that end at the end of a block.
    if game.play([Turn(0, (*first, *second, 7), 4), Turn(2, (*second, 8), 4)]):
        return True
    if game.play([Turn(4, (*second, *second, 9), 4), Turn(1, (7,) * 29, 3)]):
        return True
    if any(game.play(later) for _ in range(3)):
        return True
    game.update()
    return game.play(later) > 0


# As many blocks as one of its samples needs at its end, and a few more.
FEW = 8


@pytest.mark.parametrize("blocks", [FEW, 100])
def test_without_a_fault_the_game_is_equal(decoder, blocks):
    assert not shows_a_fault(decoder, blocks)


def _keeps_blocks(plain, self, version):
    self.version = version


def _shares_what_is_not_full(plain, sample):
    return (*sample.prefix.ids, *sample.tokens)


def _adds_no_owner(plain, self, blocks):
    taken = plain(self, blocks)
    self._cache.release(blocks)
    return taken


FAULTS = {
    "blocks are kept over a change of the weights": (native.NativeSampler, "sync_weights", _keeps_blocks),
    "a block that is not full is shared": (generation.Sample, "written", _shares_what_is_not_full),
    "a block is given back while it is in use": (prefix_cache.PrefixCache, "take", _adds_no_owner),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(decoder, monkeypatch, fault):
    plant(monkeypatch, *FAULTS[fault])
    assert shows_a_fault(decoder, FEW)


def test_control_a_block_that_is_found_without_the_one_before_it_is_seen(decoder, monkeypatch):
    monkeypatch.setattr(prefix_cache, "_Place", lambda before, ids: prefix_cache._Entry(0, ids, 0))
    assert shows_a_fault(decoder, 100)


class Books:
    """What stands in each block of a cache, by its users' books: the ids up to the block's end."""

    def __init__(self, decoder: Decoder, blocks: int):
        self.blocks = BlockCache(decoder.config, blocks, decoder.cache_dtype)
        self.kept = PrefixCache(self.blocks)
        self.content: dict[int, tuple[int, ...]] = {}
        self.running: list[tuple[tuple[int, ...], list[int]]] = []

    def start(self, ids: tuple[int, ...]) -> None:
        """A sequence takes its blocks where there is room, as a pass does, and fills them."""
        cached, needed = self.kept.find(ids), BlockCache.blocks_for(len(ids))
        assert len(cached) * KEY_TILE < len(ids)
        for i, b in enumerate(cached):
            assert self.content[b] == ids[: (i + 1) * KEY_TILE]
        room = self.kept.free_beside(cached) >= needed - len(cached)
        assert room or self.running, "an empty cache has room"
        if not room:
            return
        new = self.kept.take(cached) + self.kept.take_new(needed - len(cached))
        assert not set(new[len(cached) :]) & {b for _, blocks in self.running for b in blocks}
        self.content |= {b: ids[: (i + 1) * KEY_TILE] for i, b in enumerate(new) if i >= len(cached)}
        self.running.append((ids, new))

    def end(self, place: int, goes_on: bool) -> None:
        ids, blocks = self.running.pop(place % len(self.running))
        if goes_on:
            self.kept.keep(ids, blocks)
        self.kept.release(blocks)

    def check(self) -> None:
        used = {b for _, blocks in self.running for b in blocks}
        assert self.kept.free_beside([]) == self.blocks.blocks - len(used)


@property_settings(300)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, KEY_TILE), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    ends=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    blocks=st.integers(5, 12),
)
def test_no_block_is_lost_and_none_has_two_contents(decoder, steps, ends, blocks):
    books = Books(decoder, blocks)
    for (tiles, rest, goes_on), end in zip(steps, ends, strict=False):
        books.start(sum((TILE_IDS[i] for i in tiles), ()) + (9,) * rest)
        books.check()
        if books.running and end < 4:
            books.end(end, goes_on)
            books.check()
    while books.running:
        books.end(0, True)
    books.kept.clear()
    assert (books.blocks.free, len(books.kept)) == (blocks, 0)


def test_a_block_whose_beginning_was_given_back_is_found_again(decoder):
    """Two sequences have read the same first block apart. One ends, and the kept first block is evicted."""
    ids = (*TILE_IDS[0], *TILE_IDS[1])
    books = Books(decoder, 6)
    books.start((*TILE_IDS[0], 9))
    books.start((*ids, 9))
    books.start((*ids, 9)[:1])
    apart = books.running[1]
    books.running.append((ids, books.blocks.share(apart[1])))  # a second sample of it
    books.end(0, True)  # its first block is kept
    books.end(0, True)  # its second block is kept, behind the first sequence's block
    books.end(0, False)
    assert len(books.kept) == 2
    books.kept.release(books.kept.take_new(books.kept.free_beside([])))
    assert books.kept.find((*ids, 9)) == []
    books.end(0, True)
    assert books.kept.find((*ids, 9)) == apart[1][:2]
    books.kept.clear()
    assert books.blocks.free == 6


def request_of(place: int, ids: tuple[int, ...], drawn: int = 0, goes_on: bool = True) -> Request:
    key, params = RngKey(1, 2, prompt=place), DrawParams(SamplingParams(), frozenset())
    return Request(ids, key, params, 25, drawn, TOTAL if goes_on else 0)


def three_turns(sampler: NativeSampler, goes_on: bool = True) -> list[tuple[int, int, int]]:
    """Of each of three turns of 2 prompts x 3 samples: the tokens of all ids, those read, those cached."""
    counts, prompts = [], [tuple(range(6, 51)), (7,) * 30]
    ids = [prompts[place // 3] for place in range(6)]
    for turn in range(3):
        requests = [request_of(i, x, 25 * turn, goes_on and turn < 2) for i, x in enumerate(ids)]
        completions = sampler.generate(requests)
        counts.append((sum(map(len, ids)), sampler.tokens_read, sampler.tokens_cached))
        ids = [(*x, *c.ids, 11, 12, 13) for x, c in zip(ids, completions, strict=True)]
    return counts


# The tokens of all ids in each turn of three_turns: 45 and 30 at first, and 25 + 3 more in each turn.
IDS = [3 * (45 + 30), 3 * (73 + 58), 3 * (101 + 86)]


@pytest.mark.parametrize("concurrency", [2, 64])
def test_a_turn_reads_its_new_tokens_only(decoder, concurrency):
    """All that lies in full blocks comes from the cache. The rest of a block is read with the new tokens."""
    counts = three_turns(NativeSampler(decoder, concurrency))
    cached = [0, 3 * (2 + 1) * KEY_TILE, 3 * (3 + 2) * KEY_TILE]
    assert counts == [
        (IDS[0], 45 + 30, 0),
        *((n, n - c, c) for n, c in zip(IDS[1:], cached[1:], strict=True)),
    ]


def test_control_where_nobody_says_that_turns_follow_all_is_read(decoder):
    counts = three_turns(NativeSampler(decoder), goes_on=False)
    assert counts == [(IDS[0], 45 + 30, 0), (IDS[1], IDS[1], 0), (IDS[2], IDS[2], 0)]


def test_what_was_evicted_is_read_again(decoder):
    _, *later = three_turns(NativeSampler(decoder, cache_bytes=9 * block_bytes(decoder)))
    for ids, read, cached in later:
        assert read + cached == ids
        assert 0 < cached < 3 * (2 + 1) * KEY_TILE


def test_trajectories_that_the_cache_cannot_all_keep_use_what_it_kept(decoder):
    """They come in the same order in each turn. In that order each would evict the one that comes next."""
    sampler, cached = NativeSampler(decoder, 2, cache_bytes=16 * block_bytes(decoder)), []
    ids = [(10 + i,) * 100 for i in range(8)]
    for turn in range(3):
        completions = sampler.generate([request_of(i, x, 25 * turn) for i, x in enumerate(ids)])
        cached.append(sampler.tokens_cached // KEY_TILE)
        ids = [(*x, *c.ids) for x, c in zip(ids, completions, strict=True)]
    assert cached[0] == 0
    assert min(cached[1:]) > 16 // 2


@pytest.fixture
def memories(monkeypatch) -> Callable[[], list[bool]]:
    """Says of each memory that a sampler made since the test began whether it is there."""
    made: list[weakref.ref] = []

    class Noted(DecodeMemory):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    def there() -> list[bool]:
        gc.collect()
        return [memory() is not None for memory in made]

    monkeypatch.setattr(native, "DecodeMemory", Noted)
    return there


def test_the_memory_of_the_first_turn_serves_all(decoder, memories):
    sampler = NativeSampler(decoder)
    three_turns(sampler)
    assert memories() == [True]


def test_the_memory_of_one_trajectory_serves_its_later_turns(decoder, memories):
    """Its first turn needs no copy of a partial block, and the later ones do."""
    sampler, first = NativeSampler(decoder), (7,) * 2 * KEY_TILE
    (c,) = sampler.generate([request_of(0, first)])
    most = TOTAL - len(first) - len(c.ids) - 1
    sampler.generate([replace(request_of(0, (*first, *c.ids, 8), len(c.ids)), max_tokens=most)])
    assert (memories(), sampler.tokens_cached) == ([True], 2 * KEY_TILE)


@pytest.mark.full
def test_on_a_cpu_memory_outlives_a_call_only_for_turns_that_may_follow(decoder, memories):
    sampler = NativeSampler(decoder)
    sampler.generate([request_of(0, (7,) * 40, goes_on=False)])
    assert memories() == [False]
    for drop in (sampler.end_turns, lambda: sampler.sync_weights(1)):
        sampler.generate([request_of(0, (7,) * 40)])
        assert memories()[-1]
        drop()
        assert not any(memories())


def test_a_call_that_fails_leaves_no_block(decoder, memories):
    broken = Decoder(decoder.config, decoder.flat.detach().clone(), decoder.layout)
    sampler = NativeSampler(broken)
    sampler.generate([request_of(0, (7,) * 40)])
    broken.flat.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        sampler.generate([request_of(0, (7,) * 70, 25)])
    assert memories() == [False]
    broken.flat.copy_(decoder.flat)
    assert three_turns(sampler) == three_turns(NativeSampler(decoder))
