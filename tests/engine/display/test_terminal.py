"""What a person sees while a command works: on terminals of any width, without colour, and in a log."""

import io
import json
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zerokl
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.table import Table
from safetensors.torch import load_file, save_file
from zerokl.audit.frameworks import FRAMEWORKS
from zerokl.cli import main
from zerokl.engine.display import progress
from zerokl.engine.display.progress import Display, Stages, duration, packed, sparkline
from zerokl.engine.display.terminal import Printer, console
from zerokl.engine.runs.checks.step_trace import write_trace
from zerokl.engine.runs.run import _fields

ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])")
# What a terminal obeys or hides: control characters, escapes of 7 and 8 bits, directions, a surrogate.
OBEYED = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2066", "\u200b", "\ufeff", "\udc80"]
METRICS = {
    "reward/mean": 0.55,
    "entropy": 1.23456,
    "grad_norm": 12.5,
    "mismatch/max_abs": 0.0,
    "mismatch/frac_equal": 1.0,
    "time/sample_s": 1.0,
    "time/train_s": 1.06,
    "perf/tokens_per_s": 12345.0,
}
NEEDED = (
    "7/60",
    "1:46 left",
    "0.550",
    "mismatch 0 (equal 1.0000)",
    "12,345 tokens/s",
    "held-out 0.500 (step 3)",
)


