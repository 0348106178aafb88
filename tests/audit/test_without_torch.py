"""The audit of a log's two columns, its page included, loads no torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
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
# Command lines, as JSON in the first argument: the exit code and the words of each, as JSON.
RUN = """
import contextlib, io, json
from zerokl.cli import main
from zerokl.integrations import openrlhf, proxy_answers, recorder, skyrl, verl
ran = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    ran.append((code, out.getvalue(), err.getvalue()))
    assert "torch" not in sys.modules
print(json.dumps(ran))
"""


def process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def without_torch(*lines: list[str]) -> list[tuple[int, str, str]]:
    """The exit code, the output and the errors of each command line."""
    ran = process(RUN, json.dumps(lines))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_logs_are_audited_converted_and_compared_without_torch(tmp_path):
    names = ("train_data_step4.jsonl", "trl.jsonl", "prime-rl.jsonl")
    outs = [(tmp_path / name, tmp_path / f"{name}.md") for name in names]
    lines = [
        ["audit", str(SAMPLES / name), "--out", str(out), "--summary", str(summary)]
        for name, (out, summary) in zip(names, outs, strict=True)
    ]
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -9.0], "temperature": 1.0}
    row["trainer_logprobs"] = row["logprobs"]
    for copies in (1, 8):
        (tmp_path / f"log{copies}.jsonl").write_text((json.dumps(row) + "\n") * copies)
        lines.append(["audit", str(tmp_path / f"log{copies}.jsonl"), "--out", str(tmp_path / str(copies))])
    lines.append(["convert", str(SAMPLES / "trl.jsonl"), str(tmp_path / "log.jsonl")])
    lines.append(["diff", *[str(SAMPLES / "trl.jsonl")] * 2])
    *audited, equal, faulty, converted, compared = without_torch(*lines)
    for (code, words, errors), (out, summary) in zip(audited, outs, strict=True):
        assert code in (0, 1), errors
        report = json.loads((out / "audit.json").read_text())
        assert f"outcome: {report['outcome']['words']}" in words
        assert "<h2>Likely cause</h2>" in (out / "audit.html").read_text()
        assert "### zerokl audit: " in summary.read_text()
        assert report["hypotheses"]["need_a_model"] > 20
    assert [x[0] for x in (equal, faulty, converted, compared)] == [0, 1, 0, 0]
    assert compared[1].startswith("equal: ")


def test_a_file_of_torchs_is_given_its_script_and_no_success(tmp_path):
    torch.save({"samples": []}, file := tmp_path / "5.pt")
    out = str(tmp_path / "out")
    audited, converted = without_torch(["audit", str(file), "--out", out], ["convert", str(file), out])
    for code, _, errors in (audited, converted):
        assert code == 2
        assert "5.pt is a file of torch's; pip install torch to read it" in errors
    assert "torch.load(" in converted[1]
    assert not (tmp_path / "out").exists()


def test_control_an_import_of_torch_is_refused(tmp_path):
    ran = process("import zerokl.audit.audit")
    assert ran.returncode == 1
    assert "torch was imported" in ran.stderr
    words = ["audit", str(SAMPLES / "trl.jsonl"), "--model", "m", "--out", str(tmp_path / "out")]
    ((_, _, errors),) = without_torch(words)
    assert "torch was imported" in errors


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
