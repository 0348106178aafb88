"""Help: the commands in the order of use, and the settings of one section."""

import os
import re
import subprocess
import sys

import pytest
from zerokl.cli import main
from zerokl.cli.config_options import sections
from zerokl.engine.config.config_file import known_keys
from zerokl.verify.run_environment import PACKAGE_ROOT


def _commands(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line[:2] == "│ " and line[2] not in " -"]


def test_commands_stand_in_the_order_of_use(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    commands = _commands(capsys.readouterr().out)
    assert commands[:3] == ["train", "watch", "report"]
    assert commands.index("audit") < commands.index("record") < commands.index("capsule")
    assert len(commands) == len(set(commands)) == 18
    page = (PACKAGE_ROOT / "docs/commands.md").read_text()
    assert list(dict.fromkeys(re.findall(r"^## zerokl (\S+)", page, re.M))) == commands
    assert "Undefined" not in page


@pytest.mark.parametrize("name", ["loss", "task", "evaluation", "vllm"])
def test_help_of_a_section_has_its_settings_and_no_others(monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help", name]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert set(re.findall(r"--([a-z_]+)\.", text)) == {name}
    assert all(key.split(".")[1] in text for key in known_keys() if key.startswith(f"{name}."))


def test_help_shows_what_most_runs_set_and_all_where_asked():
    def shown(*words: str) -> set[str]:
        # A process of its own: a console keeps the width that it begins with, and a narrow one breaks names.
        command = [sys.executable, "-m", "zerokl", "train", "--help", *words]
        wide = os.environ | {"COLUMNS": "200"}
        text = subprocess.run(command, env=wide, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"^│ +--([a-z_0-9.]+)", text, re.M))

    keys = {key for key in known_keys() if key not in sections()}
    assert keys <= shown("all")
    common = shown()
    assert 30 <= len(common & keys) <= 45
    assert {"model", "loss.preset", "optimizer.lr", "task.name", "run_dir"} <= common


@pytest.mark.full
def test_the_words_about_a_section_stand_together(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    assert not re.search(r"^│ +│\n│ +│$", capsys.readouterr().out, re.M)


def test_a_setting_that_help_hides_is_taken(refused):
    words = ("train", "--preset", "demo", "--run_dir", "run", "--optimizer.beta2", "2")
    assert "optimizer.beta2" in refused(*words)


def test_help_of_no_section_names_the_sections(capsys):
    assert main(["train", "--help", "losses"]) == 2
    message = capsys.readouterr().err
    assert "losses is no section" in message
    assert "loss, lora" in message
    assert len(message.splitlines()) == 1
