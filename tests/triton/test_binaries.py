"""The kernels, compiled for GPUs that need not be here, have no atomics, no spills and the recorded size."""

import re
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from zerokl import kernels
from zerokl.cli import main
from zerokl.engine.runs.checks import verify_binaries
from zerokl.kernels.compiled_cases import configurations
from zerokl.verify import binaries
from zerokl.verify.binaries import TARGETS, Binary

from tests.triton.ahead_of_time import TABLE
from tests.triton.compiling import ONE_IN, TRITONS, reports, some_configurations, targets


@pytest.fixture(scope="module")
def all_reports() -> dict[str, Any]:
    return reports("ahead_of_time.py", TARGETS)


@pytest.fixture(params=TRITONS)
def triton(request) -> str:
    return request.param


@pytest.fixture
def report(triton, all_reports) -> dict[str, Any]:
    return all_reports[triton]


def test_every_binary_is_free_of_atomics_and_spills_and_as_recorded(triton, report):
    built = targets(triton, TARGETS)
    assert report["binaries"] == sum(len(some_configurations(target)) for target in built) > 500 // ONE_IN
    assert report["faults"] == []
    assert "not compared" not in report["compared"], "the table must have each Triton that is tested"


def test_the_boxes_that_the_compiler_chose_break_no_rule_of_tma(report):
    count, broken = report["tensor maps"]
    assert count > 100 // ONE_IN
    assert broken == []


def test_keys_in_pages_have_two_buffers_and_with_three_stages_one(report):
    assert report["buffers"].pop("control") == 1
    assert min(report["buffers"].values()) >= 2


def test_control_an_atomic_addition_is_found(report):
    assert {line.split(":")[0] for line in report["atomic"]} == {
        f"atomic on {t}" for t in ("sm_80", "sm_90", "sm_100", "gfx942")
    }
    assert all("atomic instructions" in line for line in report["atomic"])


def test_control_a_spill_and_a_regression_are_found(report):
    assert [line.split(":")[1] for line in report["spill"]] == [
        " 16 bytes of local memory a thread; registers spill"
    ]
    assert len(report["regression"]) == 1
    assert "recorded" in report["regression"][0]


def test_control_another_order_or_fusion_changes_the_float_program(report):
    assert report["same"] == 0
    assert report["unfused"] > 0
    assert report["warps"] > 0


def test_float_instructions_are_those_of_vllms_kernels(report):
    different = {name for name, lines in report["vllm"].items() if lines}
    controls = {name for name in report["vllm"] if name.startswith("control: ")}
    assert (len(report["vllm"]), len(controls)) == (3 * 12 + 4, 7)
    assert different == controls


def test_silu_divides_and_exponentiates_as_cuda_does(report):
    assert "div.rn.f32" in report["silu"]
    assert not [op for op in report["silu"] if op.startswith(("div.full", "div.approx", "rcp."))]


def test_every_kernel_that_is_launched_is_compiled():
    folder = Path(kernels.__file__).parent
    launched = {
        name.strip("_")
        for f in folder.glob("*_triton*.py")
        for name in re.findall(r"launch\(\s*(_\w+)", f.read_text())
    }
    assert len(launched) > 5
    assert launched <= {name.rsplit(": ", 1)[1] for name, _ in configurations()}


def test_every_launch_of_a_model_run_is_compiled():
    for triton, report in reports("launches.py", TARGETS).items():
        assert report["launches"] > 1000
        assert report["missing"] == [], triton
        # Six shapes of heads in three dtypes. Where a model has one dtype, the sparse one still has three.
        assert report["heads"] == (18 if ONE_IN == 1 else 9) * len(targets(triton, TARGETS))
        # control: two kernels for each would be missing
        assert report["without the attention's backward"] == 2 * report["heads"]
        # Only Hopper and later have the tensor memory accelerator.
        assert report["descriptors"] > 1000 // ONE_IN or "sm_90" not in targets(triton, TARGETS)
        assert report["broken"] == [], triton


def test_an_interpreting_process_refuses_to_compile(capsys):
    assert main(["verify", "binaries"]) == 2
    assert "TRITON_INTERPRET (1) must be unset" in capsys.readouterr().err


def test_verify_binaries_compiles_two_at_once_and_says_how_far_it_is(monkeypatch, capsys):
    both = Barrier(2)

    def compile_launch(number: int, target: str) -> int:
        both.wait(60)  # control: it raises where one waits for the other
        return number

    def inspect(name: str, target: str, number: int) -> Binary:
        return Binary(name, target, number, 0, 0, 0)

    launches = [("rms_norm: fwd", (1,)), ("rms_norm: bwd", (2,))]
    monkeypatch.setattr(verify_binaries, "INTERPRETED", False)
    monkeypatch.setattr(verify_binaries, "configurations", lambda target: iter(launches))
    monkeypatch.setattr(verify_binaries.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(binaries, "compile_launch", compile_launch)
    monkeypatch.setattr(binaries, "inspect", inspect)
    built = verify_binaries.build(("sm_80", "sm_90"))
    places = [(target, n, name) for target in ("sm_80", "sm_90") for name, (n,) in launches]
    assert [(b.target, b.registers, b.name) for b in built] == places
    steps = [f"{target} {n}/2  {name}\n" for target, n, name in places]
    assert re.sub(r", \d+:\d\d left", "", capsys.readouterr().out) == "".join(steps)


def test_a_table_is_written_as_it_was_read(tmp_path):
    tables = verify_binaries.read_tables(TABLE)
    verify_binaries.write_tables(tmp_path / "table.json", tables)
    assert (tmp_path / "table.json").read_bytes() == TABLE.read_bytes()
    assert len(tables) == 4


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"3.9.0": {"rms_norm: fwd": {"sm_90": [32]}}}', r"3.9.0.rms_norm: fwd.sm_90.1: "),
        ("[]", "it: "),
        ("{", "it: "),
    ],
)
def test_a_file_that_holds_no_table_is_refused(tmp_path, content, place):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ValueError, match=rf"table.json is no table of registers \({place}"):
        verify_binaries.read_tables(tmp_path / "table.json")


def test_a_record_needs_a_file(capsys):
    assert main(["verify", "binaries", "--record"]) == 2
    assert "--table FILE" in capsys.readouterr().err
