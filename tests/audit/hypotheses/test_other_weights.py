"""A log that other weights drew is named, and told from rounding."""

from dataclasses import replace

import pytest
import torch
from zerokl.model.checkpoint import load_decoder

from tests.audit.hypotheses.planted import (
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
    named = report["hypotheses"]["found"]
    assert (named["name"], named["left"]) == ("another checkpoint", 0.0)
    assert str(steps[1]) in named["what"]


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
    named = report["hypotheses"]["found"]
    assert named["name"] == "update applied again"
    assert named["what"].endswith(f"in the sampler's weights {times} times")
    assert "never into merged ones" in named["remedy"]


@pytest.mark.full
def test_old_weights_in_some_lines_are_counted(case, tmp_path):
    """An update in the middle of a batch: the first half of the lines is of the old weights."""
    folder = changed_weights(case, tmp_path / "old", perturbed)
    old = scores(load_decoder(folder, torch.float32), case.rollouts)
    half = len(case.rollouts) // 2
    logged = [*old[:half], *(r.logprobs for r in case.rollouts[half:])]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    named = report_of(case, log, "float32", "zerokl", folder)["hypotheses"]["found"]
    assert (named["name"], named["lines"], named["lines_tried"]) == ("another checkpoint", half, 2 * half)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_told_from_rounded_weights(case, tmp_path, dtype):
    drawn = draw(load_decoder(case.folder, getattr(torch, dtype)))
    named = report_of(case, write(tmp_path / "log.jsonl", drawn))["hypotheses"]["found"]
    assert (named["name"], named["what"]) == ("another dtype", f"the sampler computed in {dtype}")
