"""Real head counts and a vocabulary of 151,936: load, sample and train one exact step within 20 GiB.

transformers writes the checkpoint, with random weights. Each case runs in a process of its own. The operating
system reports the peak memory of the process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import write_letters_reward

pytestmark = pytest.mark.slow
_VOCAB = 151_936
_SHAPES = {
    "qwen3-0.6b": (
        "Qwen3",
        dict(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
    ),
    "qwen2.5-0.5b": (
        "Qwen2",
        dict(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
        ),
    ),
}
_STEP = """
import json, sys
import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.run import train
from zerokl.engine.train.performance import peak_memory_bytes
model, run, dtype = sys.argv[1:]
overrides = {
    "model": model,
    "dtype": dtype,
    "steps": "1",
    "prompts": "2",
    "num_generations": "2",
    "micro_batch": "1",
    "virtual_shards": "2",
    "sampling.max_tokens": "4",
    "evaluation.every": "0",
    "task.reward": "letters_reward:reward",
}
summary = train(load_config(None, None, overrides), run)
print(json.dumps({"unequal": summary.tokens_unequal, "tokens": summary.tokens,
                  "peak_gib": peak_memory_bytes(torch.device("cpu")) / 2**30}))
"""


def _write_model(folder: Path, family: str, shape: dict) -> None:
    import torch
    import transformers
    from zerokl.engine.tasks.tokenizer import character_tokenizer

    config = getattr(transformers, f"{family}Config")(
        vocab_size=_VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        **shape,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    _write_model(folder, *_SHAPES[request.param])
    write_letters_reward(folder)
    return folder


_IN_CI = (("qwen2.5-0.5b", "bfloat16"),)


# The others are proofs.
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(shape, dtype, marks=() if (shape, dtype) in _IN_CI else pytest.mark.proof)
        for shape in _SHAPES
        for dtype in ("float32", "bfloat16")
    ],
    indirect=["model"],
    scope="module",
)
def test_one_exact_step_within_20_gib(model, tmp_path, dtype):
    command = [sys.executable, "-c", _STEP, str(model), str(tmp_path / "run"), dtype]
    process = subprocess.run(command, capture_output=True, text=True, cwd=model)
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["unequal"] == 0
    assert report["tokens"] >= 4
    assert report["peak_gib"] < 20, report
