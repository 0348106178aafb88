"""Numbers that are not natural logarithms of the drawn tokens are named."""

import json

import numpy as np
import pytest
import torch
from zerokl.cli import main

from tests.audit.hypotheses.planted import (
    relogged,
    report_of,
    write,
)


@pytest.mark.full
def test_numbers_in_bf16_are_named(case, tmp_path):
    logged = [torch.from_numpy(r.logprobs).bfloat16().float().numpy() for r in case.rollouts]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "rounded log-probabilities"


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_off_by_one_is_named_with_and_without_a_model(case, tmp_path, by):
    mask = [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    logged = [np.where(np.roll(mask, by), np.roll(r.logprobs, by), np.nan) for r in case.rollouts]
    rollouts = relogged(case.rollouts, logged)
    log = write(tmp_path / "log.jsonl", rollouts, mask=np.roll(mask, by).tolist())
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "mask off by one"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [
        row | {"trainer_logprobs": r.logprobs.tolist()} for row, r in zip(rows, case.rollouts, strict=True)
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 1
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["cause"]["kind"] == "mask off by one"
