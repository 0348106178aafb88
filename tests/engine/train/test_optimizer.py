"""The optimizer: a fixed tree sums the shards, and AdamW on fp32 master weights is accurate.

torch.optim.AdamW in fp64 is the judge. The error may be as large as the roundings in fp32 can make it.
"""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.moments import decode, encode
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel.gradient import GradientTree, ShardSum
from zerokl.engine.train.schedule import learning_rate
from zerokl.files.bitwise import count_unequal
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.context import Buffers
from zerokl.model.decoder import Decoder
from zerokl.model.weights import FLAT_TILE, VALUE_HEAD, Layout

from tests.helpers import add_to_grad

HALF_ULP = 2.0**-24  # relative error of one fp32 rounding


def _optimizer(
    model, dtype: torch.dtype = torch.float32, updates: int = 8, **optimizer: object
) -> tuple[Decoder, Optimizer]:
    master = load_decoder(model, torch.float32)
    policy = master if dtype == torch.float32 else load_decoder(model, dtype)
    weights = SlicedWeights(policy, master.flat.detach())
    return policy, Optimizer(weights, OptimizerConfig(**optimizer), updates)


def _gradients(decoder: Decoder, n: int) -> list[dict[str, torch.Tensor]]:
    """n gradients of each weight. Their norms go from 0.05 to 50, so that some are clipped at 1."""
    generator = torch.Generator().manual_seed(0)
    sizes = [0.05 * 1000 ** (i / max(1, n - 1)) / math.sqrt(decoder.layout.numel) for i in range(n)]
    return [
        {name: size * torch.randn(w.shape, generator=generator) for name, w in decoder.w.items()}
        for size in sizes
    ]


def _update(decoder: Decoder, optimizer: Optimizer, gradient: dict[str, torch.Tensor]) -> dict[str, float]:
    flat = torch.zeros(decoder.layout.numel)
    for name, view in decoder.layout.views(flat).items():
        view.copy_(gradient[name])
    return optimizer.update(flat)


def _norm(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in gradient.values()))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_weights_are_those_of_adamw_in_fp64(model, weight_decay, max_grad_norm):
    cfg = OptimizerConfig(
        lr=3e-3,
        schedule="cosine",
        warmup_steps=2,
        min_lr_ratio=0.1,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )
    decoder, optimizer = _optimizer(model, **cfg.model_dump())
    oracle = {name: w.detach().double().clone() for name, w in decoder.w.items()}
    groups = [{"params": [w], "weight_decay": weight_decay if w.dim() > 1 else 0.0} for w in oracle.values()]
    adamw = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)
    slack = {name: torch.zeros_like(w) for name, w in oracle.items()}
    # The first moment of the absolute values, so that nothing cancels.
    size = {name: torch.zeros_like(w) for name, w in oracle.items()}
    clipped = 0
    for t, gradient in enumerate(_gradients(decoder, 8), 1):
        after_warmup = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 3) / 6))
        rate = cfg.lr * t / 2 if t <= 2 else cfg.lr * after_warmup
        norm = _norm(gradient)
        scale = max_grad_norm / norm if 0 < max_grad_norm < norm else 1.0
        clipped += scale != 1.0
        before = {name: w.detach().clone() for name, w in decoder.w.items()}
        metrics = _update(decoder, optimizer, gradient)
        moved = sum(count_unequal(before[name], w) for name, w in decoder.w.items())
        share = moved / sum(w.numel() for w in decoder.w.values())
        assert metrics == pytest.approx({"grad_norm": norm, "lr": rate, "update/moved": share}, rel=1e-9)
        for group, (name, w) in zip(adamw.param_groups, oracle.items(), strict=True):
            group["lr"], w.grad = rate, gradient[name].double() * scale
        adamw.step()
        for name, w in oracle.items():
            size[name] = cfg.beta1 * size[name] + (1 - cfg.beta1) * gradient[name].double().abs() * scale
            v = adamw.state[w]["exp_avg_sq"]
            step = rate * size[name] / (1 - cfg.beta1**t) / ((v / (1 - cfg.beta2**t)).sqrt() + cfg.eps)
            # A step has about 20 roundings, and 4 more for each update that its moments remember. Three more
            # are relative to the weight: of the decay's factor, of the decayed weight and of the result.
            slack[name] += (20 + 4 * t) * HALF_ULP * step + 3 * HALF_ULP * (w.abs() + step)
            assert ((decoder.w[name].detach().double() - w).abs() <= slack[name]).all(), name
    assert clipped == (4 if max_grad_norm else 0)