class Clock:
    """Seconds that go on when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def terminal(monkeypatch) -> Callable[..., Printer]:
    """terminal(width, **environment): what is printed goes to a terminal in memory from now on."""

    def make(width: int, **environment: str) -> Printer:
        environment = {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environment
        file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        options = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        printer = Printer(force_terminal=True, width=width, file=file, _environ=environment, **options)
        monkeypatch.setattr(progress, "console", printer)
        return printer

    return make


def written(printer: Printer) -> str:
    return printer.file.buffer.getvalue().decode()


def last_picture(printer: Printer) -> list[str]:
    """The lines that are left on the terminal: those after the last line was erased."""
    return ESCAPE.sub("", written(printer).rpartition("\x1b[2K")[2]).rstrip().splitlines()


def seven_steps(printer: Printer) -> list[str]:
    clock = Clock()
    with Display(60, "train", curve=("reward", ()), clock=clock) as display:
        for step in range(7):
            clock.now_s += 2.0
            result = {2: "held-out 0.500"}.get(step, "")
            display.step(*_fields(METRICS), value=0.25 + 0.05 * step, result=result)
    return last_picture(printer)


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_the_training_display_keeps_what_counts_at_every_width(terminal, width):
    lines = seven_steps(terminal(width))
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) <= 7
    text = "\n".join(lines)
    assert all(words in text for words in NEEDED), text
    assert "reward 0.250 ▁▂▃▅▆▇█ 0.550" in text
    assert ("━" in text) == (width >= 40)


def test_a_window_too_narrow_for_a_bar_has_the_numbers(terminal):
    lines = seven_steps(terminal(28))
    assert lines[0].split() == ["train", "7/60", "1:46", "left"]
    assert all(cell_len(line) <= 28 for line in lines)


def test_no_color_has_no_colour(terminal):
    assert COLOUR.search(written_after_steps(terminal(80)))
    assert not COLOUR.search(written_after_steps(terminal(80, NO_COLOR="1")))


def written_after_steps(printer: Printer) -> str:
    seven_steps(printer)
    return written(printer)


def test_a_terminal_that_cannot_move_its_cursor_has_plain_lines(terminal):
    out = written_after_steps(terminal(80, TERM="dumb"))
    assert "\x1b" not in out
    assert out.splitlines()[0].startswith("train 1/60")


def test_a_mismatch_is_red(terminal):
    printer = terminal(80)
    metrics = METRICS | {"mismatch/max_abs": 0.25, "mismatch/frac_equal": 0.5, "mismatch/k1": 0.125}
    with Display(2, "train") as display:
        display.step(*_fields(metrics))
    assert "\x1b[1;31mmismatch 0.25 (equal 0.5000)" in written(printer)
    assert last_picture(printer)[-1] == "mismatch:  k1 0.125"


def test_a_notice_is_shown_and_goes_at_the_end(terminal):
    printer = terminal(80)
    with Display(2, "train") as display:
        display.step(["a field"])
        display.announce("ends after this step")
        display.step(["a field"])
        display._live.refresh()
        assert "ends after this step" in written(printer)
    assert last_picture(printer)[1:] == ["a field"]


def plain_lines(capsys, steps: int, step_s: float) -> list[str]:
    clock = Clock()
    with Display(steps, "train", curve=("reward", ()), clock=clock) as display:
        for _ in range(steps):
            clock.now_s += step_s
            display.step(*_fields(METRICS), value=0.5)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("steps", "step_s", "fewest", "most"),
    [
        (1000, 0.001, 2, 2),
        (20, 3.0, 20, 20),
        (3600, 1.0, 60, 140),
        (20_000, 5.0, 300, 500),
        (5, 7200.0, 5, 5),
    ],
)
def test_a_log_has_lines_at_a_rate_that_a_person_can_read(capsys, steps, step_s, fewest, most):
    lines = plain_lines(capsys, steps, step_s)
    assert fewest <= len(lines) <= most
    assert lines[0].startswith("train 1/")
    assert lines[-1].startswith(
        f"train {steps}/{steps}  reward 0.500  entropy 1.235  grad 12.5  mismatch 0 ("
    )
    assert not any(c in "".join(lines) for c in "\x1b━▁█")


def test_a_line_has_a_result_of_its_own_step_only(capsys):
    """A step with a result has a line, however fast the steps are; no later line repeats it."""
    clock = Clock()
    with Display(200, "train", curve=("reward", ()), clock=clock) as display:
        for step in range(1, 201):
            clock.now_s += 0.11
            display.step([], value=0.5, result=f"held-out 0.{step}" if step % 50 == 0 else "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    shown = [
        (line.split(", ")[0].split("  ")[0], line.split("held-out ")[1]) for line in lines if "held" in line
    ]
    assert shown == [(f"train {step}/200", f"0.{step}") for step in (50, 100, 150, 200)]


def test_the_time_left_is_that_of_the_recent_steps(capsys):
    clock = Clock()
    with Display(100, "train", completed=40, clock=clock) as display:  # a run that goes on at step 40
        for seconds in [60.0] * 10 + [1.0] * 45:
            clock.now_s += seconds
            display.step()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "train 41/100, 59:00 left"
    assert re.fullmatch(r"train \d+/100, 0:\d\d left", last)


@given(st.lists(st.floats(), max_size=200), st.integers(0, 40))
def test_a_sparkline_fits_and_spans_all_blocks(values, width):
    blocks = sparkline([x / 1e300 for x in values], width)
    assert len(blocks) <= width
    assert not blocks or {"▁", "█"} <= set(blocks)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([0.0, 1.0], "▁█"),
        ([1.0, float("nan"), 0.0], "█▁"),
        ([5.0], ""),
        ([5.0, 5.0], ""),
        ([], ""),
        ([float(i) for i in range(800)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparklines(values, blocks):
    assert sparkline(values, 8) == blocks


@given(st.lists(st.text(min_size=1, max_size=60), max_size=12), st.integers(1, 90))
def test_fields_are_packed_within_the_width(fields, width):
    lines = list(packed(fields, width))
    assert all(line.cell_len <= width for line in lines)
    assert not any(c in line.plain for line in lines for c in OBEYED if c not in "\n\t")


def test_durations():
    assert [duration(s) for s in (-1, 0, 59.6, 3599, 3600, 360_000)] == [
        *("0:00", "0:00", "1:00", "59:59"),
        *("1:00:00", "100:00:00"),
    ]


@pytest.mark.parametrize("c", [c for c in OBEYED if c not in "\n\t"], ids=ascii)
def test_nothing_that_a_terminal_obeys_is_printed(c, capsys):
    table = Table("name", c, title=f"title {c}")
    table.add_row(f"a{c}b", "x")
    console.print(f"model.{c}layers", f"{c}")
    console.print(table)
    with Stages("audit") as stage, Display(2, f"x{c}") as display:
        stage(f"loading {c}")
        display.step([f"field {c}"])
    out = capsys.readouterr().out
    assert c not in out
    assert c.encode("unicode_escape").decode() in out


def test_hostile_names_reach_no_terminal_through_the_commands(model, tmp_path, capsys):
    """Architectures, names of tensors, paths, labels and what a reward raises."""
    hostile = "x\x1b[31m\x1b]0;owned\x07\x9b\u202e"
    folder = tmp_path / f"model {hostile}"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [hostile]}))
    weights = load_file(model / "model.safetensors")
    renamed = tmp_path / "renamed"
    shutil.copytree(model, renamed)
    save_file(
        {name if i else hostile: x for i, (name, x) in enumerate(weights.items())},
        renamed / "model.safetensors",
    )
    for name, value in (("a", 0.0), ("b", 1.0)):
        trace = {"token_ids": torch.tensor([1, 2]), hostile: torch.tensor([[1.0], [value]])}
        write_trace(tmp_path / f"{name}.safetensors", trace, [torch.zeros(2, 3) for _ in range(3)], 0, 0)
    grid = tmp_path / "grid.toml"
    grid.write_text(f'preset = "demo"\n[variants.label]\n{json.dumps(hostile)} = {{ steps = "x" }}\n')
    commands = {
        "architecture": ["eval", str(folder)],
        "tensor": ["eval", str(renamed)],
        "trace": ["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")],
        "label": ["ablate", str(grid), "--out", str(tmp_path / "out")],
        "task": ["eval", str(model), "--task", hostile],
        "option": ["eval", str(model), f"--{hostile}"],
    }
    for what, words in commands.items():
        assert main(words) in (1, 2), what
        shown = "".join(capsys.readouterr())
        assert "x\\x1b[31m" in shown, (what, shown)
        assert {"\x1b", "\x07", "\x9b", "\u202e"}.isdisjoint(shown), what


def test_nothing_else_prints():
    """All text goes through Printer or one_line; a Text of rich's own would go past them."""
    root = Path(zerokl.__file__).parent
    sources = [
        p
        for room in ("cli", "audit", "engine", "verify", "model", "kernels")
        for p in (root / room).rglob("*.py")
    ]
    texts = {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in sources}
    for name, framework in FRAMEWORKS.items():  # a framework's script runs elsewhere
        file = f"audit/frameworks/{name.replace('-', '_')}.py"
        texts[file] = texts[file].replace(framework.script, "")
    users = {
        name
        for name, text in texts.items()
        if re.search(r"^from rich\.text|rich\.console|Text\(", text, re.M)
    }
    ours = {
        "engine/display/output.py",
        "engine/display/terminal.py",
        "engine/display/progress.py",
        "engine/runs/ablations/display.py",
    }
    assert users == ours
    prints = [
        (name, call) for name, text in texts.items() for call in re.findall(r"(?<![\w.`])print\((.*)", text)
    ]
    assert prints
    assert all(
        re.search(r"one_line\(|failure_line\(|^\"zerokl: interrupted\"", call) for _, call in prints
    ), prints


