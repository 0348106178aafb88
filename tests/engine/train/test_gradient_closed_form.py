"""The gradient's bias where it is known: four tokens, answers of three, every answer enumerated in fp64.

The policy is transformers' forward in fp64, the gradients are autograd's, and expectation and variance are
sums over all 40 answers. With two completions of a prompt, and the advantage r_1 - r_2, the gradient of a
group is (r_1 - r_2)(s_1 - s_2), s the sum of c_t grad log pi_t over an answer. So

    E g = -(E[r s] - E[r] E[s]) / max_tokens
    Var <g, u> = P w^2 Var[(r_1 - r_2) <s_1 - s_2, u>],  w = 1 / (P G max_tokens)

for P prompts that are all the same. What the tool measures must lie within 4 standard errors of that.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from zerokl.engine.rollout.types import RngKey, Sampler
from zerokl.engine.runs.setup import settled
from zerokl.engine.train.gradient_bias import drawn, exact_gradient, loss_products, measured_losses
from zerokl.engine.train.losses.corrections import CORRECTIONS
from zerokl.engine.train.state import TrainState
from zerokl.kernels.philox import Stream
from zerokl.verify.bias_figures import estimate, figures_of_step, floor_of_step

from tests.engine.runs.exact_runs import first_state
from tests.random_model import ONE_LAYER, random_model

pytestmark = pytest.mark.full
TASK = '''
class Task:
    """One prompt, and a reward for the letter c."""

    chat = False

    def problems(self, split):
        from zerokl.engine.tasks.base import Problem

        return [Problem(0, "=a", "")] if split == "train" else []

    def reward(self, problem, completion):
        return completion.count("c")
'''
EOS, TEXTS = 1, {3: "a", 4: "b", 5: "c"}  # the four tokens; 6 is "="
PROMPT, MAX_TOKENS, P, G, DRAWS, TEMPERATURE, BOUND = (6, 3), 3, 32, 2, 12, 3.0, 1.2
# The losses that are compared: c of an answer, from the ratios pi / mu of its tokens.
C: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "own": lambda rho: np.minimum(rho, BOUND),
    "none": np.ones_like,
    "full": lambda rho: rho,
    "full_sequence": lambda rho: np.full_like(rho, rho.prod()),
    "mis": lambda rho: np.full_like(rho, rho.prod() if rho.prod() <= 2.0 else 0.0),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("four"), ONE_LAYER | {"hidden_size": 16}, 1.5, "abc=")


@pytest.fixture(scope="module")
def state(four, config, tmp_path_factory) -> Iterator[TrainState]:
    """A run that has not begun. Its sampler draws at another temperature."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "four_tokens.py").write_text(TASK)
    cfg = settled(
        config(
            model=four,
            task__name="four_tokens:Task",
            task__directory=folder,
            task__options={},
            task__reward="",
            prompts=P,
            num_generations=G,
            sampling__max_tokens=MAX_TOKENS,
            sampling__allowed_token_ids=[EOS, *TEXTS],
            exact=False,
            perturb__temperature=TEMPERATURE,
            loss__preset="rloo",
            loss__correction="truncate",
            loss__correction_high=BOUND,
            micro_batch=P * G,
            virtual_shards=1,
        )
    )
    with first_state(cfg) as state:
        yield state


@dataclass(frozen=True)
class Answer:
    """One of all answers: its reward, its probability with sampler and trainer, ratios, and grad log pi_t."""

    reward: float
    sampled: float
    exact: float
    rho: np.ndarray  # [T]
    slopes: np.ndarray  # [T, numel]


@pytest.fixture(scope="module")
def answers(four, state) -> list[Answer]:
    """All answers, by transformers in fp64."""
    policy = AutoModelForCausalLM.from_pretrained(four, dtype=torch.float64)
    nodes = {}  # prefix and token -> log pi, log mu, grad log pi
    for n in range(MAX_TOKENS):
        for prefix in product(TEXTS, repeat=n):
            nodes |= {(*prefix, token): node for token, node in _node(policy, state, prefix)}
    whole = []
    for ids in nodes:
        if ids[-1] == EOS or len(ids) == MAX_TOKENS:
            log_pi, log_mu, slopes = zip(*(nodes[ids[: t + 1]] for t in range(len(ids))), strict=True)
            text = "".join(TEXTS.get(token, "") for token in ids)
            reward = text.count("c")
            rho = np.exp(np.array(log_pi) - np.array(log_mu))
            whole.append(Answer(reward, math.exp(sum(log_mu)), math.exp(sum(log_pi)), rho, np.stack(slopes)))
    return whole


