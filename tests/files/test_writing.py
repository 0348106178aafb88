"""Files are replaced whole; a device or a pipe is written to, and stays."""

import os
import stat

from zerokl.files.writing import write_whole


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"all of it")
        assert os.read(reader, 100) == b"all of it"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_file_is_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "second").hardlink_to(tmp_path / "file")
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "second").read_text() == "old", "the old file is not written over"
