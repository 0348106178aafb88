"""`zerokl audit --follow`: a log that grows is judged line by line, up to one beyond the tolerance."""

import json
import os
import signal
import threading
import time

import pytest
from zerokl.audit import follow
from zerokl.audit.config import AuditSettings
from zerokl.audit.follow import Follow
from zerokl.cli import main

BAND = AuditSettings(band="5%")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(follow, "_LOOK_S", 0.01)


def line(difference=0.0, tokens=4):
    sampler = [-0.5 - 0.125 * i for i in range(tokens)]
    row = {"prompt_ids": [1, 2], "completion_ids": list(range(5, 5 + tokens)), "temperature": 1.0}
    row |= {"logprobs": sampler, "trainer_logprobs": [x + difference for x in sampler]}
    return json.dumps(row) + "\n"


def run(path, idle_s=0.2, settings=BAND, n=None):
    reports = []
    report, place = Follow(path, n, settings).run(idle_s, reports.append)
    assert reports[-1] is report
    return report, place


def beside(*acts):
    """Do these one after another in a thread, each a moment after the last."""

    def work():
        for act in acts:
            time.sleep(0.05)
            act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def end(number=signal.SIGTERM):
    """Sends a signal once it is handled: before, it would end the tests."""
    before = signal.getsignal(number)

    def act():
        while signal.getsignal(number) is before:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    return act


def append(path, text):
    def act():
        with open(path, "a") as file:
            file.write(text)

    return act


def test_it_ends_at_the_first_line_beyond_the_band(tmp_path, capsys):
    path, out = tmp_path / "log.jsonl", tmp_path / "out"
    writer = beside(
        append(path, line() * 3), append(path, line()[:40]), append(path, line()[40:] + line(0.25) + line())
    )
    assert main(["audit", str(path), "--follow", "--band", "5%", "--out", str(out)]) == 1
    writer.join()
    assert f"{path}, line 5: this line is beyond the tolerance" in " ".join(capsys.readouterr().out.split())
    report = json.loads((out / "audit.json").read_text())
    assert (report["outcome"]["kind"], report["sequences"]) == ("beyond", 5)
    assert (out / "audit.html").exists()


def test_lines_within_the_band_pass_control(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = beside(append(path, line() * 3), append(path, line(0.03)), end())
    report, place = run(path, idle_s=0)
    writer.join()
    assert (place, report.outcome.passed, report.figures.sequences) == ("", True, 4)


def test_a_mean_is_asked_of_the_whole_log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line() * 3 + line(0.25))
    assert run(path, settings=AuditSettings(max_k3=0.02))[0].outcome.passed
    assert not run(path, settings=AuditSettings(max_k3=0.005))[0].outcome.passed


def test_a_last_line_counts_where_it_is_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line() + line().strip())
    report, _ = run(path)
    assert report.figures.sequences == 2
    assert not any("amid a line" in note for note in report.log_notes)
    path.write_text(line() + line()[:40])
    report, _ = run(path)
    assert report.figures.sequences == 1
    assert report.log_notes[-1] == f"{path} ends amid a line (40 bytes), which is left out."


def _cut(path):
    os.truncate(path, 10)


def _replaced(path):
    other = path.with_suffix(".new")
    other.write_text(line() * 4)
    other.rename(path)


def _written_anew(path):
    path.write_text(line(0.01) * 8)


def _gone(path):
    path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "has 10 bytes, after it had"),
        (_replaced, "is another file now: the 3 lines that were read are no longer there"),
        (_written_anew, "was written anew"),
        (_gone, "is gone, after 3 of its lines were read"),
    ],
)
def test_a_log_that_no_longer_holds_what_was_read_is_refused(tmp_path, change, message):
    path = tmp_path / "log.jsonl"
    path.write_text(line() * 3)
    with pytest.raises(ValueError, match=message):
        Follow(path, None, BAND).run(0, lambda _: change(path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_read(tmp_path, number):
    path, out = tmp_path / "log.jsonl", tmp_path / "out"
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    thread = beside(append(path, line() * 2), end(number))
    assert main(["audit", str(path), "--follow", "--band", "5%", "--out", str(out)]) == 0
    thread.join()
    assert json.loads((out / "audit.json").read_text())["sequences"] == 2
    assert handlers == [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]


def test_a_folder_gets_a_file_for_each_step(tmp_path):
    log = tmp_path / "steps"
    (log).mkdir()
    writer = beside(append(log / "2.jsonl", line()), append(log / "10.jsonl", line() + line(0.5)))
    report, place = run(log, idle_s=0)
    writer.join()
    assert (place, report.figures.sequences) == (f"{log / '10.jsonl'}, line 2", 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--follow"], "give --band, --max_abs or --max_k3"),
        (["--idle_s", "3"], "idle_s (3) goes with --follow"),
        (["--follow", "--band", "5%", "--model", "m"], "reads a log's own two columns"),
        (["--follow", "--band", "5%", "--idle_s", "1"], "holds no whole line; nothing was followed"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, capsys, words, message):
    path = tmp_path / "log.jsonl"
    assert main(["audit", str(path), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
