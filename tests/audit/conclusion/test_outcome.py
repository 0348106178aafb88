"""One outcome: exit code, page, terminal, summary and JSON of every audit say the same."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from zerokl.audit.conclusion import conclude
from zerokl.audit.conclusion.conclude import outcome_of
from zerokl.audit.conclusion.outcome import NO_TOLERANCES, Kind, Outcome, Tolerances, outcome_of_run
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.finding import Finding
from zerokl.audit.report import Measurements
from zerokl.cli import main
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.runs.run import train
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

DRAWN = ["--max-tokens", "6", "-n", "4", "--dtype", "float32"]


@dataclass(frozen=True)
class Said:
    """What the five places of one audit say."""

    code: int
    page: str  # the whole file
    terminal: str  # on one line
    summary: str | None  # None where there is none: an audit over a run
    report: dict


def disagreements(shown: Said, kind: Kind, faults: tuple[str, ...] = ()) -> list[str]:
    """The places that do not say this outcome."""
    outcome = Outcome(kind, faults)
    verdict = r'<div class="card verdict (\w+)"><p class="answer"><span.*?</span> (.*?)</p>'
    colour, words = re.search(verdict, shown.page).groups()
    agreements = {
        "exit code": shown.code == (0 if outcome.passed else 1),
        "page, words": html.unescape(words) == outcome.words,
        "page, colour": colour == outcome.css_class,
        "terminal": f"outcome: {outcome.words} report " in shown.terminal,
        "json": shown.report["outcome"] == outcome.as_json(),
        "json, cause": kind is not Kind.FAULT or shown.report["cause"]["kind"] == faults[0],
    }
    if shown.summary is not None:
        heading = f"### zerokl audit: {'passed' if outcome.passed else 'failed'}"
        agreements["summary"] = heading in shown.summary and f"**{outcome.words}**" in shown.summary
    return [place for place, agrees in agreements.items() if not agrees]


@pytest.fixture
def audited(tmp_path, capsys) -> Callable[..., Said]:
    """audited(target, *words): an audit, and what it says everywhere."""

    def run(target: Path, *words: str) -> Said:
        summary = tmp_path / "summary.md"
        every_step = "--every" in words
        more = [] if every_step else ["--summary", str(summary)]
        capsys.readouterr()
        code = main(["audit", str(target), *words, *more, "--out", str(tmp_path / "out")])
        return Said(
            code,
            (tmp_path / "out" / "audit.html").read_text(),
            " ".join(capsys.readouterr().out.split()),
            None if every_step else summary.read_text(),
            json.loads((tmp_path / "out" / "audit.json").read_text()),
        )

    return run


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def columns(path: Path, sampler: list[list[float]], trainer: list[list[float]], **more) -> Path:
    """A log with both columns. Each line has a prompt and ids of its own."""
    lines = zip(sampler, trainer, strict=True)
    return write(
        path,
        [
            {"prompt_ids": [i], "completion_ids": [i + 2] * len(s), "logprobs": s, "trainer_logprobs": t}
            | {"temperature": 1.0}
            | more
            for i, (s, t) in enumerate(lines)
        ],
    )


def drawn_rows(model: Path, n: int = 6) -> list[dict]:
    """Lines of a log that the model drew in fp32."""
    params = GenerationParams(SamplingParams(), n, 8, frozenset({1}))
    sampler = NativeSampler(load_decoder(model, torch.float32))
    return [
        {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "logprobs": r.logprobs.tolist()}
        | {"temperature": 1.0}
        for r in complete(sampler, [(5, 6, 7)], params, RngKey(0, 0))
    ]


EQUAL = [[-1.0, -0.5, -2.0], [-0.25, -1.5, -3.0]]
FOUR_DECIMALS = {"decimals": 4, "trainer_decimals": 4}
OFF = [[-1.0, -0.5, -2.0], [-0.25, -1.5, -3.004]]


@pytest.mark.parametrize(
    ("trainer", "fields", "words", "kind"),
    [
        (EQUAL, {}, [], Kind.EQUAL_COLUMNS),
        (EQUAL, {}, ["--max-abs", "0.1"], Kind.EQUAL_COLUMNS),
        (
            [EQUAL[0], [-0.25, -1.5, -3.00009]],
            FOUR_DECIMALS,
            [],
            Kind.ROUNDED_COLUMNS,
        ),
        ([EQUAL[0], [-0.25, -1.5, -3.00011]], FOUR_DECIMALS, [], Kind.DIFFERS),
        (OFF, {}, [], Kind.DIFFERS),
        (OFF, {}, ["--max-abs", "0.1"], Kind.WITHIN),
        (OFF, {}, ["--band", "1%"], Kind.WITHIN),
        (OFF, {}, ["--band", "strict"], Kind.BEYOND),
        (OFF, {}, ["--max-k3", "0"], Kind.BEYOND),
    ],
)
def test_two_columns(tmp_path, audited, trainer, fields, words, kind):
    log = columns(tmp_path / "log.jsonl", EQUAL, trainer, **fields)
    assert disagreements(audited(log, *words), kind) == []


@pytest.mark.parametrize(("words", "off"), [([], 0.0), (["--max-abs", "0.1"], 0.004)])
def test_columns_with_a_named_fault(tmp_path, audited, words, off):
    """Equal columns, or columns within the tolerance, of a log that holds lines twice."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": [1], "completion_ids": rng.integers(2, 40, 12).tolist(), "temperature": 1.0}
        | {"logprobs": [-3.5] * 12, "trainer_logprobs": [-3.5 + off] * 12}
        for _ in range(4)
    ]
    log = write(tmp_path / "log.jsonl", rows * 2)
    shown = audited(log, *words)
    assert disagreements(shown, Kind.FAULT, ("lines doubled within a group",)) == []
    assert "Likely cause: lines doubled within a group: 4 completions" in shown.terminal


