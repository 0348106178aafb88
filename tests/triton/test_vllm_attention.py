"""zerokl's attention in vLLM as a CUDA graph replays it: tensors at fixed addresses, and padding rows.

The same forward runs here without a graph, interpreted. Its bits are those of whole sequences.
"""

from types import SimpleNamespace

import pytest
import torch
from zerokl.engine.rollout.vllm.attention import ZeroklAttentionImpl, ZeroklMetadataBuilder
from zerokl.engine.rollout.vllm.plugin import ATTENTION
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.attention_rule import WALK, AttentionRule

from tests.helpers import total_unequal
from tests.kernels.test_attention import Case, make_case, whole

BLOCK, COLUMNS, BLOCKS = 2 * KEY_TILE, 3, 12  # vLLM's blocks hold two of ours
LENGTHS = [5, 70, 33]


class Engine:
    """vLLM's buffers for at most `requests` requests, our builder, and our attention over one cache."""

    def __init__(self, case: Case, requests: int, rule: AttentionRule = WALK, shared_blocks: int = 0):
        """shared_blocks: of the first request, which the last one has too."""
        (_, heads, D), kv_heads = case.q.shape, case.k.shape[1]
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_num_attention_heads=lambda _: heads,
                hf_config=SimpleNamespace(**{ATTENTION: list(rule)}),
                dtype=case.q.dtype,
            ),
            parallel_config=None,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=requests),
        )
        spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=kv_heads)
        self.builder = ZeroklMetadataBuilder(spec, [], config, torch.device("cpu"))
        self.attention = ZeroklAttentionImpl(heads, D, case.scale, kv_heads, rule=rule)
        self.cache = torch.full((BLOCKS, kv_heads, BLOCK, 2 * D), float("nan"), dtype=case.q.dtype)
        self.case, self.requests = case, requests
        self.tables = torch.zeros(requests, COLUMNS, dtype=torch.int32)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32)
        self.slots = torch.full((256,), -1)
        free = iter(torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(0)) + 1)
        for s, length in enumerate(case.lengths):
            for j in range(-(-length // BLOCK)):
                self.tables[s, j] = block = int(next(free))
                self.cache[block] = 0
        last = len(case.lengths) - 1
        self.tables[last, :shared_blocks] = self.tables[0, :shared_blocks]

    def metadata(self, contexts: list[int], ends: list[int], tokens: int):
        """vLLM's metadata of a forward of the positions [context, end) of each sequence, in `tokens` rows."""
        counts = [end - context for context, end in zip(contexts, ends, strict=True)]
        n, T = len(counts), sum(counts)
        self.starts[1 : n + 1] = torch.tensor(counts).cumsum(0)
        self.starts[n + 1 :] = T
        self.seq_lens[:] = 0
        self.seq_lens[:n] = torch.tensor(ends)
        position = torch.cat([torch.arange(a, b) for a, b in zip(contexts, ends, strict=True)])
        sequence = torch.repeat_interleave(torch.arange(n), torch.tensor(counts))
        self.slots[:T] = self.tables[sequence, position // BLOCK] * BLOCK + position % BLOCK
        self.slots[T:] = -1
        requests = self.requests if tokens > T else n
        return self.builder.build(
            0,
            SimpleNamespace(
                num_reqs=requests,
                num_actual_tokens=tokens,
                query_start_loc=self.starts[: requests + 1],
                seq_lens=self.seq_lens[:requests],
                block_table_tensor=self.tables[:requests],
                slot_mapping=self.slots[:tokens],
            ),
        )

    def forward(self, contexts: list[int], ends: list[int], padding: int = 0) -> torch.Tensor:
        """o of these positions, with `padding` rows of NaN after them."""
        rows = torch.cat(
            [torch.arange(span.start + a, span.start + b) for span, a, b in self._places(contexts, ends)]
        )
        q, k, v = (
            torch.cat([x[rows], torch.full((padding, *x.shape[1:]), float("nan"), dtype=x.dtype)])
            for x in self.case[1:]
        )
        metadata = self.metadata(contexts, ends, len(q))
        output = torch.empty_like(q)
        return self.attention.forward(None, q, k, v, self.cache, metadata, output)[: len(rows)]

    def _places(self, contexts: list[int], ends: list[int]):
        return zip(self.case.spans(), contexts, ends, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_decoding_has_the_bits_of_whole_sequences(dtype):
    case = make_case(LENGTHS, 2, 2, 32, dtype, seed=1)
    engine, before = Engine(case, requests=6), [n - 3 for n in LENGTHS]
    expected = whole(case)
    engine.forward([0, 0, 0], before)
    for step in range(3):
        contexts = [n + step for n in before]
        o = engine.forward(contexts, [n + 1 for n in contexts], padding=3 if step < 2 else 5)
        rows = torch.tensor([span.start + n for span, n in zip(case.spans(), contexts, strict=True)])
        assert total_unequal([o], [expected[rows]]) == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.full) for x in (torch.float32, torch.float16))],
)
def test_requests_share_the_chunks_of_a_prompt(dtype):
    """Two requests have one block, which is one chunk; control: what is planted in it reaches both."""
    case = make_case([70, 33, 90], 2, 2, 32, dtype, seed=2)
    for x in case[1:]:
        x[103 : 103 + BLOCK] = x[:BLOCK]
    rule, ends = AttentionRule(BLOCK), list(case.lengths)
    engine = Engine(case, requests=6, rule=rule, shared_blocks=1)
    before = [n - 1 for n in ends]
    engine.forward([0, 0, 0], before)
    last = torch.tensor([span.stop - 1 for span in case.spans()])
    expected = whole(case, rule)[last]
    assert total_unequal([engine.forward(before, ends, padding=3)], [expected]) == 0
    assert engine.builder._shared.items[0].tolist() == [0, 0, 1]
    assert engine.builder._shared.tokens[0].tolist()[:3] == [0, 2, -1]
    engine.cache[engine.tables[0, 0]] += 1
    o = engine.forward(before, ends, padding=3)
    assert [total_unequal([a], [b]) > 0 for a, b in zip(o, expected, strict=True)] == [True, False, True]