def _node(policy, state: TrainState, prefix: tuple[int, ...]) -> Iterator[tuple[int, tuple]]:
    """Each token after a prefix: its log-probabilities with trainer and sampler, and grad log pi."""
    tokens = [EOS, *TEXTS]
    logits = policy(torch.tensor([[*PROMPT, *prefix]])).logits[0, -1, tokens]
    log_pi, log_mu = logits.log_softmax(-1), (logits / TEMPERATURE).log_softmax(-1)
    layout, parameters = state.policy.layout, dict(policy.named_parameters())
    for i, token in enumerate(tokens):
        grads = torch.autograd.grad(log_pi[i], list(parameters.values()), retain_graph=True)
        flat = torch.zeros(layout.numel, dtype=torch.float64)
        for name, view in layout.checkpoint_views(flat).items():
            view.copy_(grads[list(parameters).index(name)])
        yield token, (log_pi[i].item(), log_mu[i].item(), flat.numpy())


class ClosedForm:
    """The gradient of a step from answers with these probabilities, and with these corrections."""

    def __init__(self, answers: list[Answer], probabilities: np.ndarray, c: Callable):
        self.p, self.r = probabilities, np.array([a.reward for a in answers])
        self.s = np.stack([c(a.rho) @ a.slopes for a in answers])  # [answers, numel]
        self.mean = -(self.p * self.r @ self.s - (self.p @ self.r) * (self.p @ self.s)) / MAX_TOKENS

    def variance(self, u: np.ndarray) -> float:
        """Of <g, u>. u [numel]"""
        along = self.s @ u
        x = np.subtract.outer(self.r, self.r) * np.subtract.outer(along, along)
        return self._of_groups((np.outer(self.p, self.p) * x * x).sum(), self.mean @ u)

    @property
    def total_variance(self) -> float:
        """The trace of the covariance of g."""
        gram = self.s @ self.s.T
        squares = np.diag(gram)[:, None] + np.diag(gram)[None] - 2 * gram
        x = np.subtract.outer(self.r, self.r) ** 2 * squares
        return self._of_groups((np.outer(self.p, self.p) * x).sum(), math.sqrt(self.mean @ self.mean))

    def _of_groups(self, second_moment: float, mean: float) -> float:
        """The variance of the mean over P groups; of a group's term, times -1 / (G max_tokens)."""
        return (second_moment / (G * MAX_TOKENS) ** 2 - mean**2) / P


Drawn = tuple[list, list[torch.Tensor]]


def draws(state: TrainState, n: int, sampler: Sampler, shared: bool = False) -> Drawn:
    """n sets of a sampler's rollouts, and 2 n exact gradients: A and B of each by turns.

    shared: A has the random numbers of g.
    """
    sampler_keys = [RngKey(0, i, Stream.GRADIENT_SAMPLED) for i in range(n)]
    keys = [RngKey(0, i, Stream.GRADIENT_EXACT) for i in range(2 * n)]
    if shared:
        keys[::2] = sampler_keys
    sampled = [drawn(state, sampler, key, state.version) for key in sampler_keys]
    return sampled, [exact_gradient(state, key) for key in keys]


@pytest.fixture(scope="module")
def sound(state) -> Drawn:
    return draws(state, DRAWS, state.sampler)


def beyond(
    state: TrainState,
    answers: list[Answer],
    drawn_sets: Drawn,
    names: tuple[str, ...],
    policy: Literal["sampled", "exact"] = "sampled",
) -> dict[str, float]:
    """What lies beyond 4 standard errors of its closed form, and how many; of the losses `names`.

    policy: whose probabilities the sampler's answers have.
    """
    sampled, exact = drawn_sets
    mu, pi = (np.array([getattr(a, name) for a in answers]) for name in (policy, "exact"))
    truth, forms = ClosedForm(answers, pi, C["none"]), {n: ClosedForm(answers, mu, C[n]) for n in names}
    losses = {name: measured_losses(state)[name] for name in names}
    # Known directions stand beside the exact gradients: the products with them are projections.
    directions = [truth.mean, *(form.mean for form in forms.values())]
    beside = [*exact, *(torch.from_numpy(u).float() for u in directions)]
    n, by_figure = len(sampled), {}
    for name, by_layer in loss_products(state, losses, sampled, beside):
        products, form = by_layer["model"], forms[name]
        drawn_alone, along = products[: 3 * n, : 3 * n], products[: 3 * n, 3 * n :]
        figures = _step_figures(drawn_alone, form, truth) | _estimates(drawn_alone, form, truth)
        figures |= _projections("g", along[:n], form, directions)
        figures |= _projections("exact", along[n:], truth, directions)
        place = 1 + names.index(name)  # of E g among the directions
        figures |= _covariances(drawn_alone, along[:, [place, 0, 0]], [form.mean, truth.mean, truth.mean])
        by_figure |= {f"{name} {what}": float(sigmas) for what, sigmas in figures.items()}
    return {what: sigmas for what, sigmas in by_figure.items() if not abs(sigmas) <= 4}


def _sigmas(values: list[float], true: float) -> float:
    """How many standard errors the mean of independent values is from the true one."""
    return (np.mean(values) - true) / (np.std(values, ddof=1) / math.sqrt(len(values)))


