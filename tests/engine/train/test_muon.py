"""Muon: its weights and steps beside torch.optim.Muon, which matrices it has, and its state."""

import pytest
import torch
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.runs.init import PRESETS, random_decoder
from zerokl.engine.train import optimizer as optimizer_module
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.muon import Matrix, matrices
from zerokl.engine.train.optimizer import Optimizer
from zerokl.files.bitwise import count_unequal
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder

from tests.helpers import assert_at_most_twice_the_error, randn
from tests.random_model import MIXTURES

UPDATES = 4


def muon(decoder: Decoder, **settings: object) -> Optimizer:
    cfg = OptimizerConfig(name="muon", lr=3e-3, max_grad_norm=0.0, **settings)
    return Optimizer(SlicedWeights(decoder, decoder.flat.detach().float()), cfg, UPDATES)


def gradients(decoder: Decoder) -> list[torch.Tensor]:
    """Of each update, with 0 between the weights."""
    flats = [torch.zeros(decoder.layout.trained_numel) for _ in range(UPDATES)]
    for i, flat in enumerate(flats):
        for j, view in enumerate(decoder.layout.trained_views(flat).values()):
            view.copy_(randn(100 * i + j, *view.shape, scale=0.01 * (i + 1)))
    return flats


def updated(decoder: Decoder, **settings: object) -> tuple[torch.Tensor, Optimizer]:
    """The weights after all updates."""
    ours = muon(decoder, **settings)
    for gradient in gradients(decoder):
        ours.update(gradient)
    return decoder.flat.detach().clone(), ours


def by_torch(decoder: Decoder, dtype: torch.dtype, monkeypatch, **settings) -> dict[str, torch.Tensor]:
    """torch's own Muon and AdamW, without the rounding of polar factors to bf16."""
    views = decoder.layout.checkpoint_views(decoder.flat.detach())
    w = {name: x.to(dtype, copy=True).requires_grad_() for name, x in views.items()}
    decay, ratio = settings.pop("weight_decay", 0.0), settings.pop("muon_lr_ratio", 1.0)
    adjustment = settings.pop("adjust_lr", "match_rms_adamw")
    chosen = {"momentum": 0.95, "adjust_lr_fn": adjustment, "weight_decay": decay} | settings
    vectors, embeddings, layer_matrices = [], [], []
    for name, x in w.items():
        (vectors if x.dim() == 1 else layer_matrices if ".layers." in name else embeddings).append(x)
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": embeddings, "weight_decay": decay}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    optimizers = adamw, torch.optim.Muon(layer_matrices, lr=3e-3 * ratio, **chosen)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        for flat in gradients(decoder):
            for name, gradient in decoder.layout.trained_views(flat).items():
                w[name].grad = gradient.to(dtype)
            for optimizer in optimizers:
                optimizer.step()
    return {name: x.detach() for name, x in w.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1, "muon_lr_ratio": 2.0},
        {"adjust_lr": "original", "nesterov": False, "ns_steps": 3, "momentum": 0.8},
    ],
    ids=["defaults", "original"],
)
def test_the_error_is_at_most_twice_that_of_torch(model, monkeypatch, settings):
    decoder = load_decoder(model, torch.float32)
    plain = by_torch(decoder, torch.float32, monkeypatch, **settings)
    exact = by_torch(decoder, torch.float64, monkeypatch, **settings)
    updated(decoder, **settings)
    ours = decoder.layout.checkpoint_views(decoder.flat.detach())
    for name, x in ours.items():
        assert_at_most_twice_the_error(x, plain[name], exact[name], name)


@pytest.mark.parametrize(
    "other",
    [
        {"ns_steps": 4},
        pytest.param({"nesterov": False}, marks=pytest.mark.full),
        pytest.param({"momentum": 0.9}, marks=pytest.mark.full),
        pytest.param({"muon_lr_ratio": 1.0 + 2**-20}, marks=pytest.mark.full),
    ],
)
def test_control_another_setting_has_other_weights(model, other):
    expected, _ = updated(load_decoder(model, torch.float32))
    assert count_unequal(updated(load_decoder(model, torch.float32), **other)[0], expected) > 0


def test_matrices_of_layers_have_one_moment_and_the_rest_is_adamws(model):
    decoder = load_decoder(model, torch.float32)
    before, gradient = decoder.flat.detach().clone(), gradients(decoder)[0]
    ours = muon(decoder)
    ours.update(gradient)
    other = load_decoder(model, torch.float32)
    cfg = OptimizerConfig(lr=3e-3, max_grad_norm=0.0)
    Optimizer(SlicedWeights(other, before), cfg, UPDATES).update(gradient)
    views = [decoder.layout.trained_views(x) for x in (decoder.flat, other.flat, ours.moments[1])]
    for name, x in views[0].items():
        is_muon = x.dim() == 2 and ".layers." in name
        assert (count_unequal(x.detach(), views[1][name].detach()) > 0) == is_muon, name
        assert views[2][name].any() != is_muon, name
    second = sum(x.numel() for name, x in views[0].items() if x.dim() == 1 or ".layers." not in name)
    padding = decoder.layout.numel - sum(x.numel() for x in views[0].values())
    assert len(ours._second._kept) == second + padding


def test_slices_decide_no_bit(model, monkeypatch):
    expected, _ = updated(load_decoder(model, torch.float32), weight_decay=0.1)
    monkeypatch.setattr(optimizer_module, "SLICE", 4096)
    assert count_unequal(updated(load_decoder(model, torch.float32), weight_decay=0.1)[0], expected) == 0


def test_stacked_experts_are_a_matrix_each_and_biases_none(monkeypatch):
    """gpt-oss stacks experts as [experts, inputs, outputs], and their biases as [experts, outputs]."""
    monkeypatch.setitem(PRESETS, "test", MIXTURES["gpt_oss"])
    layout = random_decoder("test", 90, 0).layout
    made = {matrix.start: matrix for matrix in matrices(layout)}
    experts = layout.entries["layers.0.experts.down"]
    number, inputs, outputs = experts.shape
    for i in range(number):
        matrix = made.pop(experts.offset + i * inputs * outputs)
        assert matrix[1:] == (inputs, outputs, True)
        assert matrix.lr_ratio("original") == max(1.0, outputs / inputs) ** 0.5
    assert layout.entries["layers.0.experts.down_bias"].offset not in made
    q, k, v = ("qkv", 0), ("qkv", 64), ("qkv", 96)
    for (name, first), rows in zip((q, k, v), (64, 32, 32), strict=True):
        entry = layout.entries[f"layers.0.{name}"]
        assert made.pop(entry.offset + first * entry.shape[1])[1:] == (rows, entry.shape[1], False)
    assert made.keys() & {layout.entries[name].offset for name in ("embed", "norm")} == set()


def test_a_step_is_as_large_as_adamws():
    """0.2 is the root mean square of AdamW's steps (arXiv:2502.16982)."""
    for rows, columns in ((64, 64), (96, 40), (30, 200)):
        matrix = Matrix(0, rows, columns)
        step = (rows * columns) ** -0.5 * min(rows, columns) ** 0.5 * matrix.lr_ratio("match_rms_adamw")
        assert step == pytest.approx(0.2)
    assert Matrix(0, 30, 200).lr_ratio("original") == 1.0
    assert Matrix(0, 200, 50).lr_ratio("original") == 2.0
