"""Inputs that never end, or are no files, are refused at once; nothing but files/inputs.py opens any."""

import ast
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from zerokl.files import inputs
from zerokl.files.inputs import InputError, append_text, input_lines, open_input, read_bytes, read_text
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.test_floors import FLOORS

# Programs of their own, which import nothing of zerokl; they are given files that zerokl has written.
PROGRAMS = ("engine/tasks/try_tokenizer.py",)
# What opens a file for reading, and readers of other libraries that are given a name: where each is allowed.
READERS = {
    "read_text": ("engine/processes/keeper.py",),  # the kernel's list of children
    "read_bytes": (),
    "safe_open": ("model/weight_files.py",),  # after check_input
    "load_file": (),
    "fdopen": (),
    "ParquetFile": ("audit/formats/lines.py",),  # after check_input
    "torch.load": ("audit/frameworks/slime.py",),  # after check_input
    "torch.from_file": ("engine/processes/shared_tensor.py",),  # memory of this machine's processes
    # model folders, after check_folder
    "from_pretrained": (
        "engine/tasks/tokenizer.py",
        "engine/runs/checks/variants.py",
        "engine/rollout/hf.py",
        "audit/engines/audited_model.py",
        # model folders that a plant's world has made itself
        "audit/faults/planting/sampling.py",
        "audit/faults/planting/world.py",
    ),
    # folders whose lists of names are synced or locked, shared memory, /dev/null, places that Linux is told
    "os.open": (
        "files/writing.py",
        "engine/processes/shared_tensor.py",
        "engine/display/output.py",
        "engine/tasks/confinement.py",
    ),
}
WRITING = {"w", "a", "x"}


def own_readings(source: str, file: str) -> list[str]:
    """The calls in a module that open an input by themselves, one line each."""
    readings = []
    for node in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)):
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if name in ("read_text", "read_bytes"):
            continue  # those of files/inputs.py
        places = READERS.get(name, READERS.get(last))
        if places is not None and file not in places:
            readings.append(f"{file} line {node.lineno}: {name}")
        elif last == "open" and name != "os.open":
            modes = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if _is_mode(a)]
            if not any(WRITING & set(mode) for mode in modes):
                readings.append(f"{file} line {node.lineno}: {name}")
    return readings


def _is_mode(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and set(node.value) <= set("rwxabt+")
    )


def test_no_other_module_opens_an_input():
    readings = []
    for path in sorted(p for floor in FLOORS for p in (PACKAGE_ROOT / floor).rglob("*.py")):
        file = str(path.relative_to(PACKAGE_ROOT))
        if file != "files/inputs.py" and not file.startswith(PROGRAMS):
            readings += own_readings(path.read_text(), file)
    assert readings == []


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        'open(path, "rb")',
        "path.open()",
        "path.read_bytes()",
        "safe_open(path, framework='pt')",
        "os.open(path, os.O_RDONLY)",
        "AutoTokenizer.from_pretrained(path)",
    ],
)
def test_control_a_module_that_opens_an_input_is_found(line):
    assert len(own_readings(line, "engine/rollout/policy.py")) == 1


@pytest.mark.parametrize("line", ['open(path, "ab")', "read_bytes(path)", 'open(path, mode="x")'])
def test_control_a_writer_is_none(line):
    assert own_readings(line, "engine/rollout/policy.py") == []


@pytest.fixture
def fifo(tmp_path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_what_is_no_file_is_refused_at_once(tmp_path, fifo, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, reason in (
            (fifo, "is a pipe"),
            (Path("/dev/zero"), "is a device"),
            (Path("socket"), "a socket"),
        ):
            for function in (read_bytes, open_input, lambda path: append_text(path, "x")):
                with pytest.raises(OSError, match=reason) as error:
                    function(path)
                assert error.value.filename == str(path)
        with pytest.raises(InputError, match="is a device"):
            read_bytes("/dev/zero", stream=True)


def test_a_file_has_a_largest_size(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="has 1,099,511,627,776 bytes, and 100 are read at most"):
        read_bytes(path, 100)
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == b"x" * 100
    with pytest.raises(InputError):
        read_bytes(path, 99)


def test_a_line_has_a_largest_size(tmp_path):
    (tmp_path / "lines").write_bytes(b"abc\n\nabcd")
    with open_input(tmp_path / "lines") as handle:
        assert list(input_lines(handle, "lines", 4)) == [b"abc\n", b"\n", b"abcd"]
    with open_input(tmp_path / "lines") as handle, pytest.raises(InputError, match="more than 3 bytes"):
        list(input_lines(handle, "lines", 3))


def test_a_file_of_the_system_is_read_to_its_end():
    assert b"Name:" in read_bytes("/proc/self/status")


def _write(fifo: Path, parts: list[bytes], pause_s: float) -> threading.Thread:
    def write() -> None:
        with open(fifo, "wb") as file:
            for part in parts:
                file.write(part)
                file.flush()
                time.sleep(pause_s)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_stream_is_read_to_its_end(fifo):
    writer = _write(fifo, [b"\xef\xbb\xbfa\r\n", b"b\n"], 0.05)
    assert read_text(fifo, stream=True) == "a\nb\n"
    writer.join()


def test_a_stream_ends_in_time_and_within_its_size(fifo, monkeypatch):
    monkeypatch.setattr(inputs, "STREAM_S", 0.2)
    with pytest.raises(InputError, match="did not end within"):
        read_bytes(fifo, stream=True)  # nobody writes
    writer = _write(fifo, [b"x" * 200], 0)
    with pytest.raises(InputError, match="more bytes, and 100 are read at most"):
        read_bytes(fifo, 100, stream=True)
    writer.join()
