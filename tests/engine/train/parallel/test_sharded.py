"""Weights that FSDP shards: gradient, norm, clipped updates, moments and ledger are those of one process."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.run_config import ParallelConfig
from zerokl.engine.train.parallel.pieces import parts_of
from zerokl.engine.train.parallel.spread import _overlap
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.weights import Layout

from tests.engine.train.parallel.zero_process import CONFIG
from tests.forked import run_ranks
from tests.helpers import needs_gpus, randn


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    layout, folder = Layout(CONFIG), tmp_path_factory.mktemp("model") / "model"
    flat = torch.zeros(layout.numel)
    for i, view in enumerate(layout.checkpoint_views(flat).values()):
        view.copy_(randn(i, *view.shape, scale=0.1))
    write_checkpoint(folder, layout, flat)
    return folder


@pytest.mark.parametrize(
    ("ranks", "dtype", "device"),
    [
        (2, "float16", "cpu"),
        pytest.param(4, "bfloat16", "cpu", marks=pytest.mark.full),
        pytest.param(1, "float32", "cpu", marks=pytest.mark.full),
        pytest.param(8, "float32", "cpu", marks=pytest.mark.proof),
        pytest.param(1, "bfloat16", "cuda", marks=needs_gpus(1)),
        pytest.param(2, "float16", "cuda", marks=needs_gpus(2)),
    ],
)
def test_updates_are_those_of_one_process(folder, tmp_path, ranks, dtype, device):
    """The faults are planted in the same processes: other orders of the ranks' sum, and of the rounds'."""
    script = Path(__file__).with_name("sharded_process.py")
    output = run_ranks(ranks, [str(script), str(folder), dtype, device], tmp_path)
    (printed,) = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert printed["threads of gloo"] == [], "one of them may abort a process that has done its work"
    reports = printed["ranks"]
    assert len(reports) == ranks
    for report in reports:
        # FSDP pads a Parameter whose rows the ranks do not divide.
        assert 0 <= report["equal"].pop("persistent bytes") <= (1 << 13 if ranks == 8 else 0)
        assert not any(report["equal"].values()), report["equal"]
    for control in ("plain sum", "accumulated") if ranks > 1 else ("accumulated",):
        # Two rounds or two ranks have one sum, in whatever order it is taken.
        expected = ranks > 2 if control == "plain sum" else 16 // ranks > 2
        assert (sum(report[control]["gradient"] for report in reports) > 0) == expected, control


@pytest.mark.full
def test_a_run_leaves_no_thread_of_gloo(config, tmp_path):
    """The control looks while there is a process group."""
    plain = config(steps=1, parallel=ParallelConfig(engine="fsdp"))
    (tmp_path / "config.toml").write_text(to_toml(plain))
    (tmp_path / "watched.py").write_text(_WATCHED)
    run_ranks(2, ["watched.py", "train", "config.toml", "--run_dir", str(tmp_path / "run")], tmp_path)
    for rank in "01":
        during, after = json.loads((tmp_path / rank).read_text())
        assert (len(during), after) == (3, [])


_WATCHED = """
import json
import os
import torch.distributed as dist
from tests.engine.train.parallel.gloo import gloo_threads
from zerokl.cli import run

end, counts = dist.destroy_process_group, []
def watched():
    counts.append(gloo_threads())
    end()
dist.destroy_process_group = watched
try:
    run()
except SystemExit as ended:
    assert not ended.code, ended.code
with open(os.environ["RANK"], "w") as file:
    json.dump([*counts, gloo_threads()], file)
"""


@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from((1, 2, 4, 8, 16)))
def test_the_pieces_of_all_ranks_are_what_fsdp_cuts(layers, vocabulary, size):
    layout = Layout(
        type(CONFIG).from_dict(CONFIG.raw | {"num_hidden_layers": layers, "vocab_size": vocabulary})
    )
    flat = torch.arange(layout.numel)
    views = layout.checkpoint_views(flat)
    for rank in range(size):
        for part in parts_of(layout.trained, rank, size):
            chunks = views[part.name].chunk(size)
            piece = chunks[rank] if rank < len(chunks) else views[part.name][:0]
            assert torch.equal(flat[part.start : part.stop], piece.reshape(-1))
            assert len(range(*part.rows.indices(len(views[part.name])))) == len(piece)


ranges = st.lists(st.integers(0, 60), max_size=12).map(
    lambda cuts: list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


@given(ranges, ranges)
def test_what_two_lists_of_ranges_have_in_common(one, other):
    elements = [i for a, b in one for i in range(a, b)]
    common = {i for a, b in other for i in range(a, b)}
    places = [i for a, b in _overlap(one, other) for i in range(a, b)]
    assert [elements[i] for i in places] == [i for i in elements if i in common]