def test_padding_rows_write_to_block_0_only():
    case = make_case(LENGTHS, 2, 2, 32, torch.bfloat16, seed=1)
    padded, plain = Engine(case, requests=6), Engine(case, requests=6)
    for engine, padding in ((padded, 3), (plain, 0)):
        engine.forward([0, 0, 0], [4, 69, 32])
        engine.forward([4, 69, 32], LENGTHS, padding)
    assert total_unequal([padded.cache[1:]], [plain.cache[1:]]) == 0
    assert torch.isnan(padded.cache[0]).any()


def test_metadata_stay_at_their_addresses():
    engine = Engine(make_case(LENGTHS, 2, 2, 32, torch.bfloat16, seed=1), requests=3)
    addresses = []
    for contexts in ([4, 60, 30], [3, 61, 20]):
        m = engine.metadata(contexts, [n + 1 for n in contexts], 3)
        tensors = (m.block, m.offset, *m.plan[:3])
        addresses.append([x.data_ptr() for x in tensors])
        assert m.plan.block_table.shape == (3, COLUMNS * BLOCK // KEY_TILE)
    assert addresses[0] == addresses[1]


def test_control_a_row_past_the_tokens_keeps_no_old_place():
    engine = Engine(make_case(LENGTHS, 2, 2, 32, torch.bfloat16, seed=1), requests=3)
    engine.metadata([0, 0, 0], LENGTHS, sum(LENGTHS))
    assert engine.builder._block[3:].any()
    engine.metadata([4, 60, 30], [5, 61, 31], 3)
    assert not engine.builder._block[3:].any()