def test_weight_decay_shrinks_matrices_only(model):
    decoder, optimizer = _optimizer(model, lr=0.5, weight_decay=0.25)
    before = {name: w.detach().clone() for name, w in decoder.w.items()}
    _update(decoder, optimizer, {name: torch.zeros_like(w) for name, w in before.items()})
    for name, w in decoder.w.items():
        assert torch.equal(w, before[name] * (1 - 0.5 * 0.25) if w.dim() > 1 else before[name]), name


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, *(0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(4))]),
    ],
)
def test_learning_rate_rises_then_follows_the_schedule(model, schedule, expected):
    _, optimizer = _optimizer(model, updates=6, lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    for optimizer.updates, rate in enumerate(expected):
        assert optimizer.learning_rate() == pytest.approx(rate)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("least", [0.0, 0.25])
def test_schedules_are_those_of_transformers(warmup, least):
    """Its share of update u; it begins its warm-up at 0, and zerokl ends it one update earlier."""
    total, decay = 47, 10
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    stable = {"num_warmup_steps": warmup, "num_decay_steps": decay, "decay_type": "linear"}
    restarts = transformers.get_cosine_with_hard_restarts_schedule_with_warmup(sgd, warmup, total, 3)
    wsd = transformers.get_wsd_schedule(sgd, num_training_steps=total, min_lr_ratio=least, **stable)
    cfg = OptimizerConfig(lr=2.0, warmup_steps=warmup, schedule="wsd", min_lr_ratio=least)
    cfg = cfg.model_copy(update={"decay_ratio": decay / (total - warmup)})
    cosine = cfg.model_copy(update={"schedule": "cosine_with_restarts", "cycles": 3, "min_lr_ratio": 0.0})
    for update in range(warmup, total):
        assert learning_rate(cfg, update, total) == pytest.approx(2.0 * wsd.lr_lambdas[0](update))
        assert learning_rate(cosine, update, total) == pytest.approx(2.0 * restarts.lr_lambdas[0](update))


def test_low_precision_weights_are_the_master_weights_rounded_once(model):
    decoder, optimizer = _optimizer(model, torch.bfloat16, lr=1e-2)
    for gradient in _gradients(decoder, 2):
        _update(decoder, optimizer, gradient)
    assert torch.equal(decoder.flat, optimizer.weights.master.bfloat16())
    assert not torch.equal(optimizer.weights.master, optimizer.weights.master.bfloat16().float()), (
        "the master weights must keep what bf16 cannot"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_by_name(model, bad):
    decoder, optimizer = _optimizer(model)
    clean_decoder, clean_optimizer = _optimizer(model)
    first, second = _gradients(decoder, 2)
    _update(decoder, optimizer, first)
    before = decoder.flat.detach().clone()
    poisoned = {name: g.clone() for name, g in second.items()}
    poisoned["layers.1.down"][3, 5] = bad
    message = r"model\.layers\.1\.mlp\.down_proj\.weight is not finite at update 1"
    with pytest.raises(FloatingPointError, match=message):
        _update(decoder, optimizer, poisoned)
    assert torch.equal(decoder.flat, before)
    for gradient in (first, second):
        _update(clean_decoder, clean_optimizer, gradient)
    _update(decoder, optimizer, second)
    assert torch.equal(decoder.flat, clean_decoder.flat), (
        "moments and count of updates must be as before the refusal"
    )


@settings(deadline=None)
@given(log2=st.integers(0, 5), data=st.data())
def test_shards_are_added_by_one_perfect_binary_tree(log2, data):
    n = 1 << log2
    empty = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    generator = torch.Generator().manual_seed(n)
    leaves = [None if e else torch.randn(16, generator=generator) for e in empty]

    def add(level: list) -> torch.Tensor | None:
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [b if a is None else a if b is None else a + b for a, b in pairs]
        return level[0]

    tree, buffer = GradientTree(n), torch.empty(16)
    for _ in range(2):  # twice, because the tree must be empty after `take`
        for leaf in leaves:
            # One buffer for all leaves: the tree must not keep a leaf's memory.
            tree.push(None if leaf is None else buffer.copy_(leaf))
        root, expected = tree.take(), add(leaves)
        assert root is expected is None or torch.equal(root, expected)


def test_control_the_order_of_the_shards_matters():
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(64, generator=generator) for _ in range(8)]
    tree = GradientTree(8)
    for leaf in leaves:
        tree.push(leaf)
    assert not torch.equal(tree.take(), sum(leaves))


@pytest.mark.parametrize("tied", [True, False])
def test_a_shard_starts_from_zero_and_an_empty_one_adds_nothing(model, tied):
    decoder = load_decoder(model, torch.float32)
    assert decoder.config.tied
    sums = ShardSum(decoder, 4)

    def add_ones(decoder: Decoder, shards: list[float], buffers: Buffers) -> list[str]:
        (extra,) = shards
        for w in decoder.w.values():
            add_to_grad(buffers[w], 1.0)
        if tied:
            add_to_grad(buffers[decoder.lm_head], extra)
        return ["done"]

    assert sums.add(add_ones, [1.0, None, 1.0, None]) == ["done", None, "done", None]
    total = decoder.layout.views(sums.tree.take())
    for name, sum_of_shards in total.items():
        assert (sum_of_shards == (4.0 if tied and name == "embed" else 2.0)).all(), name


def _waits(optimizer: Optimizer, gradient: torch.Tensor, monkeypatch) -> list[str]:
    """The calls in which the norm would wait for a GPU, with a slice for each row."""
    optimizer._slice, waits = FLAT_TILE, []
    for name in ("cpu", "tolist", "item"):
        call = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name, call=call: waits.append(name) or call(x))
    optimizer._norm(gradient)
    monkeypatch.undo()
    return waits


