"""Runs in environments: every drawn token exact, every end with its rule, and the run reads itself again."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout import turns
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.environment import Turn
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.engine.train.losses.advantage import advantages
from zerokl.engine.train.monitor import MismatchError
from zerokl.verify.ledger import read_ledger

from tests.forked import run_ranks


@pytest.fixture(scope="module", autouse=True)
def acts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def talkative(model, tmp_path_factory) -> Path:
    """The model, with so many stop tokens that a turn has few tokens."""
    folder = tmp_path_factory.mktemp("talkative") / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(40, 60)]}))
    return folder


@pytest.fixture
def acting(config, talkative):
    """acting(task, **overrides): a run of `acts:task`."""

    def make(task: str, **overrides: object) -> Config:
        base = {
            "model": talkative,
            "task__name": f"acts:{task}",
            "task__reward": "",
            "task__options": {},
            "environment__processes": 1,
            "sampling__max_tokens": 12,
        }
        return config(**(base | overrides))

    return make


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


def fingerprint(cfg: Config, path: Path) -> tuple[str, str]:
    summary = train(cfg, path)
    assert (summary.mismatch_max_abs, summary.tokens_unequal) == (0.0, 0)
    return summary.weights, summary.fingerprint


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.full) for d in ("float32", "float16"))]
)
def test_a_run_is_exact_and_reads_itself_again(acting, tmp_path, dtype, capsys):
    path = tmp_path / "run"
    cfg = acting("echo", dtype=dtype, checkpoint__every=2, evaluation__every=2)
    weights, chain = fingerprint(cfg, path)
    lines = rows(path)
    assert max(len(row["turn_rewards"]) for row in lines) == 3
    for row in lines:
        assert row["reward"] == sum(row["turn_rewards"])
        assert row["finish"] in ("done", "tokens")
        assert len(row["logprobs"]) == len(row["completion_ids"]) == len(row.get("mask", row["logprobs"]))
    assert main(["verify", "run", str(path)]) == 0
    assert main(["report", str(path)]) == 0
    capsys.readouterr()
    spread = {
        "workers": 2,
        "micro_batch": 2,
        "environment__processes": 3,
        "native__max_concurrency": 2,
    }
    other = acting("echo", dtype=dtype, checkpoint__every=2, evaluation__every=2, **spread)
    assert fingerprint(other, tmp_path / "other") == (weights, chain)


@pytest.mark.parametrize("task", ["echo", pytest.param("faulty", marks=pytest.mark.full)])
def test_a_replay_needs_no_environment(acting, tmp_path, monkeypatch, task):
    path = tmp_path / "run"
    train(acting(task, prompts=6, checkpoint__every=2), path)

    def unplayed(*_):
        raise ValueError("no environment is to be had")

    for module in ("engine.rollout.players", "engine.tasks.environments"):
        monkeypatch.setattr(f"zerokl.{module}.open_environments", unplayed)
    for step in (1, 2):
        assert main(["replay", str(path), "--step", str(step)]) == 0
    assert main(["verify", "run", str(path)]) == 1, "control: it plays them again"
    file = path / "rollouts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in lines if row["step"] == 2 and "mask" in row and 0 in row["mask"])
    row["completion_ids"][row["mask"].index(0)] ^= 1
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert main(["replay", str(path), "--step", "2"]) == 1, "control: another answer"


PRODUCTS = [
    {"max_staleness": 2, "updates_per_rollout": 2, "frozen": ["model.layers.0.*"], "dtype": "float16"},
    {"loss__kl_coef": 0.1, "loss__kl_in": "reward", "recompute": "layer", "micro_batch": 1},
    {"loss__preset": "kimi", "shards_in_flight": 2},
    {"loss__preset": "dapo", "loss__max_resamples": 2, "dtype": "bfloat16"},
    {"exact": False, "precision__sampler_dtype": "bfloat16", "sampling__top_p": 0.9},
    {"exact": False, "sampler": "hf", "precision__sampler_dtype": "bfloat16"},
]


@pytest.mark.full
@pytest.mark.usefixtures("without_knobs")
@pytest.mark.parametrize("settings", PRODUCTS, ids=lambda settings: "-".join(settings))
def test_a_run_with_other_settings_is_read_by_every_reader(acting, talkative, tmp_path, settings):
    path = tmp_path / "run"
    train(acting("faulty", prompts=6, evaluation__every=2, checkpoint__every=2, **settings), path)
    assert main(["verify", "run", str(path)]) == 0
    assert main(["report", str(path)]) == 0
    assert main(["diff", str(path), str(path)]) == 0
    assert main(["replay", str(path), "--step", "2"]) == 0
    words = ["--model", str(talkative), "--weight_version", "0", "--temperature", "1", "-n", "8"]
    words += ["--out", str(tmp_path / "audit")]
    assert main(["audit", str(path / "rollouts.jsonl"), *words]) in (0, 1)


def test_control_a_seed_is_another_run(acting, tmp_path):
    assert len({fingerprint(acting("echo", steps=1, seed=i), tmp_path / str(i)) for i in (0, 0 + 1)}) == 2


def test_each_end_has_its_name_and_its_rule(acting, tmp_path):
    runs = {
        "forever": ({"environment__max_turns": 2}, {"turns", "tokens"}),
        "long": ({"environment__context": 60, "sampling__max_tokens": 40}, {"context"}),
        "echo": ({"environment__max_tokens": 9}, {"tokens"}),
    }
    for name, (settings, ends) in runs.items():
        fingerprint(acting(name, steps=2, **settings), tmp_path / name)
        lines = rows(tmp_path / name)
        counts = Counter(row["finish"] for row in lines)
        assert ends <= set(counts), (name, counts)
        for row in lines:
            drawn = sum(row["mask"]) if "mask" in row else len(row["completion_ids"])
            limit = settings.get("environment__max_tokens", 10**9)
            assert drawn <= limit
            tokens = len(row["prompt_ids"]) + len(row["completion_ids"])
            assert tokens <= settings.get("environment__context", 512)
            if row["finish"] == "tokens":
                assert row["turn_rewards"][-1] == 0.0 or drawn == limit


@pytest.mark.full
def test_what_goes_wrong_in_one_trajectory_is_one_line_and_no_lost_step(acting, tmp_path, capsys):
    path = tmp_path / "run"
    cfg = acting("faulty", prompts=6, steps=2)
    weights = fingerprint(cfg, path)
    output = " ".join(capsys.readouterr().out.split())
    assert main(["verify", "run", str(path)]) == 0
    lines = rows(path)
    errors = {row["problem"]: row["error"] for row in lines if row["finish"] == "error"}
    assert set(errors) == {1, 2, 3, 4}
    for problem, reason in ((1, "no start"), (2, "exit code 1"), (3, "does not know"), (4, "token id 999")):
        assert reason in errors[problem]
        assert f"for problem {problem} ('{problem}+{problem}='), sample" in output
    assert all((row["advantage"] == 0.0) for row in lines if row["finish"] == "error")
    started = [row for row in lines if row["problem"] == 1 and row["finish"] == "error"]
    assert all(row["prompt_ids"] == [] and row["completion_ids"] == [] for row in started)
    spread = acting("faulty", prompts=6, steps=2, environment__processes=3)
    assert fingerprint(spread, tmp_path / "spread") == weights


@pytest.mark.full
def test_no_answer_of_an_environment_harms_its_neighbours(acting, tmp_path, capsys):
    """One that hangs, forks, or answers NaN, bytes or an unknown id: one line each, and no other loss."""
    settings = {"prompts": 6, "steps": 1, "environment__processes": 2}
    fingerprint(acting("echo", **settings), tmp_path / "calm")
    fingerprint(acting("wrong", environment__timeout_s=4, **settings), tmp_path / "run")
    calm, lines = rows(tmp_path / "calm"), rows(tmp_path / "run")
    reasons = {
        0: ("time limit", "took more than 4 s (environment.timeout_s)"),
        2: ("error", "step: reward (nan) must be finite"),
        3: ("error", "content (b'x') must be a string"),
        4: ("error", "token id 999 is none of the model's"),
    }
    output = " ".join(capsys.readouterr().out.split())
    for row, expected in zip(lines, calm, strict=True):
        if row["sample"] or len(expected["turn_rewards"]) < 2 or row["problem"] not in reasons:
            different = [name for name in row if row[name] != expected.get(name) and name != "advantage"]
            assert different == []
            continue
        finish, reason = reasons.pop(row["problem"])
        assert (row["finish"], row["advantage"]) == (finish, 0.0)
        assert reason in row["error"]
        n = row["problem"]
        assert re.search(rf"{re.escape(reason)}.* for problem {n} \('{n}\+{n}='\), sample 0, turn 2;", output)
    assert reasons == {}


# It keeps the thoughts of a turn that a user answers, and drops them once a tool does.
DROPS = (
    "{% for m in messages %}<{{ m.role }}>{% if messages[-1].role == 'tool' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_rewrites_a_later_turn_ends_one_trajectory(acting, talkative, tmp_path, capsys):
    shutil.copytree(talkative, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(DROPS)
    fingerprint(acting("caller", model=tmp_path / "model", steps=1), tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    ends = Counter(
        (row["sample"] == 0, row["finish"]) for row in rows(tmp_path / "run") if len(row["turn_rewards"]) > 1
    )
    assert ends[True, "error"]
    assert set(ends) & {(True, "done"), (False, "error")} == set()
    assert re.search(
        r"drops the thoughts of turn 1 once a message of the role tool follows, .*"
        r" for problem \d \('(\d)\+\1='\), sample 0, turn 2; not trained on",
        output,
    )


def test_a_sample_that_is_not_trained_on_counts_in_no_mean():
    import numpy as np

    rewards = np.array([[1.0, 0.0, 50.0, 0.5]])
    trained = np.array([[True, True, False, True]])
    for kind in ("mean", "std", "leave_one_out", "batch"):
        A = advantages(rewards, kind, trained)
        assert A[0, 2] == 0.0
        assert A[trained].tolist() == advantages(rewards[:, [0, 1, 3]], kind).reshape(-1).tolist()


def test_a_run_in_which_every_environment_fails_ends_with_one_line(acting, tmp_path, capsys):
    (tmp_path / "c.toml").write_text(to_toml(acting("broken")))
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "no trajectory of step 0 can be trained on; raised RuntimeError (always)" in error
    assert len(error.splitlines()) == 1


def test_two_players_have_a_group_each(acting, tmp_path):
    path = tmp_path / "run"
    cfg = acting("pair", prompts=4, sampling__max_tokens=30)
    weights, tokenizer = fingerprint(cfg, path), Tokenizer(Path(cfg.model), 64)
    first = [row for row in rows(path) if row["step"] == 0]
    assert len(first) == 12
    for g in range(3):
        for game in (0, 2):
            a, b = first[game * 3 + g], first[(game + 1) * 3 + g]
            assert (a["sample"], b["sample"], b["prompt"]) == (g, g, a["prompt"] + 1)
            if a["finish"] == "done":
                turn = tokenizer.text(a["completion_ids"][:-1])  # without its stop token
                assert tokenizer.text(b["prompt_ids"]) == f"{turn}<"
                assert (a["reward"], b["reward"]) in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0))
            elif not b["completion_ids"]:
                assert b["advantage"] == 0.0, "a player without a turn"
    assert main(["verify", "run", str(path)]) == 0
    spread = acting("pair", prompts=4, sampling__max_tokens=30, workers=2, environment__processes=2)
    assert fingerprint(spread, tmp_path / "spread") == weights


def test_prompts_that_are_no_whole_games_are_refused(acting, tmp_path):
    with pytest.raises(ValueError, match="must be a multiple of 2"):
        train(acting("pair", prompts=3), tmp_path / "run")


def test_a_reward_beside_an_environment_is_refused(acting, tmp_path):
    with pytest.raises(ValueError, match="has an environment, which gives the rewards"):
        train(acting("echo", task__reward="exact"), tmp_path / "run")


@pytest.mark.full
def test_a_kill_in_the_middle_of_a_turn_and_a_resume_give_the_same_ledger(acting, tmp_path):
    expected = fingerprint(acting("killing", checkpoint__every=1), tmp_path / "whole")
    (tmp_path / "c.toml").write_text(to_toml(acting("killing", checkpoint__every=1)))
    (tmp_path / "kill").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "zerokl", "train"]
    options = dict(cwd=tmp_path, env=environment, capture_output=True, check=False)
    killed = subprocess.run([*command, "c.toml", "--run_dir", "run"], **options)
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert not (tmp_path / "kill").exists()
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl").lines) < 3
    resumed = subprocess.run([*command, "--resume", "run"], **options)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["weights"], summary["fingerprint"]) == expected


@pytest.mark.full
def test_ranks_give_the_same_bits(acting, tmp_path):
    cfg = acting("faulty", prompts=6, steps=2)
    expected = fingerprint(cfg, tmp_path / "alone")
    (tmp_path / "c.toml").write_text(to_toml(cfg))
    run_ranks(2, ["-m", "zerokl", "train", "c.toml", "--run_dir", "run"], tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["weights"], summary["fingerprint"]) == expected


def _mask_over_observations(monkeypatch) -> None:
    """The drawn tokens of the second turn are marked one place too early."""
    with_turn = turns.Rollout.with_turn

    def shifted(self, between, completion):
        rollout = with_turn(self, between, completion)
        start = rollout.turn_starts[-1]
        if len(between) > 1:
            rollout.drawn[start - 1], rollout.drawn[-1] = True, False
        return rollout

    monkeypatch.setattr(turns.Rollout, "with_turn", shifted)
    monkeypatch.setattr(turns.Rollout, "check", lambda self: self)


def _encoded(tokenizer, ids) -> tuple[int, ...]:
    """The ids of the text of ids."""
    return tuple(tokenizer.encode_plain(tokenizer.text(ids)))


def _encoded_again_for_the_sampler(monkeypatch) -> None:
    """A turn follows the ids of the text so far, as where a server is sent messages."""
    request = turns.TurnPlayer.request

    def again(self, play, params):
        asked = request(self, play, params)
        return replace(asked, ids=_encoded(self._tokenizer, asked.ids))

    monkeypatch.setattr(turns.TurnPlayer, "request", again)


def _encoded_again_for_the_trainer(monkeypatch) -> None:
    """The trainer reads the ids of the text, as where trajectories come as messages."""
    monkeypatch.setattr(turns.Rollout, "check", lambda self: self)
    played = turns.TurnPlayer._episodes

    def again(self, *parts):
        episodes = played(self, *parts)
        rollouts = [replace(r, ids=_encoded(self._tokenizer, r.ids)) for r in episodes.rollouts]
        return replace(episodes, rollouts=rollouts)

    monkeypatch.setattr(turns.TurnPlayer, "_episodes", again)


def _another_separator(monkeypatch) -> None:
    """What stands between two turns is another text for the trainer than for the sampler."""
    with_turn = turns.Rollout.with_turn

    def other(self, between, completion):
        return with_turn(self, [*between[:-1], between[-1] ^ 1] if between else between, completion)

    monkeypatch.setattr(turns.Rollout, "with_turn", other)


PLANTS = [
    _mask_over_observations,
    _another_separator,
    _encoded_again_for_the_sampler,
    _encoded_again_for_the_trainer,
]


@pytest.fixture
def normalising(talkative, tmp_path) -> Path:
    """The model with a tokenizer that reads a to m as n. So many ids are not those of their text."""
    folder = Path(shutil.copytree(talkative, tmp_path / "normalising"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[a-m]"}, "content": "n"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_ids_that_are_not_those_of_their_text_are_kept(acting, normalising, tmp_path):
    fingerprint(acting("echo", model=normalising, steps=1), tmp_path / "run")
    assert any(set(row["text"]) & set("abcdefghijklm") for row in rows(tmp_path / "run"))


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_stops_the_run(acting, normalising, tmp_path, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(MismatchError):
        train(acting("echo", model=normalising), tmp_path / "run")


def test_control_a_fragment_that_counts_as_finished_is_found(acting, tmp_path, monkeypatch):
    """The environment would see a cut turn, and the log says that it did not."""
    drawn = turns.TurnPlayer.drawn

    def finished(self, play, request, completion):
        drawn(self, play, request, completion)
        if play.finish in ("tokens", "context"):
            play.finish = ""
            play.game.turns.append(Turn(list(completion.ids), self._tokenizer.text(completion.ids)))

    monkeypatch.setattr(turns.TurnPlayer, "drawn", finished)
    train(acting("echo", sampling__max_tokens=3, steps=1), tmp_path / "run")
    monkeypatch.undo()
    assert main(["verify", "run", str(tmp_path / "run")]) == 1
