"""What both packed attentions must hold: the law of packing, and an error near plain torch's."""

from collections.abc import Sequence

import torch
from zerokl.kernels.attention_rule import WALK, AttentionRule

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels.test_attention import Case, gradients, make_case, whole


def plain_attention(case: Case, leaves: list[torch.Tensor]) -> torch.Tensor:
    """torch's own attention of every sequence, from q, k and v: [T, H, D]."""
    outs = []
    for rows in case.spans():
        q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in leaves)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=case.scale, enable_gqa=True
            )
        )
    return torch.cat([o[0].transpose(0, 1) for o in outs])


def assert_accurate(
    dtype: torch.dtype, head_dim: int, rule: AttentionRule = WALK, lengths: Sequence[int] = (70, 40)
) -> None:
    """o, dq, dk and dv are at most twice as far from fp64 as plain torch in `dtype` is."""
    judged: dict[str, list[list[torch.Tensor]]] = {name: [[], [], []] for name in ("o", "dq", "dk", "dv")}
    for seed in (10, 20, 30):
        case = make_case(list(lengths), 2, 1, head_dim, dtype, seed)
        dy = randn(seed + 5, *case.q.shape, dtype=dtype)
        results = [[whole(case, rule), *gradients(case, dy, rule)]]
        for plain_dtype in (dtype, torch.float64):
            leaves = [x.to(plain_dtype).requires_grad_() for x in case[1:]]
            o = plain_attention(case, leaves)
            results.append([o.detach(), *torch.autograd.grad(o, leaves, dy.to(plain_dtype))])
        for i, result in enumerate(results):
            for name, x in zip(judged, result, strict=True):
                judged[name][i].append(x.flatten())
    for name, parts in judged.items():
        assert_at_most_twice_the_error(*(torch.cat(p) for p in parts), f"{name} {dtype}")


def assert_independent_of_packing(case: Case, dy: torch.Tensor) -> None:
    """Output and gradients of each sequence have the bits they have alone, and beside sequences of NaN."""
    together, o = gradients(case, dy), whole(case)
    for s, rows in enumerate(case.spans()):
        alone, poisoned = case.sequence(s), case.with_others_nan(s)
        assert total_unequal([whole(alone), whole(poisoned)[rows]], [o[rows]] * 2) == 0
        expected = gradients(alone, dy[rows])
        assert total_unequal(expected, [g[rows] for g in together]) == 0
        assert total_unequal(expected, [g[rows] for g in gradients(poisoned, dy)]) == 0