def test_the_norm_waits_once_for_a_gpu_however_many_slices_there_are(model, monkeypatch):
    decoder = load_decoder(model, torch.float32)
    optimizer = Optimizer(SlicedWeights(decoder, decoder.flat.detach()), OptimizerConfig(), 10)
    gradient = torch.randn(decoder.layout.numel, generator=torch.Generator().manual_seed(0))
    assert gradient.numel() > 10 * FLAT_TILE
    assert _waits(optimizer, gradient, monkeypatch) == ["cpu"]
    whole = optimizer._norm(gradient)
    optimizer._slice = 3 * FLAT_TILE
    assert optimizer._norm(gradient) == whole
    rows = gradient.double().view(-1, FLAT_TILE).square().sum(1)
    assert whole == math.sqrt(math.fsum(rows.tolist()))
    # Control: a number that is read for each slice is noticed.
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda rows: cat([x + 0 * x[:1].sum().item() for x in rows]))
    assert len(_waits(optimizer, gradient, monkeypatch)) > 10


def test_no_gradient_leaves_the_weights(model):
    decoder, optimizer = _optimizer(model)
    before = decoder.flat.detach().clone()
    assert optimizer.update(None)["grad_norm"] == 0.0
    assert torch.equal(decoder.flat, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_critics_head_has_its_own_rate_and_no_other_weight_changes(model, dtype):
    """The head's bits are those of a run at its rate; the bits of the others are those of a run at theirs."""
    config = ModelConfig.from_file(model)
    layout = Layout(config, (), value_head=True)
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))

    def updated(lr: float, ratio: float) -> torch.Tensor:
        first = torch.linspace(-1, 1, layout.numel)
        decoder = Decoder(config, first.to(dtype, copy=True), layout)
        cfg = OptimizerConfig(lr=lr, critic_lr_ratio=ratio)
        optimizer = Optimizer(SlicedWeights(decoder, first), cfg, 2)
        for _ in range(2):
            assert optimizer.update(gradient)["lr"] == lr
        assert torch.equal(decoder.flat, optimizer.weights.whole().to(dtype))
        return optimizer.weights.whole().clone()

    head = slice(next(e.offset for e in layout.trained if e.name == VALUE_HEAD), None)
    both, slow, fast = updated(2.0**-10, 8.0), updated(2.0**-10, 1.0), updated(2.0**-7, 1.0)
    assert torch.equal(both[: head.start], slow[: head.start])
    assert torch.equal(both[head], fast[head])
    assert not torch.equal(both[head], slow[head])


KEPT = {
    "bfloat16": lambda x, signed: x.bfloat16().float(),
    "int8": lambda x, signed: decode(*encode(x, signed), signed),
}


@pytest.mark.parametrize("moments", KEPT)
def test_narrow_moments_are_those_of_fp32_rounded_after_each_update(model, moments):
    """The control: moments that fp32 keeps have other bits from the second update on."""
    decoder, narrow = _optimizer(model, moments=moments)
    wide_decoder, wide = _optimizer(model)
    fp32_decoder, fp32 = _optimizer(model)
    for gradient in _gradients(decoder, 3):
        _update(decoder, narrow, gradient)
        _update(wide_decoder, wide, gradient)
        for moment, signed in zip(wide.moments, (True, False), strict=True):
            for view in wide.layout.trained_views(moment).values():
                view.copy_(KEPT[moments](view.flatten(), signed).view(view.shape))
        _update(fp32_decoder, fp32, gradient)
    assert count_unequal(decoder.flat.detach(), wide_decoder.flat.detach()) == 0
    assert narrow.hash_moments().root == wide.hash_moments().root
    assert count_unequal(decoder.flat.detach(), fp32_decoder.flat.detach()) > 0


@pytest.mark.parametrize(
    "settings", [{"moments": "bfloat16"}, {"moments": "int8"}, {"name": "muon"}], ids=str
)
def test_what_is_kept_goes_through_a_checkpoint_unchanged(model, settings):
    decoder, optimizer = _optimizer(model, **settings)
    first, second = _gradients(decoder, 2)
    _update(decoder, optimizer, first)
    resumed_decoder, resumed = _optimizer(model, **settings)
    resumed.weights.load(decoder.flat.detach().clone())
    resumed.load_moments(optimizer.collect_moments(), optimizer.updates)
    for each_decoder, each in ((decoder, optimizer), (resumed_decoder, resumed)):
        _update(each_decoder, each, second)
    assert count_unequal(decoder.flat.detach(), resumed_decoder.flat.detach()) == 0
    assert optimizer.hash_moments().root == resumed.hash_moments().root
