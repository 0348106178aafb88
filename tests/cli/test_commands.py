"""Commands that work: what they print, and their exit codes."""

import os
import re
import shlex
import subprocess
import sys

from zerokl.cli import main
from zerokl.engine.runs import samplers
from zerokl.engine.train.parallel.scorer import WorkersSampler


def test_a_run_that_was_refused_can_be_started_again_in_the_same_folder(training, refused, capsys):
    refused(*training(model="./nowhere"))
    assert main(training()) == 0
    end = r"mismatch 0\.0 over \d+ tokens\n"
    end += r"weights [0-9a-f]{64}\nfingerprint [0-9a-f]{64}\nreport run/report\.html\n"
    end += r"run it again +zerokl train run/config\.toml --run_dir run-again\n"
    end += r"compare the two +zerokl diff run run-again\ncheck it +zerokl verify run run\n"
    end += r"train it further +zerokl train --resume run --steps 4\n$"
    assert re.search(end, capsys.readouterr().out)


def test_the_commands_printed_at_the_end_work(training, capsys):
    assert main(training(run_dir="my run")) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line.partition(" zerokl ")[2]) for line in printed if " zerokl " in line]
    assert [words[0] for words in commands] == ["train", "diff", "verify", "train"]
    for words in commands:
        assert main(words) == 0, words
    assert "equal to the bit: 2 steps" in capsys.readouterr().out


def test_with_a_schedule_over_the_steps_a_run_cannot_be_made_longer(training, capsys):
    assert main(training(optimizer__schedule="linear")) == 0
    assert "--resume" not in capsys.readouterr().out


def test_the_version_is_said_without_loading_torch():
    code = "import sys; from zerokl.cli import main; main(['--version']); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert re.fullmatch(r"zerokl \d+\.\d+\.\d+\S* \(Python .*, torch .*\)\n", result.stdout), result.stderr


def test_a_mismatch_is_one_line_and_exit_code_1(training, monkeypatch, capsys):
    class Planted(WorkersSampler):
        def generate(self, requests):
            completions = super().generate(requests)
            completions[1].logprobs[0] += 1
            return completions

    monkeypatch.setattr(samplers, "WorkersSampler", Planted)
    assert main(training()) == 1
    error = capsys.readouterr().err
    assert error.startswith("zerokl: mismatch at step 0, prompt 0, sample 1, position 0")
    assert len(error.splitlines()) == 1


def test_sample_eval_and_verify_work(folder, capsys):
    assert main(["sample", "model", "--prompt", "12+7=", "-n", "4", "--max-tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert len(re.findall(r"logprob -\d+\.\d{4}  (?:stop|length)$", first, re.MULTILINE)) == 4
    main(["sample", "model", "--prompt", "12+7=", "-n", "4", "--max-tokens", "5"])
    assert capsys.readouterr().out == first
    words = "--task add --problems 7 --num-generations 2"
    words += " --task.options.max_value 9 --task.options.train 20 --task.options.held_out 9"
    assert main(["eval", "model", *words.split()]) == 0
    result = r"add held_out: accuracy 0\.\d{4} over 7 problems x 2 generations"
    assert re.search(result, capsys.readouterr().out)
    assert main(["verify", "model", "--dtype", "float32", "--sequences", "3", "--longest", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("verify 1/9")
    assert "verify 9/9  float32  gradient: threads and workers  " in out
    rows = re.findall(r"float32 +\S+ +([\d,]+) +\S+ +(\d+)", out)
    assert len(rows) >= 8
    assert all(int(n.replace(",", "")) > 0 and unequal == "0" for n, unequal in rows)
