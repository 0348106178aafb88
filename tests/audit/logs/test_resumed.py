"""Resumes of two training loops, each state left out alone: the one that was lost is named, and no other.

One loop is plain torch and one is zerokl, whose logs are read here as anybody's, without its ledger.
"""

import json
import shutil
from pathlib import Path

import pytest
from zerokl.cli import main

from tests.audit.logs.resumed_loop import STATES, Loop, run

STEPS, RESUME = 8, 4
# What is said of a state that was not restored.
SAID = {
    "weights": "B began with other weights than A had there",
    "optimizer": "So the optimizer's state was lost",
    "loader": "the data loader was not restored, and restarted at its beginning",
    "generator": "the state of the sampler's generator was not restored",
    "scheduler": "the schedule was not restored, and restarted",
    "scaler": "the loss scaler's state was not restored",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break, and its state before step RESUME."""
    folder = tmp_path_factory.mktemp("whole") / "a"
    return folder, run(Loop(), folder, range(STEPS), RESUME)


@pytest.fixture
def resumed(whole, tmp_path, capsys):
    """resumed(states left out): exit code and words of the diff with the whole run."""

    def differ(*without: str, change=None, only: str = "") -> tuple[int, str]:
        a, state = whole
        loop, b = Loop(), tmp_path / f"b{len(list(tmp_path.iterdir()))}"
        loop.load(state, without)
        if change:
            change(loop)
        run(loop, b, range(RESUME, STEPS))
        code = main(["diff", *(str(side / only) for side in (a, b))])
        return code, " ".join(capsys.readouterr().out.split())

    return differ


def test_a_sound_resume_is_equal_and_says_what_shows_it(resumed):
    code, words = resumed()
    assert code == 0
    assert "rollouts before step 4 are taken of A only, and are not compared" in words
    assert "equal: 24 completions and 5 metrics of 4 rows" in words
    for shown in (
        "weights: equal, shown by log-probabilities of 144 tokens",
        "optimizer: equal, shown by the numbers of 3 steps after an update",
        "data loader: equal",
        "sampler's generator: equal",
        "learning rate's schedule: equal, shown by lr of 4 steps",
        "loss scaler: equal, shown by loss_scale",
        "Not shown: ",
    ):
        assert shown in words
    assert not any(sentence in words for sentence in SAID.values())


@pytest.mark.parametrize("lost", STATES)
def test_a_state_that_was_lost_is_named_and_no_other(resumed, lost):
    code, words = resumed(lost)
    assert code == 1
    assert [state for state in STATES if SAID[state] in words] == [lost]


@pytest.mark.parametrize("lost", ["loader", "optimizer", "generator", "scaler", "weights"])
def test_a_schedule_that_was_lost_too_is_named_beside_it(resumed, lost):
    """A learning rate depends on no data, so no fault hides another one. It hides an optimizer's."""
    _, words = resumed(lost, "scheduler")
    assert [s for s in STATES if SAID[s] in words] == [
        s for s in STATES if s in (lost, "scheduler") and (s, lost) != ("optimizer", "optimizer")
    ]


def test_what_is_lost_at_the_resume_shows_one_step_later_for_an_optimizer(resumed):
    _, words = resumed("optimizer")
    assert "first difference at step 5: sampler's logprob" in words
    assert (
        "Equal at step 4 in prompts, tokens, the sampler's logprobs, the trainer's logprobs, gradient"
        in words
    )
    assert "It is the first after the resume" in words


def test_data_in_another_order_and_other_data(resumed):
    def shuffled(loop):
        loop.loader.seed = 9

    assert "the data was shuffled with another seed" in resumed(change=shuffled)[1]

    def one_batch_on(loop):
        loop.loader.next()

    assert "the data loader skipped 1 step." in resumed(change=one_batch_on)[1]

    def other(loop):
        loop.loader.next = lambda: [40, 41]

    assert "none of B's stands anywhere in A" in resumed(change=other)[1]


@pytest.mark.parametrize("lost", STATES)
def test_metrics_alone_name_what_they_can(resumed, lost):
    code, words = resumed(lost, only="metrics.jsonl")
    assert code == 1
    alone = ("scheduler", "scaler")
    named = [state for state in STATES if SAID[state] in words]
    assert named == ([lost] if lost in alone else [])
    if lost not in alone:
        assert "Metrics alone do not tell which; log rollouts too" in words
    assert ("optimizer's state, or the data" in words) == (lost == "optimizer")


@pytest.mark.parametrize("lost", [(), ("optimizer",), ("scheduler",)])
def test_metrics_that_are_a_step_ahead_of_rollouts_are_joined(whole, tmp_path, capsys, lost):
    """TRL names rollouts by the updates before them, and metrics by the updates after them."""
    a, state = whole
    loop = Loop()
    loop.load(state, lost)
    run(loop, tmp_path / "b", range(RESUME, STEPS))
    shutil.copytree(a, tmp_path / "a")
    for side in ("a", "b"):
        file = tmp_path / side / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        history = [row | {"step": row["step"] + 1} for row in rows]
        file.with_name("trainer_state.json").write_text(json.dumps({"log_history": history}))
        file.unlink()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == bool(lost)
    words = " ".join(capsys.readouterr().out.split())
    assert [state for state in STATES if SAID[state] in words] == list(lost)
    assert ("learning rate, and other weights at step 5" in words) == (lost == ("optimizer",))


def test_a_log_that_does_steps_twice_is_taken_at_its_last_word(whole, tmp_path, capsys):
    """A crash after step 5 and a resume at 4 leave steps 4 and 5 twice in files that are appended to."""
    a, _ = whole
    b = tmp_path / "b"
    shutil.copytree(a, b)
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        lines = (a / name).read_text().splitlines(keepends=True)
        torn = [line for line in lines if json.loads(line)["step"] < 6]
        torn = [line.replace('"reward": ', '"reward": 1') if '"step": 5' in line else line for line in torn]
        again = [line for line in lines if json.loads(line)["step"] >= 4]
        (b / name).write_text("".join(torn + again))
    assert main(["diff", str(a), str(b)]) == 0
    assert "B did steps 4 to 5 again; the last time counts" in capsys.readouterr().out


def with_seed(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"trainer:\n  seed: {seed}\n")
    return folder


def test_a_seed_that_is_not_used_is_a_fault_although_all_is_equal(tmp_path, capsys):
    a, b, c = (tmp_path / name for name in "abc")
    for folder, seed in ((a, 0), (b, 0), (c, 1)):
        run(Loop(seed), folder, range(3))
    assert main(["diff", str(with_seed(a, 0)), str(with_seed(b, 0))]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(with_seed(b, 1))]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "A has seed in " in words
    assert "all 18 completions are equal: the seed is not used" in words
    assert main(["diff", str(a), str(with_seed(c, 1))]) == 1
    assert "stream" not in capsys.readouterr().out


def test_two_seeds_with_one_stream(tmp_path, capsys):
    """Another cause changes two completions, and the others are those of the other seed."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(Loop(0), with_seed(a, 0), range(3))
    run(Loop(0), with_seed(b, 1), range(3))
    rows = [json.loads(line) for line in (b / "rollouts.jsonl").read_text().splitlines()]
    for row in rows[:2]:
        row["completion_ids"][0] ^= 1
    (b / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["diff", str(a), str(b)]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "16 of 18 completions of the same prompt and step are the same tokens" in words
    assert "both runs draw from one stream of random numbers" in words
