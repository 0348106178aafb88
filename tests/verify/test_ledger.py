"""The ledger chains what decides bits, and no bit of its file changes unseen."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.writing import manifest_damage, whole_lines, write_manifest, write_whole
from zerokl.verify.ledger import (
    Head,
    Ledger,
    Line,
    digest,
    digest_ids,
    read_ledger,
    tree_of,
)

from tests.helpers import property_settings, randn


def _head(**changes) -> Head:
    tree = tree_of([("a", b"three zeros"), ("b", b"two ones")])
    fields = {
        "settings": {"seed": 1},
        "seed": 1,
        "data": "d",
        "weights": tree.root,
        "names": ["a", "b"],
        "leaves": tree.leaves,
        "environment": {"torch": "2"},
    }
    return Head(**fields | changes)


def _line(step: int, scale: float = 1.0) -> Line:
    tree = tree_of([("a", b"%d" % step), ("b", b"two ones")])
    return Line(
        step,
        {"seed": 1, "step": step},
        {"tokens": digest_ids([[step]]), "gradient": tree.root},
        {"gradient": tree.leaves},
        step + 1,
        {"scale": scale},
    )


def _write(path, head: Head, steps: int = 4, scale: float = 1.0) -> str:
    ledger = Ledger(path, head)
    for step in range(steps):
        ledger.append(_line(step, scale))
    ledger.resumed(steps, {"torch": "3"})
    ledger.close()
    return ledger.chain


def test_what_is_written_is_read(tmp_path):
    chain = _write(tmp_path / "l", _head())
    history = read_ledger(tmp_path / "l").whole()
    assert (history.chain, len(history.lines)) == (chain, 4)
    assert history.resumed == [{"step": 4, "environment": {"torch": "3"}}]
    assert [history.chain_at(s) for s in (0, 4, 5)] == [history.head.chain, chain, None]
    content = (tmp_path / "l").read_bytes()
    for step, end in enumerate(history.ends):
        (tmp_path / "part").write_bytes(content[:end])
        assert len(read_ledger(tmp_path / "part").whole().lines) == step


def test_environment_and_notes_are_not_chained_and_what_decides_bits_is(tmp_path):
    chain = _write(tmp_path / "l", _head())
    assert _write(tmp_path / "m", _head(environment={"torch": "3"}), scale=2.0) == chain
    for i, change in enumerate(({"settings": {"seed": 2}}, {"seed": 2}, {"data": "e"})):
        assert _write(tmp_path / str(i), _head(**change)) != chain


@given(st.integers(0, 10**9))
@property_settings(150)
def test_any_flipped_bit_is_seen(tmp_path_factory, place):
    path = tmp_path_factory.mktemp("ledger") / "l"
    _write(path, _head())
    content = bytearray(path.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    path.write_bytes(content)
    history = read_ledger(path)
    assert history.damage or history.torn
    if history.damage:
        with pytest.raises(ValueError, match=r"^ledger: .* line \d"):
            history.whole()


def test_lines_removed_swapped_or_forged_are_seen(tmp_path):
    path = tmp_path / "l"
    _write(path, _head())
    lines, _ = whole_lines(path.read_bytes())
    forged = Ledger(tmp_path / "f", _head())
    for step in range(4):
        line = _line(step)
        line.quantities["tokens"] = digest_ids([[99]]) if step == 1 else line.quantities["tokens"]
        forged.append(line)
    forged_lines, _ = whole_lines((tmp_path / "f").read_bytes())
    for changed in (
        lines[:2] + lines[3:],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [lines[0], *lines],
        [*lines[:2], forged_lines[2], *lines[3:]],
    ):
        path.write_bytes(b"".join(changed))
        assert read_ledger(path).damage


def test_a_torn_end_is_no_damage(tmp_path):
    path = tmp_path / "l"
    _write(path, _head())
    path.write_bytes(path.read_bytes() + b'{"kind": "st')
    history = read_ledger(path)
    assert (history.damage, history.torn, len(history.lines)) == (None, True, 4)


def test_a_hash_sees_dtype_shape_and_every_bit():
    x = randn(0, 4, 3)
    assert digest(x) == digest(x.clone())
    y = x.clone()
    y.view(torch.int32)[3, 2] ^= 1
    zero = torch.zeros(4, 3)
    others = [
        digest(x.view(3, 4)),
        digest(x.double()),
        digest(y),
        digest(zero),
        digest(-zero),
        digest(x, x),
    ]
    assert len({digest(x), *others}) == 7
    assert digest(x.to(torch.bfloat16)) != digest(x.to(torch.float16))
    assert digest(np.float32(1.0)) != digest(np.float64(1.0))
    assert digest_ids([[1], [2, 3]]) != digest_ids([[1, 2], [3]])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_whole(tmp_path / "x", b"old")

    def full(fd):
        raise OSError("no space left")

    monkeypatch.setattr("zerokl.files.writing.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("how", ["flip", "short", "missing", "foreign", "manifest", "none"])
def test_a_manifest_names_what_was_changed(tmp_path, how):
    (tmp_path / "in").mkdir()
    victim, manifest = tmp_path / "in" / "a", tmp_path / "manifest.json"
    victim.write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"6")
    write_manifest(tmp_path)
    assert manifest_damage(tmp_path) is None
    before = copy.copy(manifest.read_bytes())
    if how == "flip":
        victim.write_bytes(b"12344")
    elif how == "short":
        victim.write_bytes(b"1234")
    elif how == "missing":
        victim.unlink()
    elif how == "foreign":
        (tmp_path / "in" / "c").write_bytes(b"")
    elif how == "manifest":
        manifest.write_bytes(before.replace(b'"bytes": 5', b'"bytes": 6'))
    else:
        manifest.unlink()
    messages = {
        "flip": f"{victim} was altered",
        "short": f"{victim} is torn",
        "missing": f"{victim} is missing",
        "none": f"{manifest} is missing",
        "foreign": f"{tmp_path / 'in' / 'c'} is foreign",
        "manifest": f"{manifest} was altered",
    }
    assert manifest_damage(tmp_path).startswith(messages[how])
