"""The figures of the gradient's bias, against gradients whose means and covariances are chosen."""

import math

import numpy as np
import pytest
from zerokl.verify.bias_figures import estimate, figures_of_step, floor_of_step

D, N = 6, 60
EXACT, OWN = np.array([1.0, -2, 0.5, 0, 1, 0]), np.array([0.5, -1, 0.5, 2, 1, 0])
NOISE_EXACT, NOISE_OWN = 0.7, 1.3  # of each element


def _gram(*gradients: np.ndarray) -> np.ndarray:
    x = np.stack(gradients)
    return x @ x.T


def test_a_step_has_the_cosines_lengths_and_distances_of_its_vectors():
    g, a, b = np.random.default_rng(0).normal(size=(3, D))
    unit = [x / np.linalg.norm(x) for x in (g, a, b)]
    middle = (a + b) / 2
    figures, floor = figures_of_step(_gram(g, a, b)), floor_of_step(_gram(a, b))
    assert figures == pytest.approx(
        {
            "cosine": (unit[0] @ unit[1] + unit[0] @ unit[2]) / 2,
            "distance": np.linalg.norm(g - middle) / np.linalg.norm(middle),
            "inner": g @ middle,
            "norm": np.linalg.norm(g),
        }
    )
    assert floor == pytest.approx(
        {
            "cosine": unit[1] @ unit[2],
            "distance": math.sqrt(3) / 2 * np.linalg.norm(a - b) / np.linalg.norm(middle),
            "inner": a @ b,
            "norm": math.sqrt((a @ a + b @ b) / 2),
        }
    )


def test_a_gradient_that_is_zero_or_not_finite_has_no_direction():
    a, b = np.eye(2)
    nothing = figures_of_step(_gram(np.zeros(2), a, b))
    assert math.isnan(nothing["cosine"])
    assert nothing["norm"] == 0.0 == nothing["inner"]
    lost = figures_of_step(np.full((3, 3), np.nan))
    assert all(map(math.isnan, lost.values()))


@pytest.mark.parametrize(("mean", "noise"), [(OWN, NOISE_OWN), (EXACT, NOISE_EXACT)])
def test_the_estimates_and_their_errors_are_those_of_the_distribution(mean, noise):
    rng = np.random.default_rng(1)
    g, a = mean + noise * rng.normal(size=(N, D)), EXACT + NOISE_EXACT * rng.normal(size=(N, D))
    bias, square, b = estimate(_gram(*g, *a)), EXACT @ EXACT, mean - EXACT
    true = {
        "cosine": mean @ EXACT / math.sqrt(mean @ mean * square),
        "length": mean @ EXACT / square,
        "bias": b @ b / square,
        "noise": math.sqrt(D) * noise / math.sqrt(square),
    }
    for name, value in true.items():
        figure = getattr(bias, name)
        assert abs(figure.value - value) <= 4 * figure.standard_error + 1e-4, name
        assert figure.standard_error < 0.3, name


def test_the_error_is_the_spread_of_the_estimates():
    rng, repeats = np.random.default_rng(2), 150
    estimates = []
    for _ in range(repeats):
        g, a = OWN + NOISE_OWN * rng.normal(size=(12, D)), EXACT + NOISE_EXACT * rng.normal(size=(12, D))
        estimates.append(estimate(_gram(*g, *a)))
    for name in ("length", "bias", "noise"):
        spread = np.std([getattr(x, name).value for x in estimates])
        error = math.sqrt(np.mean([getattr(x, name).standard_error ** 2 for x in estimates]))
        assert 0.7 * spread < error < 1.5 * spread, name


def test_control_draws_that_share_their_noise_have_another_length():
    rng = np.random.default_rng(3)
    g, noise = (x * rng.normal(size=(N, D)) for x in (NOISE_OWN, NOISE_EXACT))
    shared = estimate(_gram(*(OWN + g), *(EXACT + g + noise)))
    assert shared.length.value > OWN @ EXACT / (EXACT @ EXACT)


def test_an_error_needs_three_draws():
    with pytest.raises(ValueError, match=r"draws \(2\) must be at least 3"):
        estimate(np.eye(4))
