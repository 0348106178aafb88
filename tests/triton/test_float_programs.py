"""Our matrix products and attention have the arithmetic of vLLM's kernels, instruction by instruction.

The float instructions compared are those of the compiled kernels, which a GPU would run.
"""

from typing import Any

import pytest

from tests.triton.compiling import FLOAT_TRITONS, reports, targets

# Rows that compare ours with ours.
OTHERS = ("control", "empty buffers", "column sums", "chunks", "control of chunks")
GPUS = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(scope="module")
def all_reports() -> dict[str, Any]:
    return reports("float_programs.py", GPUS, FLOAT_TRITONS)


@pytest.fixture(params=FLOAT_TRITONS)
def triton(request) -> str:
    return request.param


@pytest.fixture
def report(triton, all_reports) -> dict[str, dict[str, int]]:
    return all_reports[triton]


def test_matrix_products_and_attention_run_vllms_float_instructions(triton, report):
    compared = {name: row for name, row in report.items() if name not in OTHERS}
    assert len(compared) == len(targets(triton, GPUS)) * (3 * 6 + 3)
    assert all(row["instructions"] > 20 for row in compared.values()), compared
    assert {name: row["differ"] for name, row in compared.items() if row["differ"]} == {}


def test_control_another_tile_fusion_or_number_of_warps_is_found(report):
    assert len(report["control"]) == 8
    assert all(report["control"].values()), report["control"]


def test_every_form_of_attention_over_chunks_has_the_float_instructions_of_the_walk(triton, report):
    """A row's bits are of the same instructions alone, shared, in training, and joined."""
    rows = report["chunks"]
    assert len(rows) == sum(3 * (5 if target == "sm_100" else 6) for target in targets(triton, GPUS))
    assert all(row["instructions"] > 50 for row in rows.values()), rows
    assert {name: row["differ"] for name, row in rows.items() if row["differ"]} == {}


def test_control_another_tile_or_join_of_chunks_is_found(report):
    assert all(report["control of chunks"].values()), report["control of chunks"]


def test_a_sum_over_an_empty_buffer_begins_with_zeros_and_is_the_same_sum(report):
    rows = report["empty buffers"].values()
    assert len(rows) == 2
    assert all(row["control"] > 0 for row in rows), rows
    assert all(row["instructions"] >= 4 and not row["differ"] for row in rows), rows


def test_one_launch_for_several_column_sums_adds_as_one_for_each(report):
    row = report["column sums"]["norms"]
    assert row["control"] > 0
    assert row["instructions"] > 20
    assert not row["differ"], row
