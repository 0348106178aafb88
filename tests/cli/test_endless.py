"""Inputs that never end, that are no files, or that need all memory: one line and exit code 2, soon."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from zerokl.engine.tasks import limits
from zerokl.engine.tasks.tokenizer import Tokenizer

# Seconds after which a command counts as one that hangs.
_HANGS_S = 60


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    def hangs(*args: object) -> None:
        raise AssertionError(f"did not end within {_HANGS_S} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(_HANGS_S)
    yield
    signal.alarm(0)


@pytest.fixture
def fifo(folder) -> Path:
    os.mkfifo(folder / "fifo.jsonl")
    return folder / "fifo.jsonl"


@pytest.fixture(params=["pipe", "device", "sparse"])
def endless(request, tmp_path_factory) -> tuple[str, str]:
    """The name of an input that cannot be read whole, and what is said of it."""
    path = tmp_path_factory.mktemp("endless") / "endless"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
        return str(path), "are read at most"
    return str(path), f"is a {request.param}"


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch):
    monkeypatch.setattr("zerokl.files.inputs.STREAM_S", 0.2)


@pytest.mark.parametrize(
    "words",
    [
        "audit model --prompts {} --out report",
        "train {} --run_dir run",
        "ablate {} --out grid",
        "train --model model --run_dir run --task.name jsonl --task.options.file {}",
        "report model --out {}",
        "weights {} model",
    ],
    ids=lambda words: " ".join(words.split()[:2]),
)
def test_an_endless_file(refused, endless, words):
    name, reason = endless
    line = refused(*words.format(name).split())
    # A safetensors file of any size is mapped, not read; and only the beginning of a report is.
    expected = ("no safetensors file", "is no report of zerokl", "is no folder", reason)
    assert any(part in line for part in expected), line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "vocab.json"])
def test_a_pipe_in_a_model_folder(folder, refused, name):
    (folder / "model" / name).unlink(missing_ok=True)
    os.mkfifo(folder / "model" / name)
    assert f"{name}: is a pipe; give a regular file" in refused("sample", "model", "--prompt", "1+1=")


def test_a_pipe_as_a_log_or_a_summary(folder, refused, fifo):
    assert "fifo.jsonl" in refused("audit", "fifo.jsonl", "--model", "model", "--out", "report")
    assert "fifo.jsonl" in refused("diff", "fifo.jsonl", "fifo.jsonl")
    words = ("audit", "model", "--out", "report", "--summary", "fifo.jsonl")
    assert "is a pipe or a socket; give a regular file" in refused(*words)


def test_a_log_of_one_endless_line(refused, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log.jsonl"
    with open(log, "wb") as file:
        file.truncate(1 << 34)
    line = refused("audit", str(log), "--model", "model", "--out", "report")
    assert "log.jsonl cannot be read (has a line of more than" in line


def test_a_file_that_sets_nothing_begins_no_run(folder, refused):
    for text in ("", "# steps = 3\n"):
        (folder / "empty.toml").write_text(text)
        assert "empty.toml sets no key" in refused("train", "empty.toml", "--run_dir", "run")
        assert "empty.toml is empty" in refused("ablate", "empty.toml", "--out", "grid")


def test_more_completions_than_memory_are_refused(refused):
    line = refused("sample", "model", "--prompt", "1+1=", "-n", "1000000000")
    assert "1,000,000,000 completions of up to" in line
    assert "and this machine has" in line


def test_verify_binaries_without_triton(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in refused("verify", "binaries")


def test_a_prompt_that_is_longer_than_any_context(folder, monkeypatch):
    monkeypatch.setattr("zerokl.engine.tasks.tokenizer.LONGEST_PROMPT", 10)
    tokenizer = Tokenizer(folder / "model", 64)
    assert len(tokenizer.encode("1" * 10, chat=False)) == 10
    with pytest.raises(ValueError, match="must have at most 10"):
        tokenizer.encode("\0" * 11, chat=False)


# --- tokenizers and templates ---

_DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def test_a_tokenizer_that_explodes(folder, refused, monkeypatch):
    monkeypatch.setattr(limits, "PROCESSOR_S", 1)
    file = folder / "model" / "tokenizer.json"
    rules = {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLING] * 60}}
    file.write_text(json.dumps(json.loads(file.read_text()) | rules))
    line = refused("sample", "model", "--prompt", "1+1=")
    assert "model/tokenizer.json does not end within 1 s" in line or "of memory" in line


def _split_by(file: Path, regex: str) -> None:
    rule = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": rule}))


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("((x+x+)+y)|.", "panic"),
        ("(1+)+$|.", "panic"),
        ("([a-z ]+)*!|.", "panic"),
        ("(", "Oniguruma error"),
        ("\\p{Nope}", "Oniguruma error"),
    ],
)
def test_a_tokenizer_whose_regex_is_bad(folder, capfd, regex, reason):
    from zerokl.cli import main

    _split_by(folder / "model" / "tokenizer.json", regex)
    assert main(["sample", "model", "--prompt", "1+1="]) == 2
    (line,) = capfd.readouterr().err.splitlines()  # with what the library itself prints
    assert reason in line
    assert "model/tokenizer.json" in line or reason != "panic"


@pytest.mark.parametrize("call", ["encode", "encode_plain", "encode_completion", "text", "decode", "pieces"])
def test_a_panic_with_one_text_only_is_a_line_that_names_the_file(folder, call, monkeypatch):
    class PanicException(BaseException):  # as pyo3 makes it
        pass

    def panic(*args, **options):
        raise PanicException("Onig: Regex search error: retry-limit-in-match over\nnote: more")

    tokenizer = Tokenizer(folder / "model", 64)
    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer._hf, name, panic)
    given = {"encode": ("1+1=", False)}.get(call, ("1+1=",) if "encode" in call else ([5, 6],))
    with pytest.raises(ValueError, match=r"tokenizer.json.* retry-limit-in-match over\)$"):
        getattr(tokenizer, call)(*given)


def test_a_real_panic_of_one_text(folder):
    """Of a regex that a run of one letter does not try."""
    _split_by(folder / "model" / "tokenizer.json", "(?:(ab)+(ab)+)+!|.")
    tokenizer = Tokenizer(folder / "model", 64)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizer.encode("ab" * 4000, chat=False)


_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (_LOOP, "does not end within 1 s"),
        ("{{ 'x' * 10 ** 11 }}", "needs more than 4 GiB of memory"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception('only tools') }}", "fails (TemplateError: only tools)"),
        ("{{ 1 // 0 }}", "fails (ZeroDivisionError"),
        ("{% if %}", "fails (TemplateSyntaxError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (RecursionError"),
    ],
    ids=["loop", "memory", "class", "refuses", "zero", "syntax", "recursion"],
)
def test_a_template_that_fails_or_does_not_end(folder, refused, monkeypatch, template, reason):
    monkeypatch.setattr(limits, "PROCESSOR_S", 1)
    (folder / "model" / "chat_template.jinja").write_text(template)
    line = refused("sample", "model", "--prompt", "1+1=", "--chat")
    assert "the chat template of model" in line
    assert reason in line


def test_control_a_template_that_is_not_used_ends_nothing(folder, capsys):
    from zerokl.cli import main

    (folder / "model" / "chat_template.jinja").write_text(_LOOP)
    assert main(["sample", "model", "--prompt", "1+1=", "--max_tokens", "2"]) == 0


def _limited(files: int, words: list[str]) -> subprocess.CompletedProcess:
    command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "x", sys.executable, "-m", "zerokl", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_HANGS_S)


@pytest.mark.parametrize("files", [8, 63])
def test_few_open_files_are_one_line(folder, training, files):
    process = _limited(files, training())
    assert process.returncode == 2
    assert (
        process.stderr == f"zerokl: open files ({files}) must be at least 64; raise the limit (ulimit -n)\n"
    )


@pytest.mark.full
def test_so_many_open_files_suffice(folder, training):
    for words in (training(workers=2), ["verify", "run", "run", "--replays", "1"], ["report", "run"]):
        assert _limited(64, words).returncode == 0