def test_emoji_and_markup_of_a_model_stay_text(capsys):
    console.print(":heart: [bold red]x[/]")
    assert capsys.readouterr().out == ":heart: [bold red]x[/]\n"


def test_prose_is_broken_between_words_on_a_terminal_only(terminal, capsys):
    words = "the largest difference of a log-probability is small " * 3
    printer = terminal(60)
    printer.say(words.strip())
    printer.print("zerokl train " + "x" * 100)
    lines = written(printer).splitlines()
    assert all(len(line) <= 60 for line in lines[:-1])
    assert " ".join(" ".join(lines[:-1]).split()) == words.strip()
    assert lines[-1] == "zerokl train " + "x" * 100
    console.say(words.strip())
    assert capsys.readouterr().out == words.strip() + "\n"


def test_stages_are_lines_in_a_log_and_go_from_a_terminal(terminal, capsys):
    with Stages("audit") as stage:
        stage("drawing 64 completions")
        stage("scoring")
    assert capsys.readouterr().out == "audit: drawing 64 completions\naudit: scoring\n"
    printer = terminal(40)
    with Stages("audit") as stage:
        stage("drawing 64 completions with " + string.ascii_letters)
        stage._live.refresh()
        shown = last_picture(printer)
    assert len(shown) == 1
    assert cell_len(shown[0]) <= 40
    assert "audit  0:00  drawing 64" in shown[0]
    assert last_picture(printer) == []
