"""The ledger chains what decides bits, and no bit of its file changes unseen."""

import copy
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.verify import ledger
from zerokl.verify.files import hash_json, manifest_damage, whole_lines, write_manifest, write_whole
from zerokl.verify.ledger import (
    Hashing,
    Head,
    Ledger,
    Line,
    Tree,
    digest,
    digest_ids,
    hash_tree,
    read_ledger,
    tree_of,
)

from tests.helpers import property_settings, randn


def _head(**changes) -> Head:
    tree = hash_tree({"a": torch.zeros(3), "b": torch.ones(2)})
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
    tree = hash_tree({"a": torch.full((3,), float(step)), "b": torch.ones(2)})
    return Line(
        step,
        {"seed": 1, "step": step},
        {"tokens": digest_ids([[step]]), "gradient": tree.root},
        {"gradient": tree.leaves},
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


def test_a_tree_pins_a_difference_to_its_weight():
    parts = {name: randn(i, 50) for i, name in enumerate("abc")}
    changed = {name: x.clone() for name, x in parts.items()}
    changed["b"].view(torch.int32)[7] ^= 1
    x, y = hash_tree(parts), hash_tree(changed)
    assert [p == q for p, q in zip(x.leaves, y.leaves, strict=True)] == [True, False, True]
    assert x.root != y.root
    assert hash_tree(parts, changed).root not in (x.root, y.root)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write_whole(tmp_path / "x", b"old")

    def full(fd):
        raise OSError("no space left")

    monkeypatch.setattr("zerokl.verify.files.os.fsync", full)
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


@pytest.mark.parametrize("helpers", [0, 1, 5])
def test_a_tree_is_the_same_however_many_threads_hash_it(helpers, monkeypatch):
    monkeypatch.setattr(ledger, "BLOCK", 1000)
    monkeypatch.setattr(ledger, "_HELPERS", helpers)
    parts = [{f"w{i}": randn(k + i, 1000 * i % 7001 + 1) for i in range(40)} for k in (0, 100)]
    leaves = []
    for name, x in parts[0].items():
        starts = range(0, len(x), 1000)
        blocks = [digest(*(part[name][start : start + 1000] for part in parts)) for start in starts]
        leaves.append(hash_json(blocks)[:32])
    assert hash_tree(*parts) == Tree(hash_json(leaves), leaves)
    parts[1]["w20"][-1] = 9.0  # control
    assert [a == b for a, b in zip(hash_tree(*parts).leaves, leaves, strict=True)].count(False) == 1


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=6), st.integers(0, 2**32), st.integers(1, 4))
def test_a_tree_is_the_same_whoever_hashes_a_block(sizes, seed, ranks):
    """As the ranks do it: each hashes the blocks of its slice, which are neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "BLOCK", 512)
        whole = {f"w{i}": randn(seed + i, n) for i, n in enumerate(sizes)}
        blocks = [(name, [block]) for name, x in whole.items() for block in x.split(512)]
        cuts = sorted(np.random.default_rng(seed).integers(0, len(blocks) + 1, ranks - 1))
        parts = [blocks[a:b] for a, b in pairwise([0, *cuts, len(blocks)])]
        gathered = [block_digest for part in parts for block_digest in Hashing(part).digests()]
        assert tree_of(gathered) == hash_tree(whole)
        if len(blocks) > 1:
            assert tree_of(gathered[1:] + gathered[:1]) != hash_tree(whole), "control: another order"


def test_a_tree_does_not_wait_for_threads_that_are_busy():
    free = threading.Event()
    busy = [ledger._pool().submit(free.wait) for _ in range(64)]
    blocks = {"a": torch.zeros(3), "b": torch.ones(2)}
    digests = Hashing((name, [x]) for name, x in blocks.items()).digests()
    assert digests == [(name, digest(x)) for name, x in blocks.items()]
    free.set()
    assert all(task.result() for task in busy)
