"""What may be typed at the command line: short names of dtypes, other frameworks' names, and the examples."""

import shlex
from collections.abc import Iterator

import pytest
from cyclopts import App
from zerokl.cli.app import app
from zerokl.cli.command_line import spelt_out


def _commands(parent: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every subcommand with the words that name it."""
    for name in parent:
        if not name.startswith("-"):
            yield (*words, name), parent[name]
            yield from _commands(parent[name], (*words, name))


def test_every_help_opens_with_an_example_that_the_command_takes():
    commands = dict(_commands(app))
    assert len(commands) >= 16
    for words, command in commands.items():
        prologue = command.help_prologue or ""
        name, *example = shlex.split(prologue.removeprefix("Example: "))
        assert (name, tuple(example[: len(words)])) == ("zerokl", words), words
        function, bound, _ = app.parse_args(spelt_out(example), exit_on_error=False, print_error=False)
        assert callable(function)
        assert bound.arguments


def test_help_at_80_columns_fits_and_names_the_presets(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert app(["train", "--help"], exit_on_error=False) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Example: zerokl train ")
    assert max(map(len, lines)) <= 80
    assert "choices: demo" in " ".join(lines)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--prest", "--preset"),
        ("--learning_rate", "optimizer.lr"),
        ("--optimizer.learning_rat", "optimizer.lr"),
        ("--batch_size", "prompts"),
        ("--batch-size", "prompts"),
        ("--max_new_tokens", "sampling.max_tokens"),
        ("--output_dir", "--run_dir"),
        ("--rundir", "--run_dir"),
        ("--loss", "loss.preset"),
    ],
)
def test_a_mistyped_or_foreign_option_is_refused_with_the_one_that_was_meant(refused, typed, meant):
    assert refused("train", "--run_dir", "run", typed, "grpo").endswith(f"did you mean {meant}?\n")


def test_short_names_of_dtypes_become_full_ones_wherever_an_option_is_a_dtype():
    typed = (
        "--dtype bf16 --dtype=fp16 --precision.sampler_dtype fp32 --perturb.round-weights bf16 --prompt bf16"
    )
    full = typed.replace("bf16", "bfloat16", 1).replace("fp16", "float16").replace("fp32", "float32")
    full = full.replace("weights bf16", "weights bfloat16")
    assert spelt_out(typed.split()) == full.split()
