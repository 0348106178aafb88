"""Where a difference enters a model, by free changes of each operation: their slopes, and what is told."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.audit.hypotheses.noise import weight
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.knobs import column
from zerokl.audit.knobs.column import KnobModel
from zerokl.audit.knobs.forward import Tokens
from zerokl.audit.knobs.free_changes import ALL, Difference, stacked
from zerokl.audit.knobs.gradients import Change, gradients_of
from zerokl.audit.knobs.knob import Turn
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.engine.rollout.hf import load_model

from tests.audit.families import write_family

NOISE = 5e-3


class World:
    """A tiny model, lines of chance, and the features of its changes."""

    def __init__(self, folder):
        self.folder = folder
        self.model = load_model(folder, torch.float32, "eager").requires_grad_(False)
        self.places = places_of(self.model)
        draws, x = np.random.default_rng(0), np.full(24, np.nan, np.float32)
        ids = [tuple(map(int, draws.integers(5, 250, 30))) for _ in range(12)]
        self.lines = [Line(i, row[:6], row[6:], x, x) for i, row in enumerate(ids)]
        self.tokens = Tokens(self.model, self.lines)
        gradients = gradients_of(self.model, self.places, self.lines)
        self.features = stacked([gradients.features(x) for x in self.lines])
        self.numbers = np.repeat(np.arange(len(ids)), 24)

    def of(self, operation: str, layer: int, form: str) -> np.ndarray:
        return self.features[Change(operation, layer, form)]

    def entry(self, scores: np.ndarray, noise: float = NOISE):
        """Where a column with these scores, and noise, is told to enter."""
        draws, w = np.random.default_rng(1), weight(self.tokens.base)
        r = (scores - self.tokens.base) / w + noise * draws.standard_normal(len(w))
        features = {change: x / w[:, None] for change, x in self.features.items()}
        return Difference(r, self.numbers, noise).entry(features)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(write_family("GPTNeoX", tmp_path_factory.mktemp("m") / "m"))


def slope_of(world: World, what: str, kind: str, layers: tuple[int, ...] | None = None) -> np.ndarray:
    """d scores / d value of a knob at its neutral value, [N], by differences."""
    knobs = knobs_of(world.places, 30, False)
    knob = next(x for x in knobs if x.what == what and kind in x.place.kind)
    ways = (world.tokens.scores((Turn(knob, 1.0 + h, layers or knob.place.layers),)) for h in (2e-3, -2e-3))
    ahead, behind = ways
    return (ahead - behind) / 4e-3


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 0.03 * np.abs(b).max() and np.abs(b).max() > 0)


def test_the_features_of_a_change_add_up_to_the_slope_of_a_knob(world):
    norm = next(x.kind for x in world.places.modules if x.is_norm and -1 not in x.layers)
    for form in ("channels", "prompts", "places"):
        assert alike(world.of(norm, 1, form).sum(1), slope_of(world, "scale", norm, (1,))), form
        assert not alike(world.of(norm, 1, form).sum(1), slope_of(world, "scale", norm, (0,))), form
    for form in ("distances", "keys", "blocks", "heads"):
        _added, scores, values = np.split(world.of("attention", 1, form), 3, axis=1)
        assert alike(scores.sum(1), slope_of(world, "scores", "", (1,))), form
        assert alike(values.sum(1), slope_of(world, "values", "", (1,))), form


def test_the_angles_of_a_rotation_are_its_positions_times_its_frequencies(world):
    place = world.places.rotations[0]
    by_frequency = world.of(place.kind, -1, "frequencies")
    assert alike(by_frequency @ place.first.inv_freq.numpy(), slope_of(world, "positions", ""))


def test_the_embedding_of_a_token_moves_the_lines_that_hold_it(world):
    tokens = [x for x in world.features if x.form.startswith("token ")]
    assert tokens
    for change in tokens[:3]:
        i = int(change.form.split()[1])
        holds = np.array([i in (*x.prompt_ids, *x.completion_ids[:-1]) for x in world.lines])
        moved = np.abs(world.features[change]).sum(1).reshape(len(holds), -1).sum(1) > 0
        assert not moved[~holds].any()
        assert moved[holds].any()


def planted(world: World, kind: str, layer: int, size: float = 0.1) -> np.ndarray:
    """Scores of the model with another scale of each channel of an output."""
    place = next(x for x in world.places.modules if x.kind == kind)
    scale = 1 + size * torch.randn(1000, generator=torch.Generator().manual_seed(2))
    handle = place.modules[layer].register_forward_hook(lambda _m, _i, y: y * scale[: y.shape[-1]])
    try:
        return Tokens(world.model, world.lines).base
    finally:
        handle.remove()


def test_another_scale_of_each_channel_is_told_with_its_operation_and_layer(world):
    kind = "post_attention_layernorm"
    told = world.entry(planted(world, kind, 1))
    assert told.is_told, told
    assert told.words == f"the output of {kind}, or where it is read, channel by channel, in layer 1"
    assert told.text().startswith(f"the difference enters at the output of {kind}")


def test_nothing_is_told_of_rounding_or_of_lines_that_share_no_rule(world):
    assert world.entry(world.tokens.base) is None
    scores, draws = planted(world, "post_attention_layernorm", 1), np.random.default_rng(4)
    mixed = world.tokens.base + draws.permutation(scores - world.tokens.base)
    assert world.entry(mixed) is None
    signs = np.repeat(draws.choice([-1, 1], len(world.lines)), 24)
    told = world.entry(world.tokens.base + signs * (scores - world.tokens.base))
    assert told is None or not told.is_told


def test_a_place_that_leaves_more_than_rounding_is_listed_and_not_told(world):
    kind = "post_attention_layernorm"
    other = np.random.default_rng(5).standard_normal(len(world.tokens.base)) * weight(world.tokens.base)
    scores = planted(world, kind, 1)
    size = np.abs(scores - world.tokens.base).mean()
    told = world.entry(scores + size * other)
    assert not told.is_told
    assert told.text().startswith("the place that explains most is")


def test_a_column_is_weighted_as_its_slopes_are(world):
    """The audit's place of a planted column explains what the same change explains here."""
    scores = planted(world, "post_attention_layernorm", 1).astype(np.float32)
    parts = np.split(scores, len(world.lines))
    lines = [replace(x, logged=y) for x, y in zip(world.lines, parts, strict=True)]
    told = column._entry(lines, 2000, 1, "sampler", KnobModel(world.folder, torch.device("cpu")))
    here = world.entry(scores, noise=1e-6)
    assert told.words == here.words
    assert told.share == pytest.approx(here.share, abs=0.02)  # lines are left out in another order
    assert column._entry(lines[:5], 2000, 1, "sampler", KnobModel(world.folder, torch.device("cpu"))) is None
    assert column._entry(lines, 2000, 10**12, "sampler", KnobModel(world.folder, torch.device("cpu"))) is None


def test_all_layers_are_told_where_none_alone_explains_as_much(world):
    kind = "post_attention_layernorm"
    features = {x: f for x, f in world.features.items() if x.layer >= 0}
    layers = [f for x, f in features.items() if (x.operation, x.form) == (kind, "channels")]
    r = sum(layers) @ np.random.default_rng(6).standard_normal(layers[0].shape[1])
    told = Difference(r / np.abs(r).mean(), world.numbers, 0.2).entry(features)
    assert told.is_told
    assert told.words.endswith("in all layers")
    one = replace(Difference(layers[0][:, 0], world.numbers, 1.0)).entry(features)
    assert "all layers" not in one.words.split(" or ")[0]
    assert ALL not in {x.layer for x in features}


def test_of_few_lines_nothing_is_looked_for(world):
    keep = world.numbers < 5
    features = {x: f[keep] for x, f in world.features.items()}
    assert Difference(np.ones(keep.sum()), world.numbers[keep], 1.0).entry(features) is None
