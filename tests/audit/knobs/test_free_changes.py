"""Where a difference enters a model, by free changes of each operation: their slopes, and what is told."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Qwen3MoeConfig
from zerokl.audit.hypotheses.noise import weight
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.audit.hypotheses.tried import Tried
from zerokl.audit.knobs import column, gradients
from zerokl.audit.knobs.column import KnobModel
from zerokl.audit.knobs.forward import Tokens
from zerokl.audit.knobs.free_changes import ALL, Difference, stacked
from zerokl.audit.knobs.gradients import Change, gradients_of
from zerokl.audit.knobs.knob import Turn
from zerokl.audit.knobs.knobs import knobs_of
from zerokl.audit.knobs.module_places import places_of
from zerokl.engine.rollout.hf import load_model

from tests.audit.families import FAMILIES, write_family

NOISE = 5e-3
TRIED = Tried(distance=1.0, tokens=100)


class World:
    """A tiny model, lines of chance, and the features of its changes."""

    def __init__(self, model, folder=None):
        self.folder = folder
        self.model = model.requires_grad_(False)
        self.places = places_of(self.model)
        draws, x = np.random.default_rng(0), np.full(24, np.nan, np.float32)
        ids = [tuple(map(int, draws.integers(5, 250, 30))) for _ in range(12)]
        self.lines = [Line(i, row[:6], row[6:], x, x) for i, row in enumerate(ids)]
        self.tokens = Tokens(self.model, self.lines)
        slopes = gradients_of(self.model, self.places, self.lines)
        self.features = stacked([slopes.features(x) for x in self.lines])
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
    folder = write_family("GPTNeoX", tmp_path_factory.mktemp("m") / "m")
    return World(load_model(folder, torch.float32, "eager"), folder)


def world_of(config) -> World:
    """That of random weights of a configuration."""
    torch.manual_seed(0)
    return World(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"))


def column_entry(world: World, lines: list[Line], weights: int = 1) -> Tried:
    """What the audit says of where the column of some lines enters."""
    model = KnobModel(world.folder, torch.device("cpu"))
    return column._with_entry(TRIED, lines, 2000, weights, "sampler", model)


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


@pytest.mark.parametrize("family", ["halves", "neighbours"])
def test_a_frequency_moves_a_score_as_its_feature_says(world, family):
    """Cohere's cos holds each frequency at two neighbours; that of GPT-NeoX in two halves."""
    small = world if family == "halves" else world_of(CohereConfig(**FAMILIES["Olmo2"]))
    place = small.places.rotations[0]
    inv_freq, by_frequency = place.first.inv_freq, small.of(place.kind, -1, "frequencies")
    assert by_frequency.shape[1] == len(inv_freq)
    for j in range(1, len(inv_freq)):  # the first one is no small change at the last place
        moved = []
        for h in (1e-3, -1e-3):
            inv_freq[j] += h
            moved.append(Tokens(small.model, small.lines).base)
            inv_freq[j] -= h
        assert alike(by_frequency[:, j], (moved[0] - moved[1]) / 2e-3), j


def test_of_cos_that_holds_a_frequency_once_no_angle_is_known():
    angles = torch.randn(5, 4)
    halves, neighbours = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    assert gradients._pairs(halves) == (slice(0, 4), slice(4, None))
    assert gradients._pairs(neighbours) == (slice(0, None, 2), slice(1, None, 2))
    assert gradients._pairs(torch.randn(5, 8)) is None
    assert gradients._pairs(torch.randn(5, 7)) is None


def test_experts_and_their_router_have_the_slopes_of_a_scale():
    """Their outputs are [T, D], and a module that runs for each expert is left out."""
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=2)
    small = world_of(Qwen3MoeConfig(**FAMILIES["Olmo2"], **sizes))
    place = next(x for x in small.places.modules if x.kind == "mlp.experts")
    ways = []
    for scale in (1.002, 0.998):
        handle = place.modules[1].register_forward_hook(lambda _m, _i, y, scale=scale: y * scale)
        ways.append(Tokens(small.model, small.lines).base)
        handle.remove()
    for form in ("channels", "prompts", "places"):
        assert alike(small.of("mlp.experts", 1, form).sum(1), (ways[0] - ways[1]) / 4e-3), form
    assert Change("mlp.gate", 1, "weight") in small.features
    assert not any("act_fn" in x.operation for x in small.features)


