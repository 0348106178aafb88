"""The public reports in docs/audit/log.md: each that is called named has a test that plants its fault."""

import ast
import re
from pathlib import Path

from zerokl.audit.faults import all_faults

ROOT = Path(__file__).resolve().parents[2]
# Reports that files of audit/faults/ name: tests/audit/faults/ plants each, and asks for its name.
KNOWN = {report for fault in all_faults.everything() for report in fault.known_from}
# Any other report -> the test that plants its fault and asks for its name.
PLANTED = {
    "huggingface/trl#4772": "tests/audit/test_columns.py"
    "::test_small_differences_that_mask_every_sequence_are_said",
    "huggingface/trl#5231": "tests/audit/test_columns.py::test_what_truncated_metrics_hide_is_said",
    "unslothai/unsloth#4502": "tests/engine/runs/checks/test_variants.py"
    "::test_dropout_is_found_in_train_mode_and_nowhere_else",
    "verl-project/verl#3126": "tests/audit/logs/test_log_diff.py::test_one_seed_and_two_curves",
    "verl-project/verl#7978": "tests/engine/runs/checks/test_weight_hashes.py"
    "::test_experts_that_a_sync_corrupted_are_named",
    "NVIDIA-NeMo/RL#2586": "tests/audit/test_changes_since.py"
    "::test_an_upgrade_that_changes_a_backend_is_named",
    "NovaSky-AI/SkyRL#1680": "tests/engine/runs/checks/test_weight_hashes.py"
    "::test_experts_that_a_sync_corrupted_are_named",
    "NovaSky-AI/SkyRL#2201": "tests/audit/figures/test_full_vocab.py"
    "::test_a_difference_in_tokens_that_were_not_drawn_is_named",
    "modelscope/ms-swift#6890": "tests/audit/test_audit.py::test_a_malformed_line_is_named",
    "vllm-project/vllm#51187": "tests/audit/figures/test_batch_invariance.py"
    "::test_an_engine_that_depends_on_its_company_fails_the_audit",
}


def _rows() -> dict[str, str]:
    """What docs/audit/log.md says to each report."""
    table = (ROOT / "docs" / "audit" / "log.md").read_text().split("## Twenty-five reports")[1]
    rows = re.findall(r"^\| ([\w./-]+#\d+) \| [^|]+ \| ([^|]+) \|$", table, re.M)
    return {report: says.strip() for report, says in rows}


def test_the_named_reports_are_those_that_a_test_plants():
    rows = _rows()
    assert len(rows) == 25
    assert {report for report, says in rows.items() if says.startswith("named")} == KNOWN | set(PLANTED)
    assert not KNOWN & set(PLANTED)
    assert len(KNOWN) + len(PLANTED) >= 20


def test_every_planted_fault_has_its_test():
    for report, place in PLANTED.items():
        file, name = place.split("::")
        functions = {
            node.name: node
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{report}: {place}"
