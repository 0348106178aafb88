"""A log that other weights drew is named, and told from rounding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.engine.rollout.types import Rollout
from zerokl.kernels.logprob import linear_logprob
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder

from tests.audit.hypotheses.planted import (
    SAMPLING,
    changed_weights,
    draw,
    perturbed,
    relogged,
    report_of,
    scores,
    write,
)


def test_the_version_of_the_weights_is_named(case, tmp_path):
    """Checkpoints of a run, step by step; the log was drawn with step 2."""
    steps = [
        changed_weights(case, tmp_path / "run" / f"step-{i}", lambda flat, i=i: perturbed(flat, 0.05, i))
        for i in (1, 2, 10)
    ]
    drawn = draw(load_decoder(steps[1], torch.float32))
    report = report_of(case, write(tmp_path / "log.jsonl", drawn), "float32", "zerokl", tmp_path / "run")
    found = report["hypotheses"]["found"]
    assert (found["name"], found["left"]) == ("another checkpoint", 0.0)
    assert str(steps[1]) in found["what"]


@pytest.mark.parametrize("times", [pytest.param(2, marks=pytest.mark.full), 3])
def test_an_adapter_merged_into_merged_weights_is_named(case, tmp_path, times):
    """verl#7904: the second update merges an adapter into weights that hold the first merge."""
    base = case.decoder.flat.detach().clone()
    generator = torch.Generator().manual_seed(1)
    adapter = torch.zeros_like(base)
    for name, w in case.decoder.layout.checkpoint_views(adapter).items():
        if "proj" in name:
            a = torch.randn(2, w.shape[1], generator=generator)
            b = torch.randn(w.shape[0], 2, generator=generator)
            w.copy_(0.02 * (b @ a))
    trainer = changed_weights(case, tmp_path / "once", lambda flat: flat + adapter)
    sampler = changed_weights(case, tmp_path / "again", lambda flat: flat + times * adapter)
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    report = report_of(replace(case, folder=trainer), log, "float32", "zerokl", case.folder)
    found = report["hypotheses"]["found"]
    assert found["name"] == "update applied again"
    assert found["what"].endswith(f"in the sampler's weights {times} times")
    assert "never into merged ones" in found["remedy"]


@pytest.mark.parametrize(
    ("part", "words"), [("embed_tokens", "the embedding and lm_head"), (".mlp.", "the MLP's projections")]
)
def test_tensors_that_a_sync_left_out_are_named(case, tmp_path, part, words):
    new = changed_weights(case, tmp_path / "new", lambda flat: perturbed(flat, 0.3))

    def without(flat):
        views, old = (case.decoder.layout.checkpoint_views(x) for x in (flat, case.decoder.flat.detach()))
        for name in views:
            if part in name:
                views[name].copy_(old[name])
        return flat

    sampler = changed_weights(case, tmp_path / "sampler", lambda flat: without(perturbed(flat, 0.3)))
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    found = report_of(replace(case, folder=new), log, "float32", "zerokl", case.folder)["hypotheses"]["found"]
    assert (found["name"], found["left"]) == ("incomplete sync", 0.0)
    assert found["what"].startswith(words)


@torch.no_grad()
def after_stale_prefix(old: Decoder, new: Decoder, rollout: Rollout) -> np.ndarray:
    """The logprobs of a completion after a prompt whose keys and values are of older weights."""
    prompt, completion = map(list, rollout.pair)
    cache = BlockCache(new.config, 4, torch.float32)
    blocks, first = [cache.allocate(4)], len(prompt) - 1
    old.hidden(torch.tensor(prompt[:first]), CachedContext(cache, [first], [0], blocks))
    rest = torch.tensor([prompt[-1], *completion[:-1]])
    h = new.hidden(rest, CachedContext(cache, [len(rest)], [first], blocks))
    return linear_logprob(h, new.logits_weight(), torch.tensor(completion), SAMPLING)[0].numpy()


@pytest.mark.full
def test_a_stale_prefix_cache_is_told_from_older_weights(case, tmp_path):
    folder = changed_weights(case, tmp_path / "old", lambda flat: perturbed(flat, 0.5))
    old = load_decoder(folder, torch.float32)
    stale = [after_stale_prefix(old, case.decoder, r) for r in case.rollouts]
    for name, logged in (("stale prefix cache", stale), ("another checkpoint", scores(old, case.rollouts))):
        log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
        report = report_of(case, log, "float32", "zerokl", folder)
        assert report["hypotheses"]["found"]["name"] == name


@pytest.mark.full
def test_a_merge_in_bf16_is_named(case, tmp_path):
    """An adapter of rank 2 on every projection: the trainer adds it in fp32, the sampler merges in bf16."""

    def merged(flat, dtype):
        flat = flat.bfloat16().float()
        generator = torch.Generator().manual_seed(1)
        for name, w in case.decoder.layout.checkpoint_views(flat).items():
            if "proj" in name:
                a = torch.randn(2, w.shape[1], generator=generator)
                b = torch.randn(w.shape[0], 2, generator=generator)
                w.copy_((w + 0.01 * (b @ a)).to(dtype))
        return flat

    trainer = changed_weights(case, tmp_path / "fp32", lambda flat: merged(flat, torch.float32))
    sampler = changed_weights(case, tmp_path / "bf16", lambda flat: merged(flat, torch.bfloat16))
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    found = report_of(replace(case, folder=trainer), log)["hypotheses"]["found"]
    assert found["name"] == "weights rounded"
    assert "bfloat16" in found["what"]
    assert "Merge adapters" in found["remedy"]


@pytest.mark.full
def test_old_weights_in_some_lines_are_counted(case, tmp_path):
    """An update in the middle of a batch: the first half of the lines is of the old weights."""
    folder = changed_weights(case, tmp_path / "old", perturbed)
    old = scores(load_decoder(folder, torch.float32), case.rollouts)
    half = len(case.rollouts) // 2
    logged = [*old[:half], *(r.logprobs for r in case.rollouts[half:])]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    found = report_of(case, log, "float32", "zerokl", folder)["hypotheses"]["found"]
    assert (found["name"], found["lines"], found["lines_tried"]) == ("another checkpoint", half, 2 * half)


@pytest.mark.full
def test_quantised_weights_are_told_from_rounded_ones(case, tmp_path):
    def fp8(flat):
        for name, w in case.decoder.layout.checkpoint_views(flat).items():
            if "proj" in name:
                scale = w.abs().max() / 448
                w.copy_((w / scale).to(torch.float8_e4m3fn).float() * scale)
        return flat

    sampler = changed_weights(case, tmp_path / "fp8", fp8)
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "weights quantised"


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_told_from_rounded_weights(case, tmp_path, dtype):
    drawn = draw(load_decoder(case.folder, getattr(torch, dtype)))
    found = report_of(case, write(tmp_path / "log.jsonl", drawn))["hypotheses"]["found"]
    assert (found["name"], found["what"]) == ("another dtype", f"the sampler computed in {dtype}")