def _step_figures(products: np.ndarray, form: ClosedForm, truth: ClosedForm) -> dict[str, float]:
    """The figures of single steps, whose means are known.

    products: of n draws of g, then of A and B by turns.
    """
    n = len(products) // 3
    places = [[i, n + 2 * i, n + 2 * i + 1] for i in range(n)]
    steps = [products[np.ix_(place, place)] for place in places]
    figures, floors = [figures_of_step(x) for x in steps], [floor_of_step(x[1:, 1:]) for x in steps]
    mean_squares = [x[1:, 1:].sum() / 4 for x in steps]
    b = form.mean - truth.mean
    apart = [f["distance"] ** 2 * m for f, m in zip(figures, mean_squares, strict=True)]
    floor = [f["distance"] ** 2 * m for f, m in zip(floors, mean_squares, strict=True)]
    noise = truth.total_variance
    return {
        "inner": _sigmas([f["inner"] for f in figures], form.mean @ truth.mean),
        "exact inner": _sigmas([f["inner"] for f in floors], truth.mean @ truth.mean),
        "norm": _sigmas([f["norm"] ** 2 for f in figures], form.mean @ form.mean + form.total_variance),
        "exact norm": _sigmas([f["norm"] ** 2 for f in floors], truth.mean @ truth.mean + noise),
        "distance": _sigmas(apart, b @ b + form.total_variance + noise / 2),
        "floor": _sigmas(floor, 1.5 * noise),
    }


def _covariances(products: np.ndarray, along: np.ndarray, means: list[np.ndarray]) -> dict[str, float]:
    """Whether g, A and B of one step are independent: the mean of <x - E x, y - E y>, which is then 0.

    along [3 n, 3]: the products of all draws with E g, E A and E B, the `means`.
    """
    n = len(products) // 3
    places = {"g": np.arange(n), "A": np.arange(n, 3 * n, 2), "B": np.arange(n + 1, 3 * n, 2)}
    covariances = {}
    for (i, x), (j, y) in combinations(enumerate("gAB"), 2):
        at_x, at_y = places[x], places[y]
        centred = (
            products[np.ix_(at_x, at_y)] - along[at_x, j][:, None] - along[at_y, i] + means[i] @ means[j]
        )
        # Pairs of different steps are independent in any case, and say how large such a product is.
        deviation = math.sqrt(np.mean(centred[~np.eye(n, dtype=bool)] ** 2))
        covariances[f"covariance of {x} and {y}"] = np.diag(centred).mean() / (deviation / math.sqrt(n))
    return covariances


def _estimates(products: np.ndarray, form: ClosedForm, truth: ClosedForm) -> dict[str, float]:
    """The estimates from all draws of g and of A."""
    n = len(products) // 3
    places = [*range(n), *range(n, 3 * n, 2)]
    estimates = estimate(products[np.ix_(places, places)])
    square, b = truth.mean @ truth.mean, form.mean - truth.mean
    true = {
        "cosine": form.mean @ truth.mean / math.sqrt(form.mean @ form.mean * square),
        "length": form.mean @ truth.mean / square,
        "bias": b @ b / square,
        "noise": math.sqrt(form.total_variance / square),
    }
    if form.mean @ truth.mean > 0.9999 * math.sqrt(form.mean @ form.mean * square):
        del true["cosine"]  # at its largest value the error is of second order, which no jackknife sees
    return {
        f"estimated {name}": (getattr(estimates, name).value - x) / getattr(estimates, name).standard_error
        for name, x in true.items()
    }


def _projections(
    gradient: str, products: np.ndarray, form: ClosedForm, directions: list[np.ndarray]
) -> dict[str, float]:
    """How far the mean of gradients is from its own, along each direction. products [n, directions]"""
    n = len(products)
    return {
        f"{gradient} direction {k}": (products[:, k].mean() - form.mean @ u) / math.sqrt(form.variance(u) / n)
        for k, u in enumerate(directions)
    }


@pytest.mark.parametrize("names", [("none", "full_sequence"), ("own", "full", "mis")])
def test_the_tool_has_the_expectation_and_the_noise_of_the_closed_form(state, answers, sound, names):
    assert beyond(state, answers, sound, names) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda ratio, low, high: 1.0 / ratio, id="sign"),
        pytest.param(lambda ratio, low, high: ratio * ratio, id="twice"),
    ],
)
def test_control_a_wrong_correction_is_seen(state, answers, sound, monkeypatch, wrong):
    monkeypatch.setitem(CORRECTIONS, "full", wrong)
    seen = beyond(state, answers, sound, ("full_sequence",))
    assert any("direction" in what for what in seen)


def test_control_exact_draws_with_the_random_numbers_of_the_sampler_are_seen(state, answers):
    """The sampler is the policy here, so equal random numbers draw equal answers: g is A."""
    seen = beyond(state, answers, draws(state, 24, state.evaluator, shared=True), ("none",), "exact")
    assert "none covariance of g and A" in seen
    assert "none covariance of g and B" not in seen