def test_an_output_without_a_row_for_each_token_is_left_out():
    shapes = {(1, 5, 3): True, (1, 5, 2, 3): True, (5, 3): True, (1, 3, 5): False, (3, 5): False, (5,): False}
    assert {x: gradients._has_rows(torch.zeros(x), 5) for x in shapes} == shapes


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
    told = column_entry(world, lines).entry
    here = world.entry(scores, noise=1e-6)
    assert told.words == here.words
    assert told.share == pytest.approx(here.share, abs=0.02)  # lines are left out in another order


def repeated(world: World) -> list[Line]:
    """Lines with a difference of chance at each token: four copies of each, one of them with another end."""
    draws, lines = np.random.default_rng(3), []
    for x, base in zip(world.lines, np.split(world.tokens.base, len(world.lines)), strict=True):
        x = replace(x, logged=(base + draws.standard_normal(24)).astype(np.float32))
        lines += [x, x, x, replace(x, completion_ids=(*x.completion_ids[:-1], 7))]
    return lines


def test_lines_that_repeat_tell_and_list_no_place(world):
    tried = column_entry(world, repeated(world))
    assert tried == TRIED


def test_control_lines_that_repeat_are_listed_where_each_has_a_number(world, monkeypatch):
    monkeypatch.setattr(column, "prompt_numbers", lambda lines: np.arange(len(lines)))
    assert column_entry(world, repeated(world)).entry is not None


def test_prompts_that_begin_with_one_another_have_one_number():
    def of(*prompt: int) -> Line:
        return Line(0, prompt, (1, 2), np.zeros(2), np.zeros(2))

    lines = [of(5, 6), of(7, 6), of(5, 6), of(5, 6, 1, 2, 9), of(6, 5), of(7, 6, 5)]
    numbers = list(column.prompt_numbers(lines))
    assert [numbers.index(x) for x in numbers] == [0, 1, 0, 0, 4, 1]


def test_why_no_place_was_looked_for_is_said(world, monkeypatch):
    few = column_entry(world, world.lines[:4])
    assert few.entry is None
    assert "96 tokens of 4 different prompts within the limits without --knobs" in few.untried
    assert "0 tokens of 0 " in column_entry(world, world.lines, 10**12).untried
    same = [replace(x, prompt_ids=(3, 4)) for x in world.lines]
    assert "288 tokens of 1 different prompts" in column_entry(world, same).untried
    monkeypatch.setattr(column, "_SLOPES", 1)
    assert "24 tokens of 1 " in column_entry(world, world.lines).untried


def test_one_line_that_is_too_long_does_not_end_the_choice(world):
    long = replace(world.lines[0], prompt_ids=(9,) * 600)
    kept = column._affordable([long, *world.lines[1:]], 20000, work=11 * 24 * 30)
    assert sorted(x.index for x in kept) == list(range(1, 12))


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


def test_few_prompts_need_the_errors_of_students_t():
    def needed(prompts: int) -> float:
        return Difference(np.ones(prompts), np.arange(prompts), 1.0)._errors_needed()

    # Its quantiles at 0.99379, where a normal number has 2.5: by integrals of its density.
    assert [needed(x) for x in (5, 6, 12, 10**6)] == pytest.approx([4.323, 3.816, 2.984, 2.5], rel=0.02)


def test_of_few_prompts_nothing_is_looked_for(world):
    keep = world.numbers < 4
    features = {x: f[keep] for x, f in world.features.items()}
    assert Difference(np.ones(keep.sum()), world.numbers[keep], 1.0).entry(features) is None


def features_of_chance(*changes: Change) -> dict[Change, np.ndarray]:
    draws = np.random.default_rng(7)
    return {x: draws.standard_normal((288, -(-x.width // x.each))).astype(np.float32) for x in changes}


def test_channels_that_share_a_number_are_told_as_a_range(world):
    wide, narrow = Change("wide", 0, "channels", 576), Change("narrow", 0, "channels", 32)
    features = features_of_chance(wide, narrow)
    for change, words in ((wide, "channels 35 to 39"), (narrow, "channel 7")):
        told = Difference(features[change][:, 7], world.numbers, 1.0).entry(features)
        assert f"most of it by {words}, in layer 0" in told.words, told
    assert gradients._grouped(torch.ones(2, 576), wide.each).tolist() == [[5.0] * 115 + [1.0]] * 2


def test_a_change_with_a_slope_that_is_no_number_is_dropped(world):
    first, second = Change("a", 0, "channels", 32), Change("a", 1, "channels", 32)
    features = features_of_chance(first, second, Change("b", 0, "channels", 32))
    r = features[first][:, 7]
    features[second][3, 2] = np.inf
    assert "in layer 0" in Difference(r, world.numbers, 1.0).entry(features).words
    features[first][3, 2] = np.nan
    assert Difference(r, world.numbers, 1.0).entry(features) is None
