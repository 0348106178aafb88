"""Tokens, positions and lines that are not those of the draw are named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit.hypotheses.evidence import Evidence
from zerokl.audit.hypotheses.other_prompts import padded_lengths
from zerokl.audit.hypotheses.scorable_lines import Line
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.hypotheses.planted import (
    SAMPLING,
    Case,
    altered,
    audit_words,
    changed_weights,
    draw,
    pairs_scored,
    relogged,
    report_of,
    scores,
    write,
)


@pytest.mark.full
def test_one_line_with_another_prompt_is_enough(case, tmp_path):
    rollouts = [altered(case.rollouts[0], prompt_ids=case.rollouts[4].prompt_ids), *case.rollouts[1:]]
    named = report_of(case, write(tmp_path / "log.jsonl", rollouts))["hypotheses"]["found"]
    assert (named["name"], named["lines"]) == ("another line's prompt", 1)


def test_an_end_token_that_is_left_out_is_named(case, tmp_path):
    """Nothing is wrong with the log-probabilities: the exit code stays 0, and the report says it."""
    params = SamplingParams(2.0)
    drawn = draw(case.decoder, params, frozenset(range(1, 20, 2)), 6)
    drawn = [r for r in drawn if len(r.completion_ids) > 1]
    ended = [
        altered(r, completion_ids=(*r.completion_ids[:-1], 1)) if r.finish == "stop" else r for r in drawn
    ]
    ended = relogged(ended, scores(case.decoder, ended, params))
    cut = [
        altered(r, completion_ids=r.completion_ids[:-1], logprobs=r.logprobs[:-1])
        if r.finish == "stop"
        else r
        for r in ended
    ]
    for rollouts, names in ((ended, []), (cut, ["end token left out"])):
        report = report_of(case, write(tmp_path / "log.jsonl", rollouts, params))
        assert [x["name"] for x in report["log_findings"]] == names
        assert report["frac_equal"] == 1.0


def test_turns_that_were_retokenised_are_named(case, tmp_path):
    """The next turn begins with the same text as the turn before, in other ids."""
    first = altered(case.rollouts[0], completion_ids=(*case.rollouts[0].completion_ids[:-1], 5))
    first = relogged([first], scores(case.decoder, [first]))[0]
    again = (*first.prompt_ids, *first.completion_ids)

    def turns(prompt) -> dict:
        after = altered(case.rollouts[0], prompt_ids=tuple(prompt))
        after = relogged([after], scores(case.decoder, [after]))[0]
        rows = [
            {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "logprobs": r.logprobs.tolist()}
            for r in (first, after)
        ]
        return {"temperature": SAMPLING.temperature, "turns": rows}

    for text, names in (("sound", []), ("drift", ["retokenised turns"])):
        # The character tokenizer has one id for each text, so one with two ids for it stands in.
        log = tmp_path / f"{text}.jsonl"
        log.write_text(json.dumps(turns(again)) + "\n")
        folder = case.folder if text == "sound" else two_ids_for_one_text(case, tmp_path / "model")
        if text == "drift":
            log.write_text(json.dumps(turns((*again[:-1], 63))) + "\n")
        report = report_of(replace(case, folder=folder), log)
        assert [x["name"] for x in report["log_findings"]] == names
        assert report["frac_equal"] == 1.0


def two_ids_for_one_text(case: Case, folder: Path) -> Path:
    """The case's model with a tokenizer that decodes ids 5 and 63 to the same text."""
    changed_weights(case, folder, lambda flat: flat)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {
                "type": "Replace",
                "pattern": {"String": character(tokenizer, 63)},
                "content": character(tokenizer, 5),
            },
            tokenizer["decoder"],
        ],
    }
    path.write_text(json.dumps(tokenizer))
    return folder


def character(tokenizer: dict, token: int) -> str:
    return next(text for text, i in tokenizer["model"]["vocab"].items() if i == token)


def test_a_retokenised_prompt_is_named(case, tmp_path):
    """The log has the id that was drawn; the sampler was given the text, which encodes to another id."""
    folder = two_ids_for_one_text(case, tmp_path / "model")
    rollouts = [altered(r, prompt_ids=(*r.prompt_ids[:-1], 63)) for r in case.rollouts]
    read = pairs_scored(case, [((*r.prompt_ids[:-1], 5), r.completion_ids) for r in rollouts])
    report = report_of(replace(case, folder=folder), write(tmp_path / "log.jsonl", relogged(rollouts, read)))
    assert report["hypotheses"]["found"]["name"] == "retokenised text"


def test_doubled_lines_are_named(case, tmp_path, capsys):
    doubled = [r for pair in zip(case.rollouts[::2], case.rollouts[::2], strict=True) for r in pair]
    log = write(tmp_path / "log.jsonl", doubled)
    assert main(audit_words(case, log, tmp_path / "o")) == 1, "the log-probabilities are right"
    assert "lines doubled within a group: 4 completions" in " ".join(capsys.readouterr().out.split())
    assert "lines doubled within a group" in (tmp_path / "o" / "audit.html").read_text()


def test_batches_that_pad_alike_are_all_named():
    """Of lines 1 to 3 a batch of 6 and one of 16 have the same longest prompt."""
    column = np.zeros(3, np.float32)
    lines = [Line(i, (5,) * (9 if i % 48 < 2 else 4), (1, 2, 3), column, column) for i in range(96)]
    words = [x for x, _ in padded_lengths(Evidence(lines[:3], log=lines))]
    (batches,) = [x for x in words if "batch of 6 lines" in x]
    assert "batch of 16 lines" in batches
