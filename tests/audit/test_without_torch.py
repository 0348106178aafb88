"""The audit of a log's two columns, its page included, loads no torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from zerokl.audit.faults.numbers.rounded_numbers import through_bfloat16, through_float16

SAMPLES = Path(__file__).parent / "log_samples"
# torch and what computes with it cannot be imported.
BLOCKED = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton", "safetensors", "vllm"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuses())
"""
RUN = """
from zerokl.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def without_torch(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("sample", ["train_data_step4.jsonl", "trl.jsonl", "prime-rl.jsonl"])
def test_a_log_is_audited_with_its_page_and_its_summary(tmp_path, sample):
    out, summary = tmp_path / "out", tmp_path / "summary.md"
    words = ["audit", str(SAMPLES / sample), "--out", str(out), "--summary", str(summary)]
    process = without_torch(RUN, *words)
    assert process.returncode in (0, 1), process.stderr
    report = json.loads((out / "audit.json").read_text())
    assert f"outcome: {report['outcome']['words']}" in process.stdout
    assert "<h2>Likely cause</h2>" in (out / "audit.html").read_text()
    assert "### zerokl audit: " in summary.read_text()
    assert report["hypotheses"]["need_a_model"] > 20


def test_an_equal_log_and_one_with_a_fault(tmp_path):
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -9.0], "temperature": 1.0}
    row["trainer_logprobs"] = row["logprobs"]
    for copies, code in ((1, 0), (8, 1)):
        log = tmp_path / f"log{copies}.jsonl"
        log.write_text((json.dumps(row) + "\n") * copies)
        process = without_torch(RUN, "audit", str(log), "--out", str(tmp_path / f"out{copies}"))
        assert process.returncode == code, process.stderr


def test_a_log_is_converted(tmp_path):
    words = ["convert", str(SAMPLES / "trl.jsonl"), str(tmp_path / "log.jsonl")]
    assert without_torch(RUN, *words).returncode == 0


def test_a_file_of_torchs_is_given_its_script_and_no_success(tmp_path):
    torch.save({"samples": []}, tmp_path / "5.pt")
    for words in (["audit", str(tmp_path / "5.pt"), "--out"], ["convert", str(tmp_path / "5.pt")]):
        process = without_torch(RUN, *words, str(tmp_path / "out"))
        assert process.returncode == 2
        assert "5.pt is a file of torch's; pip install torch to read it" in process.stderr
    assert "torch.load(" in process.stdout
    assert not (tmp_path / "out").exists()


def test_logs_are_compared_and_the_recorders_load():
    code = "from zerokl.integrations import openrlhf, proxy_answers, recorder, skyrl, verl\n" + RUN
    process = without_torch(code, "diff", *[str(SAMPLES / "trl.jsonl")] * 2)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("equal: ")


def test_control_an_import_of_torch_is_refused(tmp_path):
    process = without_torch("import zerokl.audit.audit")
    assert process.returncode == 1
    assert "torch was imported" in process.stderr
    words = ["audit", str(SAMPLES / "trl.jsonl"), "--model", "m", "--out", str(tmp_path / "out")]
    assert "torch was imported" in without_torch(RUN, *words).stderr


def test_numbers_are_rounded_to_16_bits_as_torch_rounds_them():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, s, 4096) for s in (1e-40, 1e-6, 1.0, 1e5)]).astype(np.float32)
    # Every bf16 number, and every tie between two of them.
    bits = (np.arange(1 << 17, dtype=np.uint64) << np.uint64(15)).astype(np.uint32)
    x = np.concatenate([x, bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, 3.4e38])])
    x = x[~np.isnan(x)]
    for rounding, dtype in ((through_bfloat16, torch.bfloat16), (through_float16, torch.float16)):
        expected = torch.from_numpy(x).to(dtype).float().numpy()
        assert rounding(x).tobytes() == expected.tobytes(), dtype
