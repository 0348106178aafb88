"""`zerokl audit RUN --every K`: the checkpoints of a run, each as an audit of its own says."""

import json
from types import SimpleNamespace

import pytest
from zerokl.audit.conclusion.outcome import Kind, Outcome
from zerokl.audit.figures.measure import Estimate
from zerokl.audit.finding import Finding
from zerokl.audit.over_run import sentences
from zerokl.cli import main
from zerokl.engine.runs.run import train

OPTIONS = ["--max-tokens", "8", "-n", "4"]


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited") / "run"
    train(config(steps=4, checkpoint__every=1), folder)
    return folder


@pytest.mark.full
def test_the_native_sampler_is_equal_at_every_checkpoint(run, tmp_path, capsys):
    out = tmp_path / "audit"
    assert main(["audit", str(run), "--every", "2", *OPTIONS, "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "native and zerokl are equal to the bit at all 3 checkpoints." in shown
    report = json.loads((out / "audit.json").read_text())
    assert [(row["step"], row["outcome"]["kind"], row["max_abs"]) for row in report["steps"]] == [
        (0, "equal", 0.0),
        (2, "equal", 0.0),
        (4, "equal", 0.0),
    ]


@pytest.mark.full
def test_a_row_is_the_audit_of_its_checkpoint(run, tmp_path, capsys):
    words = ["--sampler", "hf", *OPTIONS, "--out"]
    assert main(["audit", str(run), "--every", "4", *words, str(tmp_path / "of_run")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 checkpoints differ, first that of step 0." in shown
    assert "by k3, is" in shown
    assert main(["audit", str(run / "checkpoints/step-000004"), *words, str(tmp_path / "alone")]) == 1
    alone = json.loads((tmp_path / "alone" / "audit.json").read_text())
    (_, row) = json.loads((tmp_path / "of_run" / "audit.json").read_text())["steps"]
    assert {name: row[name] for name in ("tokens", "frac_equal", "max_abs", "k1", "k3", "cause")} == {
        name: alone[name] for name in ("tokens", "frac_equal", "max_abs", "k1", "k3", "cause")
    }
    assert row["bits_part_at"] == alone["first_divergence"]["op"]
    for name in ("audit.json", "audit.html"):
        assert (tmp_path / "of_run/step-000004" / name).read_bytes() == (
            tmp_path / "alone" / name
        ).read_bytes()
    page = (tmp_path / "of_run" / "audit.html").read_text()
    assert 'href="step-000004/audit.html"' in page


def test_growth_is_said_in_words():
    def row(step, max_abs):
        kind = Kind.DIFFERS if max_abs else Kind.EQUAL
        figures = {"k3": Estimate(max_abs / 8, 0.0), "perplexity_sampler": 2.0 + step}
        cause = Finding("k", f"cause {step}", f"remedy {step}")
        return SimpleNamespace(
            step=step,
            outcome=Outcome(kind),
            frac_equal=float(not max_abs),
            max_abs=max_abs,
            cause=cause,
            **figures,
        )

    rows = [row(0, 0.0), row(10, 0.25), row(20, 0.125)]
    outcome = Outcome(Kind.DIFFERS)
    report = SimpleNamespace(sampler="a", trainer="b", steps=rows, outcome=outcome)
    words = list(sentences(report))
    assert words == [
        "2 of 3 checkpoints differ, first that of step 10.",
        "The largest difference of a log-probability is 0 at step 0 and 0.125 at step 20.",
        "KL(sampler || trainer), by k3, is 0 at step 0 and 0.0156 at step 20.",
        "The sampler's perplexity is 2 at step 0 and 22 at step 20.",
        "Likely cause at step 10: cause 10",
        "What to do: remedy 10",
    ]


@pytest.mark.full
def test_the_model_it_began_with_is_always_there(run, tmp_path):
    out = tmp_path / "audit"
    assert main(["audit", str(run), "--every", "3000", *OPTIONS, "--out", str(out)]) == 0
    assert [row["step"] for row in json.loads((out / "audit.json").read_text())["steps"]] == [0]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["-1"], "every (-1) must be at least 1"), (["2", "--model", "m"], "do not go with it")],
)
def test_what_does_not_fit_is_refused(run, tmp_path, capsys, words, message):
    assert main(["audit", str(run), "--every", *words, *OPTIONS, "--out", str(tmp_path / "audit")]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["audit", str(tmp_path), "--every", "2", "--out", str(tmp_path / "audit")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "audit" / "audit.json").exists()
