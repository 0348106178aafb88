"""Loss scales that are powers of two change no bit, an overflow changes nothing, every precision is exact."""

import json
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from zerokl.cli import main
from zerokl.engine.config.config_file import load_config, to_toml
from zerokl.engine.config.precision_section import PrecisionConfig
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.runs.checks.verify import random_pairs
from zerokl.engine.runs.run import train
from zerokl.engine.train.loss_scaling import IN_A_ROW, LossScaler
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.optimizer import GradientOverflowError, Optimizer
from zerokl.engine.train.parallel.workers import Workers
from zerokl.engine.train.underflow import Underflow, ZeroCounts
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.passes import Pass
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.scoring import logprobs, pack

from tests.helpers import sums_of, total_unequal, zero_buffers

HALF = "float16"
SMALLEST_NORMAL = 2.0**-14


@pytest.fixture(scope="module")
def plain_weights(config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """plain_weights(dtype): the hash of the final weights of a run in `dtype`, which is done once."""
    return cache(lambda dtype: train(config(dtype=dtype), tmp_path_factory.mktemp("plain") / dtype).weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", HALF])
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"head_dtype": "float32"},
        *(pytest.param({"cache_dtype": d}, marks=pytest.mark.full) for d in ("bfloat16", HALF)),
    ],
)
def test_every_precision_has_mismatch_zero_and_one_fingerprint(
    config, plain_weights, tmp_path, dtype, precision
):
    keys = {f"precision__{k}": v for k, v in precision.items()}
    a = train(config(dtype=dtype, **keys), tmp_path / "a")
    cut_up = dict(micro_batch=2, workers=2, native__max_concurrency=2)
    b = train(config(dtype=dtype, **cut_up, **keys), tmp_path / "b")
    assert (a.tokens_unequal, a.mismatch_max_abs, a.weights) == (0, 0.0, b.weights)
    # A cache in fp16 holds the values of bf16 exactly, because fp16 has more bits of mantissa.
    wider_cache = [{"cache_dtype": HALF}] if dtype == "bfloat16" else []
    exact = [{}, {"head_dtype": dtype}, {"cache_dtype": dtype}, *wider_cache]
    assert (a.weights == plain_weights(dtype)) == (precision in exact), (
        "control: a setting that rounds elsewhere must show"
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_any_power_of_two_as_scale_gives_one_fingerprint(config, tmp_path, dtype):
    off = train(config(dtype=dtype), tmp_path / "off").fingerprint
    for k in (0, 5, 20):
        scaled = config(
            dtype=dtype, precision__scaling="static", precision__scale=2.0**k, precision__maximum=2.0**24
        )
        assert train(scaled, tmp_path / str(k)).fingerprint == off


class _Backward:
    """The gradients of one fp16 backward at loss scale 2^k.

    Also each operation in the order of the backward, and whether its gradients were all normal numbers.
    """

    def __init__(self, decoder: Decoder, k: int):
        buffers = zero_buffers([*decoder.w.values(), decoder.lm_head])
        self.order: list[tuple[str, bool]] = []
        batch = pack(random_pairs(6, 14, decoder.config.vocab_size, 0))
        logp, _ = logprobs(
            decoder,
            batch,
            SamplingParams(),
            lambda name, x: x.register_hook(lambda dx: self._see(name, dx)),
            buffers=buffers,
        )
        (logp.sum() * 2.0 ** (k - 6)).backward()
        scaled = [sums * 2.0**-k for sums in sums_of(buffers)]
        self.gradients = dict(zip(decoder.w, scaled, strict=False))

    def _see(self, name: str, dx: torch.Tensor | None) -> None:
        if dx is not None:
            normal = (dx == 0) | (dx.abs() >= SMALLEST_NORMAL) & torch.isfinite(dx)
            self.order.append((name, bool(normal.all())))

    def exact_weights(self) -> list[str]:
        """Weights whose gradient comes before the first gradient that fp16 cannot hold."""
        weights = {
            "down_proj": "down",
            "gate_up": "gate_up",
            "o_proj": "o",
            "post_norm": "post_norm",
            "qkv": "qkv",
            "norm": "norm",
        }
        names = []
        for name, all_normal in self.order:
            if not all_normal:
                break
            layer, _, op = name.rpartition(".")
            if op in weights:
                names.append(f"{layer}.{weights[op]}" if layer else weights[op])
        return names


def test_fp16_gradients_keep_their_bits_at_any_scale_without_underflow(model):
    """fp16 has few exponents, so only weights before the first underflow of the backward are compared.

    Attention's gradient of the first position is rounding noise that no scale lifts to a normal number.
    """
    decoder = load_decoder(model, torch.float16)
    low, high = _Backward(decoder, 19), _Backward(decoder, 20)
    both = [name for name in low.exact_weights() if name in high.exact_weights()]
    assert {"norm", "layers.1.down", "layers.1.o"} <= set(both)
    for name in both:
        assert total_unequal([low.gradients[name]], [high.gradients[name]]) == 0, name
    tiny = _Backward(decoder, 2)
    assert "layers.1.down" not in tiny.exact_weights()
    assert total_unequal([tiny.gradients["layers.1.down"]], [low.gradients["layers.1.down"]]) > 0, (
        "control: underflow costs bits"
    )


def test_zeros_are_counted_at_both_ends_of_the_backward(model):
    decoder = load_decoder(model, torch.float16)
    batch = pack([([3, 4, 5], [6, 7]), ([5], [8, 9, 10]), ([7, 8], [9])])
    counts = {}
    for k in (10, -22, -60):
        zeros = ZeroCounts()
        counter = Underflow(batch, zeros)
        logp, _ = logprobs(decoder, batch, SamplingParams(), counter.hook)
        counter.watch(logp)
        # Three tokens have a gradient. Without one are sequence 2 and the row that predicts the last token of
        # sequence 1.
        upstream = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        (logp * upstream * 2.0**k).sum().backward()
        counts[k] = zeros.read()
    D = decoder.config.hidden_size
    assert counts[10] == {"norm": 0, "embed": 0}, "rows without a gradient are not counted"
    assert 0 < counts[-22]["norm"] < 3 * D
    assert counts[-60] == {"norm": 3 * D, "embed": (4 + 2) * D}, (
        "the rows that the three tokens with a gradient are predicted from or depend on"
    )


def _optimizer(model) -> Optimizer:
    decoder = load_decoder(model, torch.float32)
    return Optimizer(SlicedWeights(decoder, decoder.flat.detach()), OptimizerConfig(), 8)


def _gradient(optimizer: Optimizer, seed: int = 0) -> torch.Tensor:
    return torch.randn(optimizer.layout.numel, generator=torch.Generator().manual_seed(seed)) * 1e-2


def _state(optimizer: Optimizer) -> list[torch.Tensor]:
    return [x.clone() for x in (optimizer.weights.master, *optimizer.moments)]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_overflow_is_named_and_reaches_nothing(model, kind, bad):
    optimizer, scaler = _optimizer(model), LossScaler(PrecisionConfig(scaling=kind, scale=8.0), torch.float16)
    assert scaler.update(optimizer, _gradient(optimizer)).applied
    before, updates = _state(optimizer), optimizer.updates
    poisoned = _gradient(optimizer, 1)
    for name in ("layers.1.down", "layers.0.qkv"):
        optimizer.layout.views(poisoned)[name][40, 3] = bad
    result = scaler.update(optimizer, poisoned)
    assert (result.applied, result.notes) == (
        False,
        {"scaling/overflow": "model.layers.0.self_attn.q_proj.weight"},
    )
    assert (result.metrics["scaling/skipped"], result.metrics["scaling/scale"]) == (1.0, 8.0)
    assert total_unequal(before, _state(optimizer)) == 0
    assert optimizer.updates == updates
    assert scaler.scale == (4.0 if kind == "dynamic" else 8.0)


def test_without_scaling_an_overflow_ends_the_run(model):
    optimizer, scaler = _optimizer(model), LossScaler(PrecisionConfig(scaling="off"), torch.float16)
    gradient = torch.full((optimizer.layout.numel,), math.inf)
    with pytest.raises(GradientOverflowError, match=r"model\.embed_tokens\.weight is not finite at update 0"):
        scaler.update(optimizer, gradient)


def test_the_dynamic_scale_grows_shrinks_and_stays_within_its_bounds(model):
    optimizer = _optimizer(model)
    cfg = PrecisionConfig(
        scaling="dynamic", scale=8.0, growth_interval=2, backoff=0.25, minimum=1.0, maximum=16.0
    )
    scaler, scales = LossScaler(cfg, torch.float32), []
    good, bad = _gradient(optimizer), torch.full((optimizer.layout.numel,), math.nan)
    for ok in (1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1):
        scales.append(scaler.scale)
        assert scaler.update(optimizer, good if ok else bad).applied == bool(ok)
    assert scales == [8, 8, 16, 16, 16, 4, 4, 1, 1, 1, 2]


@pytest.mark.parametrize("loss_scale", [2.0**-3, 2.0**40])
def test_the_optimizer_divides_by_the_scale_exactly(model, loss_scale):
    plain, scaled = _optimizer(model), _optimizer(model)
    for seed in range(3):
        gradient = _gradient(plain, seed)
        metrics = plain.update(gradient)
        assert scaled.update(gradient * loss_scale, loss_scale) == metrics
    assert total_unequal(_state(plain), _state(scaled)) == 0


@pytest.mark.full
def test_a_huge_scale_falls_until_nothing_overflows(config, tmp_path, read_jsonl, capsys):
    precision = dict(scaling="dynamic", scale=2.0**30, maximum=2.0**30, backoff=0.25)
    keys = {f"precision__{k}": v for k, v in precision.items()}
    summary = train(config(dtype=HALF, steps=20, **keys), tmp_path / "run")
    assert (summary.tokens_unequal, summary.steps) == (0, 20)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    skipped = [m["scaling/skipped"] for m in lines]
    assert 1 <= sum(skipped) < IN_A_ROW
    assert skipped == sorted(skipped, reverse=True), "only the first steps overflow"
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    versions = [next(r["weight_version"] for r in rollouts if r["step"] == s) for s in range(20)]
    assert versions == [sum(1 - int(x) for x in skipped[:s]) for s in range(20)]
    for m, skip in zip(lines, skipped, strict=True):
        assert (m.get("scaling/overflow", "").startswith("model.")) == (m["grad_norm"] is None) == bool(skip)
    message = "overflowed at loss scale 1.07374e+09; the update was skipped, the scale is now 2.68435e+08"
    assert message in capsys.readouterr().out
    assert summary.reward_last5 > summary.reward_first + 0.1


class _Plant:
    """Puts an infinity into the gradient of some steps, as a kernel that overflows would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int]):
        sum_shards, calls = Workers.sum_shards, []

        def planted(self, work, shards):
            results, gradient = sum_shards(self, work, shards)
            if len(calls) in steps:
                self.host.decoder.layout.views(gradient)["layers.0.o"][1, 2] = math.inf
            calls.append(0)
            return results, gradient

        monkeypatch.setattr(Workers, "sum_shards", planted)


def test_a_planted_infinity_skips_its_step_and_no_other(config, tmp_path, read_jsonl, monkeypatch):
    _Plant(monkeypatch, {1})
    summary = train(config(dtype=HALF, steps=20), tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [m["scaling/skipped"] for m in lines] == [0.0, 1.0] + [0.0] * 18
    assert lines[1]["scaling/overflow"] == "model.layers.0.self_attn.o_proj.weight"
    assert [m["scaling/scale"] for m in lines[:3]] == [65536.0, 65536.0, 32768.0]
    assert summary.reward_last5 > summary.reward_first + 0.1


@pytest.mark.full
def test_ten_overflows_in_a_row_end_the_run_with_the_reason(config, tmp_path, monkeypatch, capsys):
    _Plant(monkeypatch, set(range(1, 30)))
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config(dtype=HALF, steps=20)))
    assert main(["train", str(path), "--run_dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "zerokl: 10 updates in a row overflowed, the last at loss scale 128 "
        "in the gradient of model.layers.0.self_attn.o_"
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 + IN_A_ROW - 1
    assert json.loads(lines[-1])["scaling/skipped"] == 1.0


def test_a_logit_that_is_not_finite_stops_with_its_place(config, model, tmp_path):
    message = r"logits of prompt 0, sample 0, position 0 are not finite.* overflow in torch\.float16"
    with pytest.raises(FloatingPointError, match=message):
        train(config(dtype=HALF, optimizer__lr="1e6", steps=5), tmp_path / "run")


def test_the_fp32_head_reads_the_same_weights_and_feeds_the_same_gradient(model):
    plain = load_decoder(model, torch.bfloat16)
    wide = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(lm_head=torch.float32))
    h = torch.randn(5, plain.config.hidden_size).bfloat16()
    ids = torch.tensor([3, 1, 4, 1, 5])
    expected = plain.lm_head.detach().float().requires_grad_()
    linear_logprob(h.float(), expected, ids)[0].sum().backward()
    assert total_unequal([wide.logits_weight().detach()], [expected.detach()]) == 0
    lm_head_buffers = zero_buffers([wide.lm_head])
    weight, buffers = wide.logits_weight_and_buffers(lm_head_buffers)
    linear_logprob(h.float(), weight, ids, in_pass=Pass(buffers=buffers))[0].sum().backward()
    assert total_unequal(sums_of(lm_head_buffers), [expected.grad]) == 0
    linear_logprob(h.float(), wide.logits_weight(), ids)[0].sum().backward()
    assert total_unequal([wide.lm_head.grad], [expected.grad.bfloat16()]) == 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("precision.scale", "3", "must be a power of two"),
        ("precision.scale", "0", "power of two"),
        ("precision.backoff", "0.3", "power"),
        ("precision.backoff", "1", "less than 1"),
        ("precision.scaling", "sometimes", "scaling"),
        ("precision.scale", "1e300", "must be 0, or lie in 1e-37"),
        ("precision.minimum", "131072", "must lie between"),
        ("precision.sampler_dtype", "bfloat16", "set exact = false"),
        ("precision.head_dtype", "float16", "head_dtype"),
    ],
)
def test_bad_precision_is_refused_in_one_line(key, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(None, None, {key: value})
    assert str(caught.value).startswith("config: ")
    assert "\n" not in str(caught.value)


def test_vllm_is_refused_what_it_does_not_know():
    with pytest.raises(ValueError, match="vLLM's cache holds the compute dtype"):
        load_config(None, None, {"sampler": "vllm-zerokl", "precision.cache_dtype": "bfloat16"})
