"""Each file of audit/frameworks, by its samples: it reads what it declares, and names a missing field."""

import copy
import json
from pathlib import Path

import pytest
from zerokl.audit.formats.framework import BOTH, Log
from zerokl.audit.formats.registry import read_rollouts, scripted
from zerokl.audit.frameworks import FRAMEWORKS, LOGS
from zerokl.audit.logs.metric_rows import is_metrics

from tests.audit.formats.samples import FILES, declared, first_row, holder, places, rows_of, told


def test_every_log_has_a_sample_that_only_its_own_reader_takes():
    assert FILES.keys() == LOGS.keys()
    for name in LOGS:
        for row, _ in rows_of(name):
            assert [log.name for log in LOGS.values() if log.recognises(row)] == [name]


@pytest.mark.parametrize("name", LOGS)
def test_a_reader_tells_what_its_file_declares(name):
    log = LOGS[name]
    rollouts = [rollout for row, file in rows_of(name) for rollout in log.parse(row, file)]
    assert told(rollouts) == declared(log.fields)
    if log.columns == BOTH:
        assert {"logprobs", "trainer_logprobs"} <= declared(log.fields)


def refusal(log: Log, row: dict, file: Path) -> str:
    """Why a row is refused, or "" where it is read."""
    try:
        list(log.parse(row, file))
    except (KeyError, ValueError) as error:
        return str(error)
    return ""


def without(row: dict, path: tuple) -> dict:
    lesser = copy.deepcopy(row)
    del holder(lesser, path)[path[-1]]
    return lesser


@pytest.mark.parametrize("name", LOGS)
def test_control_a_field_that_a_reader_needs_is_named_where_it_is_taken_away(name, tmp_path):
    for file in FILES[name]:
        row = first_row(file)
        fields = [path for path in places(row) if isinstance(path[-1], str)]
        refused = {path: refusal(LOGS[name], without(row, path), file) for path in fields}
        assert {path: why for path, why in refused.items() if why and path[-1] not in why} == {}
    needed = next(path for path, why in refused.items() if why)
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(without(row, needed)) + "\n")
    with pytest.raises(ValueError, match=rf"log\.jsonl, line 1: .*{needed[-1]}"):
        list(read_rollouts(log, name))


@pytest.mark.parametrize("name", LOGS)
def test_no_log_counts_as_a_file_of_metrics(name, tmp_path):
    assert not any(map(is_metrics, FILES[name]))
    numbers = tmp_path / "metrics.jsonl"
    numbers.write_text(json.dumps({"step": 1, "loss": 0.5} | dict.fromkeys(LOGS[name].marks, 8)) + "\n")
    assert is_metrics(numbers)


@pytest.mark.parametrize("name", scripted())
def test_a_script_says_how_it_is_run(name):
    script = FRAMEWORKS[name].script
    compile(script, name, "exec")
    assert script.startswith('"""')
    assert "python SCRIPT INPUT" in script.partition("import")[0]
