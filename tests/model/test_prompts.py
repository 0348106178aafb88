"""Prompts that are read once for all their samples have the bits of whole sequences.

No micro-batch changes their gradients.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.recurrent_state import Left
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model import prompts as prompts_module
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.prompts import PASS_TOKENS, Prompts, prompt_passes
from zerokl.model.scoring import logprobs, pack

from tests.helpers import (
    DTYPES,
    property_settings,
    randint,
    randn,
    sums_of,
    threads,
    total_unequal,
    zero_buffers,
)
from tests.model.checkpoints import JUDGED_FAMILIES, Pairs, save_random

SAMPLING = SamplingParams(0.9)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# For each prompt: its length, and the lengths of the completions of its samples.
groups = st.lists(
    st.tuples(st.integers(1, 80), st.lists(st.integers(1, 50), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", params=JUDGED_FAMILIES)
def folder(request, tmp_path_factory):
    return save_random(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, dtype: torch.dtype, **numerics: object) -> Decoder:
    """A decoder that reads prompts once, also where a layer keeps a state."""
    plain = load_decoder(folder, dtype)
    return Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(prompts_once=True, **numerics))


def make_pairs(drawn: Sequence[tuple[int, list[int]]], seed: int = 0) -> Pairs:
    prompts = [randint(seed + i, 128, n).tolist() for i, (n, _) in enumerate(drawn)]
    samples = [(prompt, n) for prompt, (_, lengths) in zip(prompts, drawn, strict=True) for n in lengths]
    return [(prompt, randint(seed + 100 + i, 128, n).tolist()) for i, (prompt, n) in enumerate(samples)]


def gradients(
    decoder: Decoder, pairs: Pairs, size: int, order: Sequence[int] | None = None
) -> tuple[list[torch.Tensor], ...]:
    """logp and entropy of each pair, and the gradient buffers after micro-batches of `size` samples.

    `order` is the order of the samples.
    """
    weights = [*decoder.w.values(), *([decoder.lm_head] if decoder.config.tied else [])]
    buffers = zero_buffers(weights)
    prompts, scores = Prompts(decoder, [prompt for prompt, _ in pairs], buffers=buffers), {}
    order = list(order or range(len(pairs)))
    for a in range(0, len(order), size):
        samples = order[a : a + size]
        batch = pack([pairs[i] for i in samples], [prompts.prompt_of_sample[i] for i in samples])
        logp, entropy = logprobs(decoder, batch, SAMPLING, prompts=prompts)
        parts = [x.split(batch.drawn_lengths) for x in (logp, entropy)]
        scores |= {i: (x, y) for i, x, y in zip(samples, *parts, strict=True)}
        # A sample has the same upstream gradient in every micro-batch.
        upstream = torch.cat([randn(i, len(pairs[i][1])) for i in samples])
        (logp * upstream).sum().backward()
    prompts.backward()
    return [x.detach() for i in range(len(pairs)) for x in scores[i]], sums_of(buffers)


@torch.no_grad()
def whole(decoder: Decoder, pairs: Pairs) -> list[torch.Tensor]:
    """logp and entropy of each pair, every prompt computed anew."""
    batch = pack(pairs)
    parts = [x.split(batch.drawn_lengths) for x in logprobs(decoder, batch, SAMPLING)]
    return [x for pair in zip(*parts, strict=True) for x in pair]


@dtypes
@property_settings(8)
@given(drawn=groups, size=st.integers(2, 5))
def test_bits_of_whole_sequences_and_of_any_micro_batch(folder, dtype, drawn, size):
    decoder, pairs = load(folder, dtype), make_pairs(drawn)
    scores, grads = gradients(decoder, pairs, len(pairs))
    assert total_unequal(scores, whole(decoder, pairs)) == 0
    for n in (1, size):
        other_scores, other_grads = gradients(decoder, pairs, n)
        assert total_unequal(other_scores, scores) == 0
        assert total_unequal(other_grads, grads) == 0


@dtypes
def test_control_another_order_of_the_samples_is_seen(folder, dtype):
    decoder, pairs = load(folder, dtype), make_pairs([(40, [20, 30, 25])])
    scores, grads = gradients(decoder, pairs, 1)
    other_scores, other_grads = gradients(decoder, pairs, 1, order=[1, 2, 0])
    assert total_unequal(other_scores, scores) == 0
    assert total_unequal(other_grads, grads) > 0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_threads_change_nothing(folder, count):
    decoder, pairs = load(folder, torch.float32), make_pairs([(70, [40, 50, 3]), (33, [8, 1])])
    with threads(1):
        scores, grads = gradients(decoder, pairs, 3)
    with threads(count):
        other_scores, other_grads = gradients(decoder, pairs, 3)
    assert total_unequal(scores, other_scores) == 0
    assert total_unequal(grads, other_grads) == 0


def test_control_a_prompt_one_token_off_is_seen(folder, monkeypatch):
    decoder, pairs = load(folder, torch.float32), make_pairs([(40, [20, 30])])
    read = prompts_module._read

    def read_wrong(decoder: Decoder, ids: Sequence[int], *args: object) -> object:
        return read(decoder, [*ids[:-1], ids[-1] ^ 1], *args)

    monkeypatch.setattr(prompts_module, "_read", read_wrong)
    assert total_unequal(gradients(decoder, pairs, 2)[0], whole(decoder, pairs)) > 0


def test_keys_are_rounded_to_the_cache_dtype_for_both(folder):
    plain, pairs = load(folder, torch.float32), make_pairs([(40, [20, 30])])
    decoder = load(folder, torch.float32, cache=torch.bfloat16)
    scores, _ = gradients(decoder, pairs, 2)
    assert total_unequal(scores, whole(decoder, pairs)) == 0
    assert total_unequal(scores, whole(plain, pairs)) > 0, "control: the rounding is there"


def test_prompts_read_without_gradients_leave_none_behind(folder):
    decoder, pairs = load(folder, torch.float32), make_pairs([(9, [2, 3]), (1, [4])])
    buffers = zero_buffers(decoder.w.values())
    with torch.no_grad():
        prompts = Prompts(decoder, [prompt for prompt, _ in pairs], buffers=buffers)
        logp, _ = logprobs(decoder, pack(pairs, prompts.prompt_of_sample), SAMPLING, prompts=prompts)
    prompts.backward()
    assert total_unequal([logp], [torch.cat(whole(decoder, pairs)[::2])]) == 0
    assert not any(sums.any() for sums in sums_of(buffers))


def test_a_state_reads_no_prompt_once_without_the_setting(tmp_path):
    decoder = load_decoder(save_random("qwen3_5_text", tmp_path), torch.float32)
    with pytest.raises(ValueError, match=r"only where precision\.state_prompts says so"):
        Prompts(decoder, [[1, 2]])
    Prompts(decoder, [[1]])


@pytest.mark.parametrize("lost", ["conv", "kv", "g", "beta", "start"])
def test_control_a_gradient_that_a_state_does_not_send_back_is_seen(tmp_path, monkeypatch, lost):
    """One prompt has a full chunk and five rows of an open one."""
    folder, pairs = save_random("qwen3_5_text", tmp_path), make_pairs([(70, [9, 5]), (3, [2])])
    exact, ours = (gradients(load(folder, x), pairs, 3)[1] for x in (torch.float64, torch.float32))

    def without(shape, *flat):
        left = whole_left(shape, *flat)
        return left._replace(**{lost: getattr(left, lost).detach()})

    whole_left = Left.of_rows
    monkeypatch.setattr(Left, "of_rows", without)
    wrong = gradients(load(folder, torch.float32), pairs, 3)[1]
    errors = [sum((x - y).norm() for x, y in zip(g, exact, strict=True)) for g in (ours, wrong)]
    assert errors[1] > 100 * errors[0]


@property_settings(60)
@given(drawn=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 5)), min_size=1, max_size=12))
def test_passes_hold_whole_prompts_and_at_most_so_many_tokens(drawn):
    prompts = [[i] * n for i, (n, num_generations) in enumerate(drawn) for _ in range(num_generations)]
    passes = prompt_passes(prompts)
    assert [i for rows in passes for i in range(rows.start, rows.stop)] == list(range(len(prompts)))
    distinct = [{prompt[0] for prompt in prompts[rows]} for rows in passes]
    assert sum(map(len, distinct)) == len(drawn), "no prompt is in two passes"
    tokens = [sum(drawn[i][0] for i in prompt_ids) for prompt_ids in distinct]
    assert all(n <= PASS_TOKENS or len(ids) == 1 for n, ids in zip(tokens, distinct, strict=True))
    once = prompt_passes([[i] * n for i, (n, _) in enumerate(drawn)])
    sizes = [rows.stop - rows.start for rows in once]
    assert sizes == [len(prompt_ids) for prompt_ids in distinct], "the number of samples decides nothing"


def test_a_sequence_longer_than_the_context_is_refused(folder):
    decoder = load(folder, torch.float32)
    prompts = Prompts(decoder, [[1] * 300])
    with pytest.raises(ValueError, match=r"a sequence of 513 tokens is longer than the context \(512\)"):
        logprobs(decoder, pack([([1] * 300, [2] * 214)], prompts.prompt_of_sample), SAMPLING, prompts=prompts)


def test_an_empty_prompt_is_refused(folder):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        Prompts(load_decoder(folder, torch.float32), [[1, 2], []])
