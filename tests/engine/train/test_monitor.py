"""The monitor: one planted bit stops an exact run before its update, and is named and saved.

`zerokl verify` finds the bit again in what was saved, and blames the side that does not reproduce.
"""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
from zerokl.cli import main
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs import samplers as samplers_module
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.monitor import MismatchError
from zerokl.engine.train.parallel.scorer import WorkersSampler
from zerokl.kernels.philox import Stream
from zerokl.model.checkpoint import load_decoder
from zerokl.model.weights import fingerprint


class Plant:
    """Makes the run's sampler flip the lowest bit of one logprob at a random place, and remembers the place.

    version: where it is not 0, it is added to the rollout's weight version, and no bit is flipped.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, case: int, version: int = 0):
        draw = random.Random(case)
        self.step, index, fraction = draw.randrange(3), draw.randrange(9), draw.random()
        plant = self

        class Planted(WorkersSampler):
            def generate(self, requests):
                completions = super().generate(requests)
                key = requests[index].rng_key if requests else None
                if key and (key.stream, key.step) == (Stream.SAMPLE, plant.step):
                    plant.key, drawn = key, completions[index]
                    completions[index] = dataclasses.replace(
                        drawn, weight_version=drawn.weight_version + version
                    )
                    logprobs = drawn.logprobs
                    plant.position = int(fraction * len(logprobs))
                    plant.token = drawn.ids[plant.position]
                    plant.true = logprobs[plant.position].item()
                    if not version:
                        logprobs.view(np.int32)[plant.position] ^= 1
                    plant.false = logprobs[plant.position].item()
                return completions

        monkeypatch.setattr(samplers_module, "WorkersSampler", Planted)

    @property
    def prompt_and_sample(self) -> str:
        return f"prompt {self.key.prompt}, sample {self.key.sample}"


def _weights(folder) -> str:
    decoder = load_decoder(folder, torch.float32)
    return fingerprint(decoder.layout, decoder.flat.detach())


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_flipped_bit_stops_the_run_and_is_named(config, model, monkeypatch, tmp_path, dtype, case):
    plant = Plant(monkeypatch, case)
    with pytest.raises(MismatchError) as caught:
        train(config(dtype=dtype, micro_batch=2), tmp_path / "run")
    place = f"step {plant.step}, {plant.prompt_and_sample}, position {plant.position} "
    assert place in str(caught.value)
    assert f"trainer logprob {plant.true!r}" in str(caught.value)
    assert f"sampler logprob {plant.false!r}" in str(caught.value)
    assert re.search(r" 1 ulp apart; 1 of \d+ tokens", str(caught.value))
    report = json.loads((tmp_path / "run" / "mismatch" / "mismatch.json").read_text())
    assert (report["ulp"], report["trainer"], report["sampler"]) == (1, plant.true, plant.false)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == plant.step


@pytest.mark.parametrize("case", range(4))
def test_it_stops_before_the_update_and_saves_the_weights(config, model, monkeypatch, tmp_path, case):
    plant = Plant(monkeypatch, case)
    with pytest.raises(MismatchError):
        train(config(), tmp_path / "run")
    monkeypatch.undo()
    before = train(config(steps=plant.step), tmp_path / "clean").weights if plant.step else _weights(model)
    assert _weights(tmp_path / "run" / "mismatch") == before


def test_a_mismatch_is_saved_again_when_the_run_is_resumed(config, monkeypatch, tmp_path):
    plant = Plant(monkeypatch, 1)
    for name in ("mismatch", "mismatch-2"):
        with pytest.raises(MismatchError, match=f"step {plant.step}, "):
            train(config(), tmp_path / "run") if name == "mismatch" else resume(tmp_path / "run")
        assert json.loads((tmp_path / "run" / name / "mismatch.json").read_text())["ulp"] == 1


def test_a_mismatch_is_named_where_it_cannot_be_saved(config, monkeypatch, tmp_path, capsys):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    Plant(monkeypatch, 1)
    monkeypatch.setattr(run_module, "write_checkpoint", fail)
    with pytest.raises(MismatchError):
        train(config(), tmp_path / "run")
    assert "could not be saved: [Errno 28]" in capsys.readouterr().out


FILTERS = {
    "sampling__min_p": 0.02,
    "sampling__logit_bias": {"20": 2.0},
    "sampling__allowed_token_ids": list(range(1, 60, 2)),
}


@pytest.mark.parametrize("filters", [{}, FILTERS], ids=["", "filters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_case_blames_the_side_that_does_not_reproduce(
    config, monkeypatch, tmp_path, capsys, dtype, filters
):
    Plant(monkeypatch, 1)
    with pytest.raises(MismatchError):
        train(config(dtype=dtype, sampling__temperature=0.7, **filters), tmp_path / "run")
    capsys.readouterr()
    assert main(["verify", "--case", str(tmp_path / "run" / "mismatch")]) == 1
    rows = re.findall(r"(sampler|trainer)'s logprobs.*?(\d+)\D*$", capsys.readouterr().out, re.MULTILINE)
    assert rows
    assert {side: unequal for side, unequal in rows} == {"sampler": "1", "trainer": "0"}
    assert len(set(rows)) == 2, "every way of scoring again must agree"


def test_the_first_of_several_is_named_and_all_are_counted(config, monkeypatch, tmp_path):
    class Planted(WorkersSampler):
        def generate(self, requests):
            completions = super().generate(requests)
            for completion in completions[5:]:
                completion.logprobs.view(np.int32)[-1] ^= 1
            return completions

    monkeypatch.setattr(samplers_module, "WorkersSampler", Planted)
    with pytest.raises(MismatchError, match=r"step 0, prompt 1, sample 2, position \d+ .* 4 of \d+ tokens"):
        train(config(virtual_shards=1, micro_batch=64), tmp_path / "run")


@pytest.mark.parametrize("case", range(2))
def test_a_run_that_is_not_exact_goes_on_and_shows_it(config, read_jsonl, monkeypatch, tmp_path, case):
    plant = Plant(monkeypatch, case)
    summary = train(config(exact="false"), tmp_path / "run")
    assert (summary.steps, summary.tokens_unequal) == (3, 1)
    d = plant.true - plant.false
    assert summary.mismatch_max_abs == abs(d) > 0
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        if line["step"] != plant.step:
            assert line["mismatch/max_abs"] == line["mismatch/k1"] == 0.0
            assert line["mismatch/frac_equal"] == 1.0
            continue
        n = line["tokens"]
        assert line["mismatch/frac_equal"] == 1 - 1 / n
        assert line["mismatch/max_abs"] == abs(d)
        assert line["mismatch/k1"] == pytest.approx(-d / n)
        assert line["mismatch/k2"] == pytest.approx(d * d / 2 / n)
        ratios = [line["mismatch/ratio_min"], line["mismatch/ratio_max"]]
        assert ratios == pytest.approx(sorted([1.0, np.exp(d)]), rel=1e-15)
    assert not (tmp_path / "run" / "mismatch").exists()


def test_rollouts_of_other_weights_are_refused(config, monkeypatch, tmp_path):
    plant = Plant(monkeypatch, 0, version=1)
    with pytest.raises(ValueError, match=r"has weight version \d+; the trainer is at \d+") as caught:
        train(config(), tmp_path / "run")
    assert f"{plant.prompt_and_sample} has weight version {plant.step + 1}" in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_staleness_is_measured_when_there_is_any(config, read_jsonl, tmp_path, updates):
    train(config(updates_per_rollout=updates, steps=2), tmp_path / "run")
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        mismatch = {k.split("/")[1] for k in line if k.startswith("mismatch/")}
        staleness = {k.split("/")[1] for k in line if k.startswith("staleness/")}
        assert staleness == (mismatch if updates > 1 else set())
        assert line["mismatch/max_abs"] == 0.0, (
            "the comparison with the sampler belongs to the first update only"
        )
        if updates > 1:
            assert line["staleness/max_abs"] > 0
