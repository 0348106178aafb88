"""The task pairs: what a file must hold, and what its pairs become."""

import json

import pytest
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.rollout.policy import load_policy
from zerokl.engine.tasks.loading import load_task

GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}


def load(tmp_path, *rows, **options):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task("pairs", {"file": "p.jsonl"} | options, str(tmp_path))


def test_columns_template_and_split(tmp_path):
    rows = [{"q": f"{i}?", "good": f"yes {i}", "bad": f"no {i}"} for i in range(10)]
    task = load(
        tmp_path, *rows, prompt="q", chosen="good", rejected="bad", template="Q: {prompt}", held_out=0.25
    )
    train, held_out = task.problems("train"), task.problems("held_out")
    assert (len(train), len(held_out)) == (8, 2)
    assert {p.prompt for p in [*train, *held_out]} == {f"Q: {i}?" for i in range(10)}
    for p in train:
        i = p.prompt[3:-1]
        assert (p.answer, p.rejected) == (f"yes {i}", f"no {i}")
    assert [p.id for p in train] == list(range(8))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"rejected": "2"}, r'line 2: "chosen" and "rejected" are equal, so nothing is preferred'),
        (
            {"prompt": "a", "chosen": "b"},
            r"line 2 must have a .rejected.; it has 'prompt', 'chosen': name the column",
        ),
        (
            GOOD | {"chosen": 3},
            r'line 2 must have a "chosen": a string that is not empty; this one is a number',
        ),
        (GOOD | {"rejected": " "}, r'line 2 must have a "rejected": .* this one is empty'),
        ([1], r'line 2 must be an object with "prompt", "chosen" and "rejected"'),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=r"task pairs: .*p\.jsonl " + message):
        load(tmp_path, GOOD, row)


def test_a_file_is_needed():
    with pytest.raises(ValueError, match=r'task pairs: needs a file; set .* "pairs\.jsonl"'):
        load_task("pairs", {})


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (
            [GOOD, GOOD | {"rejected": "123456789"}],
            {},
            "a completion of pair 1 has 10 tokens with its stop token",
        ),
        ([GOOD | {"chosen": "\u2603"}], {}, "has a character that the tokenizer does not know"),
        ([GOOD], {"task__reward": "exact"}, "task.reward (exact): pairs are ranked by their scores"),
    ],
)
def test_a_run_refuses_what_it_cannot_score(config, tmp_path, capsys, rows, changes, message):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": str(tmp_path / "p.jsonl"), "chat": False}
    cfg = config(
        **{"task__name": "pairs", "task__options": options, "task__reward": "", "num_generations": 2}
        | {"loss__preset": "dpo"}
        | changes
    )
    (tmp_path / "c.toml").write_text(to_toml(cfg))
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


def test_eval_ranks_pairs_by_their_scores(config, tmp_path):
    """Python's evaluate scores with the native sampler's decoder; the file is ranked both ways round."""
    cfg, policy = config(), load_policy(str(config().model))
    pairs = [GOOD, {"prompt": "2+2=", "chosen": "4", "rejected": "22"}]
    turned = [p | {"chosen": p["rejected"], "rejected": p["chosen"]} for p in pairs]
    accuracies = []
    for rows in (pairs, turned):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"file": str(tmp_path / "p.jsonl"), "chat": False}
        task = cfg.task.model_copy(update={"name": "pairs", "options": options, "reward": ""})
        accuracies.append(policy.evaluate(task, split="train").accuracy)
    assert sum(accuracies) == 1.0
