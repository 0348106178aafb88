"""The public reports in docs/audit/log.md: each that is called named has a test that plants its fault."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LOGS = "tests/audit/hypotheses"
# Report -> the test that plants its fault and asks for its name.
PLANTED = {
    "huggingface/trl#4159": f"{_LOGS}/test_distributions.py::test_another_distribution_is_named",
    "huggingface/trl#6789": f"{_LOGS}/test_distributions.py::test_the_side_at_fault_is_named",
    "huggingface/trl#5312": f"{_LOGS}/test_weights.py::test_tensors_that_a_sync_left_out_are_named",
    "huggingface/trl#5224": f"{_LOGS}/test_tokens.py::test_turns_that_were_retokenised_are_named",
    "huggingface/trl#4772": "tests/audit/test_columns.py"
    "::test_small_differences_that_mask_every_sequence_are_said",
    "huggingface/trl#5231": "tests/audit/test_columns.py::test_what_truncated_metrics_hide_is_said",
    "huggingface/trl#6688": f"{_LOGS}/test_weights.py::test_a_merge_in_bf16_is_named",
    "huggingface/trl#6800": f"{_LOGS}/test_tokens.py::test_positions_and_padding_are_told_apart",
    "unslothai/unsloth#4502": "tests/engine/runs/checks/test_variants.py"
    "::test_dropout_is_found_in_train_mode_and_nowhere_else",
    "verl-project/verl#7904": f"{_LOGS}/test_weights.py::test_an_adapter_merged_into_merged_weights_is_named",
    "verl-project/verl#3126": "tests/audit/logs/test_log_diff.py::test_one_seed_and_two_curves",
    "verl-project/verl#7978": "tests/engine/runs/checks/test_weight_hashes.py"
    "::test_experts_that_a_sync_corrupted_are_named",
    "Tencent-Hunyuan/UniRL#208": f"{_LOGS}/test_tokens.py::test_doubled_lines_are_named",
    "NVIDIA-NeMo/RL#4018": f"{_LOGS}/test_weights.py::test_a_stale_prefix_cache_is_told_from_older_weights",
    "NVIDIA-NeMo/RL#1801": f"{_LOGS}/test_operations.py::test_a_fused_activation_in_bf16_is_named",
    "NVIDIA-NeMo/RL#2586": "tests/audit/test_changes_since.py"
    "::test_an_upgrade_that_changes_a_backend_is_named",
    "NovaSky-AI/SkyRL#1680": "tests/engine/runs/checks/test_weight_hashes.py"
    "::test_experts_that_a_sync_corrupted_are_named",
    "NovaSky-AI/SkyRL#2201": "tests/audit/figures/test_full_vocab.py"
    "::test_a_difference_in_tokens_that_were_not_drawn_is_named",
    "allenai/open-instruct#1473": f"{_LOGS}/test_tokens.py::test_lines_that_were_mixed_up_are_told_apart",
    "modelscope/ms-swift#10106": f"{_LOGS}/test_numbers.py"
    "::test_zeros_for_tokens_that_were_not_drawn_are_named",
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
    assert {report for report, says in rows.items() if says.startswith("named")} == set(PLANTED)
    assert len(PLANTED) >= 20


def test_every_planted_fault_has_its_test():
    for report, place in PLANTED.items():
        file, name = place.split("::")
        functions = {
            node.name: node
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{report}: {place}"
