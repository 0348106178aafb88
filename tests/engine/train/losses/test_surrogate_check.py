"""A user's surrogate whose slope is not the derivative of its value is refused before the run begins."""

import pytest
import torch
from zerokl.engine.config.loss_section import PRESETS, LossConfig
from zerokl.engine.runs.run import train
from zerokl.engine.train.losses.surrogate_check import check_slope
from zerokl.engine.train.losses.surrogates import BOUNDS, clip, with_detached

WIDTHS = [(0.8, 1.2), (1.0, 1.0), (0.0, 5.0), (1 - 3e-4, 1 + 4e-4), (0.67, 1.43)]


def check(function, low=0.8, high=1.2):
    check_slope(with_detached(function), low, high, "loss.surrogate: x:f")


class _Square(torch.autograd.Function):
    """r^2 / 2 with a backward that has the factor of r^2."""

    @staticmethod
    def forward(ctx, r):
        ctx.save_for_backward(r)
        return r * r / 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2 * ctx.saved_tensors[0]


def by_autograd(square):
    """A surrogate whose slope comes from autograd."""

    def surrogate(r, A, logp, low, high):
        ratio = r.detach().requires_grad_()
        value = square(ratio) * A
        (dr,) = torch.autograd.grad(value.sum(), ratio)
        return value.detach(), dr * r

    return surrogate


def detached_above(r, A, logp, low, high):
    return r * A, torch.where(r > high, 0.0, r * A)


def weight(r, A, logp, low, high):
    """CISPO, without a word about its stop-gradient."""
    return r.clamp(low, high) * A * logp, r.clamp(low, high) * A


def declared_weight(r, A, logp, low, high, r_detached):
    return r_detached.clamp(low, high) * A * logp, r_detached.clamp(low, high) * A


def mixed(r, A, logp, low, high, r_detached):
    """A detached weight times a ratio that has a gradient."""
    weighted = torch.sigmoid(3.0 * (r_detached - 1.0)) * r * A
    return weighted, weighted


WRONG = {
    "no ratio": (lambda r, A, logp, low, high: (r * A, A), "0.67 and advantage 0.75"),
    "half": (lambda r, A, logp, low, high: (r * A, r * A / 2), "0.67 and advantage 0.75"),
    "a thousandth": (lambda r, A, logp, low, high: (r * A, r * A * 1.001), "0.67 and advantage 0.75"),
    "no slope": (lambda r, A, logp, low, high: (r * A, torch.zeros_like(r)), "0.67 and advantage 0.75"),
    "a bad completion": (
        lambda r, A, logp, low, high: (r * A, torch.where(A < 0, -r * A, r * A)),
        "0.67 and advantage -1.25",
    ),
    "derivative by r": (lambda r, A, logp, low, high: (r * r * A, 2 * r * A), "0.67 and advantage 0.75"),
    "at 1 alone": (
        lambda r, A, logp, low, high: (r * A, torch.where(r == 1, 0.0, r * A)),
        "1 and advantage 0.75",
    ),
    "detached above": (detached_above, "1.43 and advantage 0.75"),
    "clip of the other sign": (
        lambda r, A, logp, low, high: (clip(r, A, logp, low, high)[0], clip(r, -A, logp, low, high)[1]),
        "0.67 and advantage 0.75",
    ),
    "autograd.Function": (by_autograd(_Square.apply), "0.67 and advantage 0.75"),
    "stop-gradient": (weight, "1 and advantage 0.75"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_slope_is_refused_with_ratio_expected_and_returned(name):
    function, where = WRONG[name]
    message = rf"^loss.surrogate: x:f returned the slope \S+ at ratio {where}, where finite differences"
    with pytest.raises(ValueError, match=message) as refused:
        check(function)
    assert "r_detached" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_message_has_the_numbers():
    with pytest.raises(
        ValueError, match=r"slope 0\.75 at ratio 0\.67 .* differences of its value give 0\.5025;"
    ):
        check(WRONG["no ratio"][0])


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_of_our_own_is_right_at_any_width(name, width):
    check(BOUNDS[name], *width)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize(
    "function",
    [declared_weight, mixed, by_autograd(lambda r: r * r / 2)],
    ids=["weight", "mixed", "autograd"],
)
def test_a_right_surrogate_is_taken(function, width):
    check(function, *width)


def test_a_detached_ratio_with_a_wrong_slope_is_refused():
    with pytest.raises(ValueError, match="returned the slope"):
        check(lambda r, A, logp, low, high, r_detached: (r_detached * A * logp, r * A * 1.01))


def test_at_a_kink_a_slope_of_neither_side_is_refused():
    def twice(r, A, logp, low, high):
        value, slope = clip(r, A, logp, low, high)
        return value, torch.where(r == 1, 2.0 * A, slope)

    with pytest.raises(ValueError, match=r"at ratio 1 and advantage 0\.75"):
        check(twice, 1.0, 1.0)
    value_at_1 = clip(*(torch.ones(1),) * 3, 1.0, 1.0)
    assert [x.item() for x in value_at_1] == [1.0, 1.0]  # the slope of the left side, which is right


def test_every_preset_leaves_room_for_a_surrogate():
    for preset in PRESETS:
        cfg = LossConfig(preset=preset)
        check(clip, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)


def test_a_run_with_a_wrong_surrogate_ends_before_its_model_is_made(config, tmp_path):
    with pytest.raises(
        ValueError, match=r"^loss.surrogate: toy:wrong returned the slope 0\.75 at ratio 0\.67"
    ):
        train(config(loss__surrogate="toy:wrong"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