@pytest.mark.parametrize(
    ("decimals", "fields", "kind"),
    [(None, {}, Kind.EQUAL), (4, {"decimals": 4}, Kind.ROUNDED), (4, {}, Kind.DIFFERS)],
)
def test_a_log_and_a_model(model, tmp_path, audited, decimals, fields, kind):
    rows = drawn_rows(model)
    for row in rows:
        row |= fields
        row["logprobs"] = [x if decimals is None else round(x, decimals) for x in row["logprobs"]]
    log = write(tmp_path / "log.jsonl", rows)
    assert disagreements(audited(log, "--model", str(model), "--dtype", "float32"), kind) == []


def test_a_log_and_a_model_whose_trainer_column_is_wrong(model, tmp_path, audited):
    """The sampler's column is the model's. The log's trainer column stands one token too late."""
    rows = drawn_rows(model)
    rows = [row | {"trainer_logprobs": [-1.0, *row["logprobs"][:-1]]} for row in rows]
    log = write(tmp_path / "log.jsonl", rows)
    shown = audited(log, "--model", str(model), "--dtype", "float32")
    assert shown.report["frac_equal"] == 1.0
    assert disagreements(shown, Kind.FAULT, ("the log's trainer column, off by one",)) == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], Kind.EQUAL),
        (["--batch_invariance", "3"], Kind.EQUAL),
        (["--full_vocab"], Kind.EQUAL),
        (["--sampler", "hf"], Kind.ROUNDING),
        (["--sampler", "hf", "--max-abs", "0.1"], Kind.WITHIN),
        (["--sampler", "hf", "--max-abs", "0"], Kind.BEYOND),
    ],
)
def test_two_engines(model, audited, words, kind):
    assert disagreements(audited(model, *DRAWN, *words), kind) == []


def test_a_sampler_that_varies_with_its_batch(model, audited, crowded_sampler):
    shown = audited(model, *DRAWN, "--batch_invariance", "9")
    assert shown.report["frac_equal"] == 1.0
    assert disagreements(shown, Kind.FAULT, ("batch invariance",)) == []


