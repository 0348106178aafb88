"""A model in Python: what is sampled is scored the same, under every filter, and penalties are refused."""

import numpy as np
import pytest
from zerokl.engine.rollout.policy import Policy, load_policy

FILTERS = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.97,
    "min_p": 0.01,
    "logit_bias": {20: 2.0, 9: -1.5},
    "allowed_token_ids": range(1, 60, 2),
}


@pytest.fixture(scope="module")
def policy(model) -> Policy:
    return load_policy(str(model))


@pytest.mark.parametrize("left_out", [None, *FILTERS])
def test_samples_are_scored_with_the_same_bits(policy, left_out):
    filters = {name: value for name, value in FILTERS.items() if name != left_out}
    rollouts = policy.sample(["1+2=", [7, 8, 9]], n=3, max_tokens=12, **filters)
    scores = policy.score([r.pair for r in rollouts], **filters)
    assert [s.tobytes() for s in scores] == [r.logprobs.tobytes() for r in rollouts]
    drawn = {token for r in rollouts for token in r.completion_ids}
    assert (drawn <= set(FILTERS["allowed_token_ids"])) is (left_out != "allowed_token_ids")


def test_a_token_that_is_not_allowed_has_no_probability(policy):
    ((first, second),) = policy.score([([7, 8], [9, 11])], allowed_token_ids=[11, 13])
    assert (first, second < 0) == (-np.inf, True)


@pytest.mark.parametrize("call", ["sample", "score"])
def test_what_cannot_be_drawn_from_is_refused_in_one_line(policy, call):
    def run(**options: object) -> None:
        if call == "sample":
            policy.sample([[7, 8]], max_tokens=2, **options)
        else:
            policy.score([([7, 8], [9])], **options)

    run(repetition_penalty=1.0, presence_penalty=0.0)
    for options, message in (
        ({"repetition_penalty": 1.1}, rf"{call}: repetition_penalty \(1.1\) is refused: a penalty makes"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"allowed_token_ids": [64]}, "allowed_token_ids holds 64, .* outside the model's vocabulary of 64"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {64: 1.0}}, "logit_bias holds 64, .* outside the model's vocabulary of 64"),
        ({"min_p": 2.0}, r"min_p \(2.0\)"),
    ):
        with pytest.raises(ValueError, match=message) as refusal:
            run(**options)
        assert "\n" not in str(refusal.value)
    with pytest.raises(TypeError, match=rf"{call}\(\) got an unexpected keyword argument 'top_q'"):
        run(top_q=0.5)
