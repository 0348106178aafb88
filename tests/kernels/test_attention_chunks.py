"""Attention whose sums are cut into chunks of keys, beside the walk's; its forms: test_attention_windows.py.

The chunks here are short, so that a row has many of them.
"""

import pytest
import torch
from zerokl.kernels import attention_ref
from zerokl.kernels.attention import attention
from zerokl.kernels.attention_rule import RULES, WALK, AttentionRule, named_rule

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels.test_attention import (
    CHUNKS,
    Case,
    cached,
    dtypes,
    gradients,
    make_case,
    whole,
)


def test_rows_of_one_chunk_have_the_bits_of_the_walk_and_control_later_rows_others():
    case = make_case([300], 2, 2, 64, torch.float32, seed=1)
    walked = whole(case)
    for chunk in (64, 128):
        o = whole(case, AttentionRule(chunk))
        assert total_unequal([o[:chunk]], [walked[:chunk]]) == 0
        assert total_unequal([o[chunk:]], [walked[chunk:]]) > 1000
    assert total_unequal([whole(case, AttentionRule(64))], [o]) > 1000, "control: another chunk"


class Joined(tuple):
    """A row's state, with the states of its chunks."""

    states: list


@pytest.mark.usefixtures("references")
def test_control_chunks_that_are_joined_from_the_last_one_give_other_bits(monkeypatch):
    case, rule, join = (
        make_case([200], 2, 1, 64, torch.float32, seed=2),
        AttentionRule(32),
        attention_ref._join,
    )
    ascending = whole(case, rule)

    def descending(row, chunk):
        states = [*(row.states if isinstance(row, Joined) else [row]), chunk]
        total = states[-1]
        for state in reversed(states[:-1]):
            total = join(total, state)
        joined = Joined(total)
        joined.states = states
        return joined

    monkeypatch.setattr(attention_ref, "_join", descending)
    o = whole(case, rule)
    assert total_unequal([o[:64]], [ascending[:64]]) == 0  # two chunks have one sum
    assert total_unequal([o[64:]], [ascending[64:]]) > 1000


def test_no_result_is_a_negative_zero():
    case, rule = make_case([1, 40, 100], 2, 1, 32, torch.float32, seed=3), AttentionRule(32)
    case = Case(case.lengths, case.q, case.k, torch.full_like(case.v, -1e-45))  # what a division may lose
    o, walked = whole(case, rule), whole(case)
    zeros = [(x == 0) & x.signbit() for x in (o, walked)]
    assert zeros[0].sum() == 0
    assert zeros[1].sum() > 0, "control: the walk has them"
    assert total_unequal([o], [cached(case, CHUNKS["short"], 3, rule)]) == 0


@dtypes
def test_accuracy(dtype):
    """o, dq, dk and dv are at most twice as far from fp64 as plain torch in this dtype is."""
    judged: dict[str, list[list[torch.Tensor]]] = {name: [[], [], []] for name in ("o", "dq", "dk", "dv")}
    for seed in (10, 20, 30):
        case = make_case([150], 2, 1, 64, dtype, seed)
        dy = randn(seed + 5, *case.q.shape, dtype=dtype)
        results = [[whole(case, AttentionRule(32)), *gradients(case, dy, AttentionRule(32))]]
        for plain_dtype in (dtype, torch.float64):
            leaves = [x.to(plain_dtype).requires_grad_() for x in case[1:]]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in leaves)
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=case.scale, enable_gqa=True
            )
            o = o[0].transpose(0, 1)
            results.append([o.detach(), *torch.autograd.grad(o, leaves, dy.to(plain_dtype))])
        for i, result in enumerate(results):
            for name, x in zip(judged, result, strict=True):
                judged[name][i].append(x.flatten())
    for name, parts in judged.items():
        assert_at_most_twice_the_error(*(torch.cat(p) for p in parts), f"{name} {dtype}")


def test_rules_have_names_and_the_default_is_the_walk():
    assert list(RULES.items()) == [("vllm", WALK), ("chunked-512", AttentionRule(chunk=512))]
    with pytest.raises(ValueError, match=r"attention \('chunked'\) must be one of vllm, chunked-512"):
        named_rule("chunked")


def test_the_named_rule_is_taken():
    case = make_case([600], 1, 1, 16, torch.float32, seed=4)
    plan = case.plan()
    results = [attention(case.q, case.k, case.v, plan, case.scale, rule) for rule in RULES.values()]
    assert total_unequal([results[0][:512]], [results[1][:512]]) == 0
    assert total_unequal([results[0][512:]], [results[1][512:]]) > 0
