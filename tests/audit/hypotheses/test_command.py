"""What the command says of a hypothesis, and what it refuses."""

import pytest
from zerokl.cli import main

from tests.audit.hypotheses.planted import (
    RAW,
    WIDTHS,
    audit_words,
    relogged,
    scores,
    write,
)
from tests.random_model import random_model


def test_the_report_says_hypothesis_nats_and_remedy(case, tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, scores(case.decoder, case.rollouts, RAW)))
    assert main(audit_words(case, log, tmp_path / "o")) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Likely cause: raw logits:" in out
    assert "nats by which a token differs" in out
    assert "processed_logprobs" in out
    page = (tmp_path / "o" / "audit.html").read_text()
    assert "raw logits (fits)" in page


@pytest.mark.parametrize(
    ("change", "reason"),
    [("no/such/model", "no/such/model"), ("other", "has another")],
)
def test_a_checkpoint_that_cannot_have_drawn_the_log_is_refused(case, tmp_path, capsys, change, reason):
    log = write(tmp_path / "log.jsonl", case.rollouts)
    if change == "other":
        change = str(random_model(tmp_path, WIDTHS | {"num_hidden_layers": 1}))
    words = ["audit", str(log), "--model", str(case.folder), "--checkpoints", change]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
