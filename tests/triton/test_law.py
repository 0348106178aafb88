"""The law on Triton, interpreted: independent rows, gradients under any micro-batch, and accuracy.

The operations and the comparisons are those of tests/law, as in tests/kernels. In this process the operations
run their Triton kernels.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import columns_triton, rms_norm_triton
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.order import token_blocks

from tests.helpers import DTYPES, property_settings, total_unequal
from tests.law import accuracy, gradients, rows

# Name -> the kernel that must have run.
NORMS = {"rms_norm": "_rms_norm_bwd", "add_rms_norm": "_rms_norm_bwd", "qk_norm": "_qk_norm_bwd"}
LOGPROBS = {name: "_logprob_bwd" for name in ("linear_logprob", "linear_logprob at a temperature")}
FILTERS = ("top-k", "top-p", "min-p", "all three", "every filter")
TRUNCATED = {f"linear_logprob of {what}": "_logprob_bwd" for what in FILTERS}
ROW_OPS = {
    **NORMS,
    "value_head": "_value_head_bwd",
    **LOGPROBS,
    **TRUNCATED,
    "silu_mul": "_silu_mul_bwd",
    "add_shared": "_add_shared_bwd",
    "sigmoid_router": "_sigmoid_weigh_bwd",
    "gelu_mul": "_gelu_mul_bwd",
    "rope": "_rope",
    "experts": "_combine_bwd",
}
GRADIENT_OPS = {
    **NORMS,
    "value_head": "_value_head_bwd",
    "linear_logprob": "_logprob_bwd",
    "embedding": "_embedding_bwd",
    "adapters": "_outer",
}
ACCURATE_OPS = {
    **NORMS,
    "rms_norm plus one": "_rms_norm_bwd",
    "value_head": "_value_head_bwd",
    **LOGPROBS,
    "linear_logprob with a bias": "_logprob_bwd",
    "silu_mul": "_silu_mul_bwd",
    "add_shared": "_add_shared_bwd",
    "sigmoid_router": "_sigmoid_weigh_bwd",
    "gelu_mul": "_gelu_mul_bwd",
    "rope": "_rope",
    "embedding": "_embedding_bwd",
}
SEEDS = range(0, 40, 20)  # the interpreter is slow


def cases(names: dict[str, str], dtypes: tuple[torch.dtype, ...] = DTYPES) -> list:
    """Each name with each dtype. With --quick each has one dtype, and neighbours have different ones."""
    params = []
    for i, (name, kernel) in enumerate(names.items()):
        tested = [dtype for dtype in dtypes if rows.ONE_DTYPE.get(name, dtype) == dtype]
        for j, dtype in enumerate(tested):
            marks = () if j == i % len(tested) else pytest.mark.full
            params.append(
                pytest.param(name, kernel, dtype, id=f"{name}-{dtype}".replace("torch.", ""), marks=marks)
            )
    return params


@pytest.mark.parametrize(("name", "kernel", "dtype"), cases(ROW_OPS))
@property_settings(6)  # the interpreter takes milliseconds for each program, and a row is a program
@given(
    width=st.sampled_from([1, 7, 16, 33, 100, 257]),
    T=st.integers(1, 8),
    other_T=st.integers(1, 8),
    poison=st.sampled_from(rows.POISON),
    seed=st.integers(0, 10_000),
)
def test_row_is_independent_of_the_others(name, kernel, dtype, width, T, other_T, poison, seed):
    with recorded_launches(and_run=True) as launches:
        assert rows.unequal_rows(rows.OPS[name], dtype, width, T, other_T, poison, seed) == 0
    assert kernel in {launch.kernel.__name__ for launch in launches}


@pytest.mark.parametrize(("name", "kernel", "dtype"), cases(GRADIENT_OPS, (torch.float32, torch.bfloat16)))
@property_settings(3)
@given(
    width=st.sampled_from([1, 16, 33, 100]),
    lengths=st.lists(st.sampled_from([1, 3, 130]), min_size=2, max_size=3),
    cuts=st.sets(st.integers(1, 2)),
)
def test_gradient_is_independent_of_the_split_into_micro_batches(name, kernel, dtype, width, lengths, cuts):
    op, sequences = gradients.OPS[name], list(range(len(lengths)))
    bounds = [0, *sorted(c for c in cuts if 0 < c < len(lengths)), len(lengths)]
    micro_batches = [sequences[a:b] for a, b in pairwise(bounds)]
    with recorded_launches(and_run=True) as launches:
        together = gradients.summed_grads(op, dtype, width, lengths, [sequences])
        split = gradients.summed_grads(op, dtype, width, lengths, micro_batches)
    assert total_unequal(together, split) == 0
    assert kernel in {launch.kernel.__name__ for launch in launches}


@pytest.mark.parametrize("name", NORMS)
def test_shards_of_one_pass_have_the_gradients_of_a_pass_each(name):
    shards = [[130, 3], [1, 40], [200]]
    together, alone = (
        gradients.shard_grads(gradients.OPS[name], torch.bfloat16, 33, shards, together)
        for together in (True, False)
    )
    assert total_unequal(together, alone) == 0
    assert all(grad.any() for buffer in together for grad in buffer)


@pytest.mark.parametrize("name", GRADIENT_OPS)
def test_control_another_order_of_the_sequences_is_found(name):
    op, lengths = gradients.OPS[name], [150, 90, 40]
    in_order = gradients.summed_grads(op, torch.float32, 64, lengths, [[0], [1], [2]])
    assert (
        total_unequal(in_order, gradients.summed_grads(op, torch.float32, 64, lengths, [[2], [1], [0]])) > 0
    )


@pytest.mark.parametrize("name", [n for n in GRADIENT_OPS if n != "embedding"])
def test_control_blocks_across_sequences_are_found(name):
    lengths, op = [150, 90, 40], gradients.OPS[name]
    before = gradients.summed_grads(op, torch.float32, 64, lengths, [[0, 1, 2]])
    blocks = token_blocks([sum(lengths)])
    wrong = op._replace(run=lambda x, ids, w, in_pass: op.run(x, ids, w, replace(in_pass, blocks=blocks)))
    assert total_unequal(before, gradients.summed_grads(wrong, torch.float32, 64, lengths, [[0, 1, 2]])) > 0


@pytest.mark.parametrize("rows_at_once", [8, 32])
def test_control_another_tile_of_rows_is_found(monkeypatch, rows_at_once):
    op = gradients.OPS["rms_norm"]
    before = gradients.summed_grads(op, torch.float32, 64, [150, 90], [[0, 1]])
    for module in (columns_triton, rms_norm_triton):
        monkeypatch.setattr(module, "NORM_ROWS", rows_at_once)
    assert total_unequal(before, gradients.summed_grads(op, torch.float32, 64, [150, 90], [[0, 1]])) > 0


@pytest.mark.parametrize(("name", "kernel", "dtype"), cases(ACCURATE_OPS))
def test_error_is_at_most_twice_that_of_plain_torch(name, kernel, dtype):
    with recorded_launches(and_run=True) as launches:
        accuracy.assert_accurate(accuracy.OPS[name], dtype, SEEDS)
    assert kernel in {launch.kernel.__name__ for launch in launches}


def test_control_an_error_is_found():
    op = accuracy.OPS["rms_norm"]
    wrong = op._replace(ours=lambda x, w: op.ours(x, w) * 1.001)
    with pytest.raises(AssertionError, match="largest error"):
        accuracy.assert_accurate(wrong, torch.float32, SEEDS)