def test_distributions_that_differ_beside_the_drawn_tokens(model, audited, monkeypatch):
    plain = ZeroklEngine.distributions

    def other(self, pair, params):
        for logp in plain(self, pair, params):
            if self.name == "native":
                logp[:, -1] -= 0.5
            yield logp

    monkeypatch.setattr(ZeroklEngine, "distributions", other)
    shown = audited(model, *DRAWN, "--full_vocab")
    assert shown.report["frac_equal"] == 1.0
    assert disagreements(shown, Kind.DIFFERS) == []


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited") / "run"
    train(config(steps=2, checkpoint__every=1), folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], Kind.EQUAL),
        (["--sampler", "hf"], Kind.ROUNDING),
        (["--sampler", "hf", "--max-abs", "0.1"], Kind.WITHIN),
    ],
)
def test_the_checkpoints_of_a_run(run, audited, words, kind):
    shown = audited(run, "--every", "1000", *DRAWN, *words)  # step 0 alone
    shown.report["cause"] = None
    assert disagreements(shown, kind) == []
    assert {row["outcome"]["kind"] for row in shown.report["steps"]} == {str(kind)}


def test_a_run_has_the_outcome_of_its_worst_checkpoint():
    outcomes = [Outcome(Kind.EQUAL), Outcome(Kind.FAULT, ("a",)), Outcome(Kind.WITHIN), Outcome(Kind.EQUAL)]
    assert outcome_of_run(outcomes) == Outcome(Kind.FAULT, ("a",))
    assert outcome_of_run(outcomes[2:]) == Outcome(Kind.WITHIN)


@pytest.mark.parametrize(
    ("kind", "told"), [("unknown", "a fault"), ("place", "a fault"), ("temperature", "temperature")]
)
def test_a_place_or_nothing_gives_way_to_a_named_fault_and_a_cause_does_not(monkeypatch, kind, told):
    fakes = dict(
        cause=Finding(kind, "", ""), faults=[Finding("a fault", "", "")], outcome_of=Outcome(Kind.DIFFERS)
    )
    for name, answer in (fakes | dict(notes=[])).items():
        monkeypatch.setattr(conclude, name, lambda *_, answer=answer: answer)
    measured = SimpleNamespace(**dict.fromkeys(Measurements.__dataclass_fields__), columns_alone=False)
    assert conclude.concluded(measured, NO_TOLERANCES).cause.kind == told


def test_no_tolerance_excuses_a_fault_and_a_difference_stays_one():
    figures = SimpleNamespace(equal=False, max_abs=0.1, k3=SimpleNamespace(value=0.0))
    figures.outside = figures.infinite = SimpleNamespace(tokens=0)
    measured = SimpleNamespace(figures=figures, corrections=None, full_vocab=None, log=None)
    measured.columns_alone = False
    assert outcome_of(measured, Tolerances(max_abs=1.0), []) == Outcome(Kind.WITHIN)
    assert outcome_of(measured, Tolerances(max_abs=1.0), ["x"]).kind is Kind.FAULT
    assert outcome_of(measured, Tolerances(), ["x"]) == Outcome(Kind.DIFFERS, ("x",))
    assert outcome_of(measured, Tolerances(max_abs=0.01), ["x"]) == Outcome(Kind.BEYOND, ("x",))
    figures.equal = True
    assert outcome_of(measured, Tolerances(), ["x"]).kind is Kind.FAULT


@pytest.mark.parametrize("place", ["exit code", "page, words", "page, colour", "terminal", "summary", "json"])
def test_control_a_place_that_says_something_else_is_found(tmp_path, audited, place):
    shown = audited(columns(tmp_path / "log.jsonl", EQUAL, OFF))
    planted = {
        "exit code": {"code": 0},
        "page, words": {"page": shown.page.replace("</span> Not equal", "</span> Equal to the bit")},
        "page, colour": {"page": shown.page.replace("verdict unequal", "verdict equal")},
        "terminal": {"terminal": shown.terminal.replace("outcome: Not", "outcome:")},
        "summary": {"summary": shown.summary.replace("failed", "passed")},
        "json": {"report": shown.report | {"outcome": shown.report["outcome"] | {"passed": True}}},
    }
    assert disagreements(Said(**{**vars(shown), **planted[place]}), Kind.DIFFERS) == [place]
