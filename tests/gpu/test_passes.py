"""Training passes on a fake GPU: the host waits for nothing but the log-probabilities, once a micro-batch.

All ids and tables of a pass go to the device by one upload, however many layers, shards and micro-batches it
has, and the gradient of each micro-batch's log-probabilities by one more. Nobody waits for an upload.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from zerokl.benchmarks.device.families import family_config
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.rollout import scoring_sampler as given_tokens
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.train.losses.advantage import of_tokens
from zerokl.engine.train.parallel import scorer
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.shard import Shard, ShardWork
from zerokl.kernels import attention_plan, linear, logprob, order, to_host
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model import prompts, scoring
from zerokl.model.blocks import mlp

from tests.gpu.device import Device, Fault, gpu, model, model_of, plant, plant_in_torch, send
from tests.helpers import DTYPES

SAMPLES = 2  # of each shard's prompt
ALL, BOTH = SamplingParams(), SamplingParams(0.7, 5, 0.9)


def make_shard(index: int, with_ref: bool = False, with_old: bool = False, C: int = 3) -> Shard:
    """A shard of one prompt, of one token in every third shard, whose samples draw C tokens and 40 more."""
    ids = (20 + index,) * (1 if index % 3 == 1 else 9)
    rollouts = [
        Rollout.of_one_turn(
            index, s, ids, (7,) * (C + 40 * s), np.full(C + 40 * s, -1.0, np.float32), "length", 0
        )
        for s in range(SAMPLES)
    ]
    scores = [r.logprobs - 0.5 for r in rollouts]
    return Shard(
        rollouts,
        of_tokens(np.linspace(-1, 1, SAMPLES), [len(r.logprobs) for r in rollouts]),
        np.full(SAMPLES, 0.1),
        scores if with_old else None,
        scores if with_ref else None,
    )


class Setting(NamedTuple):
    """What a pass computes beside the policy gradient."""

    loss: LossConfig = LossConfig()
    sampling_params: SamplingParams = ALL
    micro_batch: int = 128
    scale: float = 1.0
    watch: bool = False
    recompute: bool = False
    with_ref: bool = False
    with_old: bool = False

    @property
    def work(self) -> ShardWork:
        return ShardWork(
            self.sampling_params, self.loss, self.micro_batch, scale=self.scale, watch=self.watch
        )


SETTINGS = {
    "plain": Setting(),
    "KL reference": Setting(LossConfig(kl_coef=0.1), with_ref=True),
    "staleness": Setting(LossConfig(preset="gspo"), with_old=True),
    "squared log-ratio": Setting(LossConfig(preset="kimi"), with_old=True),
    "top-k and top-p": Setting(sampling_params=BOTH),
    "micro-batches": Setting(micro_batch=1),
    "layers computed again": Setting(recompute=True),
}
SCALED = Setting(scale=1024.0, watch=True)


def train(
    dtype: torch.dtype, in_flight: int, setting: Setting = SETTINGS["plain"], layers: int = 2, shards: int = 0
) -> Device:
    """A pass over `in_flight` shards together, or over so many of them, of 64."""
    with gpu() as device:
        options = {"recompute": True} if setting.recompute else {}
        decoder = model(dtype, layers=layers, **options)
        total = ShardSum(decoder, 64, in_flight)
        device.cuda.events.clear()
        total.add(
            setting.work,
            [make_shard(i, setting.with_ref, setting.with_old) for i in range(shards or in_flight)],
        )
    return device


LOGPROBS = "kernels/to_host.py: _ToHost.forward"
UNDERFLOW = "engine/train/underflow.py: ZeroCounts.read"
UPLOAD = "kernels/upload.py: upload"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("in_flight", [1, 4, 8, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_host_waits_for_log_probabilities_only(dtype, in_flight, setting):
    device = train(dtype, in_flight, SETTINGS[setting])
    assert device.places("wait") == {LOGPROBS}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}
    assert len(device.launches) > 50


@pytest.mark.parametrize("in_flight", [1, 8])
def test_nor_for_more_in_a_model_with_states(in_flight):
    with gpu() as device:
        total = ShardSum(model_of(family_config("qwen3_next", is_small=True), torch.bfloat16), 64, in_flight)
        device.cuda.events.clear()
        total.add(SETTINGS["plain"].work, [make_shard(i) for i in range(in_flight)])
    assert device.places("wait") == {LOGPROBS}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}
    assert Counter(e.kind for e in device.cuda.events)["upload"] == 2, "the tables, and a gradient"


@pytest.mark.parametrize("in_flight", [1, 4, 8, 33])
def test_a_scaled_pass_also_waits_for_the_counts_of_underflow(in_flight):
    device = train(torch.float16, in_flight, SCALED)
    assert device.places("wait") == {LOGPROBS, UNDERFLOW}
    assert device.places("copy") == set()
    assert device.places("upload") == {UPLOAD}


def kinds(dtype: torch.dtype = torch.bfloat16, **options) -> Counter[str]:
    """How often the host did what, in a pass. By default it has one shard."""
    return Counter(e.kind for e in train(dtype, **{"in_flight": 1} | options).cuda.events)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_pass_has_one_upload_and_each_micro_batch_one_wait_and_one_upload(micro_batches):
    each = Setting(micro_batch=SAMPLES // micro_batches)
    expected = {"upload": 1 + micro_batches, "wait": micro_batches}
    assert kinds(setting=each) == expected
    assert kinds(setting=each, layers=3) == expected
    assert kinds(setting=each._replace(micro_batch=33 * each.micro_batch), in_flight=33) == expected
    two = {"upload": 2 * expected["upload"], "wait": 2 * expected["wait"]}
    assert kinds(setting=each, shards=2) == two, "control: two passes"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_counts_of_underflow_cost_one_wait_and_the_upload_of_the_prompts_rows(micro_batches):
    each = SCALED._replace(micro_batch=SAMPLES // micro_batches)
    expected = {"upload": 1 + micro_batches + 1, "wait": micro_batches + 1}
    assert kinds(torch.float16, setting=each) == expected


def test_the_chunks_of_the_lm_head_cost_no_upload(monkeypatch):
    """A chunk has 64 rows here, and the samples of 33 shards draw 46 tokens each."""
    monkeypatch.setattr(logprob, "GPU_CHUNK_BYTES_16", 1)
    assert kinds(in_flight=33) == {"upload": 2, "wait": 1}

    def without_chunks(plain, self):
        return [table for table in plain(self) if table not in self._chunks]

    plant(monkeypatch, scoring.ScoringInputs, "tables", without_chunks)
    assert kinds(in_flight=33)["upload"] > 20, "control: chunks whose tables go alone"


def test_control_tables_made_for_each_layer_are_seen(monkeypatch):
    def forgetful(plain, self, device):
        self._spans.clear()
        return plain(self, device)

    plant(monkeypatch, attention_plan.AttentionPlan, "on", forgetful)
    assert kinds(layers=3)["upload"] > kinds(layers=2)["upload"]


def reads_gradients(plain, buffer, dy, *rest):
    float(dy.abs().max())
    plain(buffer, dy, *rest)


def masks(plain, ctx, dx):
    ctx.inverse = ctx.inverse[ctx.inverse >= 0]
    return plain(ctx, dx)


def on_the_host(*ends, device, **options):
    if len(ends) < 3:
        return torch.arange(*ends, device=device, **options)
    return torch.arange(*ends, **options).to(device)


def waits(plain, *args):
    plain(*args)
    torch.cuda.synchronize()


FAULTS = {
    "a number read in the forward": Fault(
        lambda patch: plant(
            patch, mlp, "silu_mul", lambda plain, x: plain(x) * (1.0 if x.abs().max() < 1 else 2.0)
        ),
        "model/blocks/mlp.py: GatedMlp.forward",
        "silu_mul(x)",
        "wait",
    ),
    "a number of the host in the forward": Fault(
        lambda patch: plant(patch, mlp, "silu_mul", lambda plain, x: plain(x * x.new_tensor(1.0))),
        "model/blocks/mlp.py: GatedMlp.forward",
        "silu_mul(x)",
        "copy",
    ),
    "a number read in the backward": Fault(
        lambda patch: plant(patch, linear, "add_outer", reads_gradients),
        "kernels/linear.py: _Linear.backward",
        "add_outer(buffer, ",
        "wait",
    ),
    "a mask in the prompts' backward": Fault(
        lambda patch: plant(patch, prompts._Reordered, "backward", masks),
        "engine/train/shard.py: _backward",
        "backward(",
        "wait",
    ),
    "a table made on the host": Fault(
        lambda patch: plant_in_torch(patch, order, arange=on_the_host),
        "kernels/order.py: BlockTables.pieces",
        "torch.arange(",
        "copy",
    ),
    "tables in memory that is not pinned": Fault(
        lambda patch: send(patch, lambda host, device: host.clone().to(device, non_blocking=True)),
        "kernels/upload.py: upload",
        "host.to(device",
        "copy",
    ),
    "a synchronisation between two passes": Fault(
        lambda patch: plant(patch, prompts.Prompts, "backward", waits),
        "engine/train/shard.py: _pass_gradient",
        "prompts.backward()",
        "wait",
    ),
    "a gradient in memory that is not pinned": Fault(
        lambda patch: plant(
            patch, to_host, "upload_tables", lambda plain, device, tables, *dy: [x.to(device) for x in dy]
        ),
        "kernels/to_host.py: _ToHost.backward",
        "upload_tables(",
        "copy",
    ),
    "entropies that come alone": Fault(
        lambda patch: plant_in_torch(
            patch, to_host, cat=lambda parts: ([x.cpu() for x in parts], torch.cat(parts))[1]
        ),
        LOGPROBS,
        "torch.cat(",
        "wait",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_a_fault_in_a_pass_is_named_with_file_and_line(name, monkeypatch):
    before = Counter(train(torch.bfloat16, 4).cuda.events)
    FAULTS[name].plant(monkeypatch)
    new = Counter(train(torch.bfloat16, 4).cuda.events) - before
    assert new
    assert all(map(FAULTS[name].named, new)), list(map(str, new))


def _scored() -> Device:
    rollouts = [r for i in range(3) for r in make_shard(i).rollouts]
    with gpu() as device:
        frozen = scorer.frozen(model(torch.bfloat16), 1, 1, 4)
        device.cuda.events.clear()
        scores = frozen.score(rollouts, ALL)
    assert [len(x) for x in scores] == [len(r.logprobs) for r in rollouts]
    return device


def test_a_reference_scores_on_the_device():
    device = _scored()
    assert device.places("wait") == {"engine/rollout/scoring_sampler.py: score_rollouts"}
    assert device.places("copy") == set()


def test_control_scores_that_stay_on_the_device_are_refused(monkeypatch):
    def on_the_device(plain, *args):
        scores = plain(*args)
        scores.logp.cpu = lambda: scores.logp
        return scores

    plant(monkeypatch, given_tokens, "scores", on_the_device)
    with pytest.raises(TypeError, match="numpy"):
        _scored()
