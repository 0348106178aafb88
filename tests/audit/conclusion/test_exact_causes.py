"""Of two columns alone, a cause that explains a column exactly outranks a cut that no line declares."""

import json
import math

import numpy as np
import pytest
from zerokl.audit.columns import audit_columns
from zerokl.audit.conclusion.outcome import Kind

WRONG = {
    "logarithms to another base": lambda x: x / math.log(2),
    "means in place of tokens": lambda x: np.full_like(x, x.mean()),
}
COLUMNS = {"logprobs": "", "trainer_logprobs": "the log's trainer column, "}


def rows(alter: dict) -> list[dict]:
    """Tokens drawn by numpy from random distributions of 50 tokens. alter: column -> what makes it wrong."""
    generator, lines = np.random.default_rng(3), []
    for _ in range(40):
        z = generator.normal(0, 2, (30, 50))
        logp = z - np.log(np.exp(z).sum(1, keepdims=True))
        ids = [int(generator.choice(50, p=np.exp(x))) for x in logp]
        sampler = logp[np.arange(30), ids]
        columns = {"logprobs": sampler, "trainer_logprobs": sampler + generator.normal(0, 1e-4, 30)}
        columns = {name: alter.get(name, lambda x: x)(x).tolist() for name, x in columns.items()}
        lines.append(
            {"prompt_ids": [1, 2], "completion_ids": ids, "temperature": 1.0, "top_p": 1.0} | columns
        )
    return lines


def audited(tmp_path, alter: dict):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(alter)))
    return audit_columns(path)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("column", COLUMNS)
def test_the_outcome_names_what_the_cause_names_and_no_cut(tmp_path, name, column):
    report = audited(tmp_path, {column: WRONG[name]})
    assert report.cause.kind == COLUMNS[column] + name
    assert report.outcome.faults == ((report.cause.kind,) if COLUMNS[column] else ())
    assert report.outcome.kind is Kind.DIFFERS


def test_control_a_cut_that_nothing_else_explains_is_named(tmp_path):
    def cut(x: np.ndarray) -> np.ndarray:
        return x + np.random.default_rng(len(x)).uniform(0.05, 0.4, len(x))

    report = audited(tmp_path, {"logprobs": cut})
    assert any("top-p" in fault for fault in report.outcome.faults), report.outcome
