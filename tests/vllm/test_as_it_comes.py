"""vLLM as it comes, as the sampler of an ablation, draws from the weights that are trained."""

import json
from pathlib import Path

import pytest

from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

ALLOWED = tuple(range(1, 60, 2))

# It runs in a process of its own, because vLLM keeps its threads and settings for good.
CODE = """
if __name__ == "__main__":
    import sys
    from pathlib import Path

    import torch
    from zerokl.audit.engines.hf import HfEngine
    from zerokl.audit.engines.vllm import VllmEngine
    from zerokl.kernels.sampling_params import SamplingParams
    from zerokl.model.checkpoint import read_weights
    from zerokl.model.config import ModelConfig
    from zerokl.model.weights import Layout

    folder, pairs = Path(sys.argv[1]), [((3, 4, 5), (6, 7, 8, 9)), ((11,), (12, 13))]
    config = ModelConfig.from_file(folder)
    layout = Layout(config)
    vllm, hf = VllmEngine(folder, torch.float32, 64), HfEngine(folder, torch.float32)
    flat = read_weights(folder, layout)
    for seed in range(3):
        flat += 0.02 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed))
        before = vllm.score(pairs, SamplingParams())
        for engine in (vllm, hf):
            engine.load_weights(layout.checkpoint_views(flat))
        after, expected = (engine.score(pairs, SamplingParams()) for engine in (vllm, hf))
        print("RESULT", *(max(abs(a - b).max() for a, b in zip(x, expected)) for x in (after, before)))
"""


def _results(code: str, model: Path, tmp_path: Path) -> list[list[str]]:
    """The words of each line of results that a program prints."""
    (tmp_path / "program.py").write_text(code)
    process = run_python(str(tmp_path / "program.py"), str(model))
    assert process.returncode == 0, process.stderr[-3000:]
    return [line.split()[1:] for line in process.stdout.splitlines() if line.startswith("RESULT")]


def test_vllm_computes_with_the_weights_it_was_given(model: Path, tmp_path: Path):
    lines = _results(CODE, model, tmp_path)
    assert len(lines) == 3
    # Two fp32 engines differ by rounding. Other weights make a far larger difference.
    for line in lines:
        after, before = map(float, line)
        assert after < 1e-3 < 1e-2 < before


# 2,048 tokens are one forward, and 47 do not divide them.
MANY = """
if __name__ == "__main__":
    import sys
    from pathlib import Path

    import torch
    from zerokl.engine.rollout.types import GenerationParams
    from zerokl.engine.rollout.vllm.generator import VllmGenerator
    from zerokl.kernels.sampling_params import SamplingParams

    generator = VllmGenerator(Path(sys.argv[1]), torch.float32, 64)
    prompts = [[3 + (i + j) % 50 for j in range(47)] for i in range(100)]
    rollouts = generator.generate(prompts, GenerationParams(SamplingParams(), 1, 4, frozenset()), 0)
    print("RESULT", *(len(r.completion_ids) for r in rollouts))
"""


def test_more_prompts_than_one_forward_takes_are_drawn_each_with_its_seed(model: Path, tmp_path: Path):
    (lengths,) = _results(MANY, model, tmp_path)
    assert lengths == ["4"] * 100


def test_a_run_with_vllm_as_it_comes(model: Path, tmp_path: Path):
    options = {
        "--run_dir": str(tmp_path / "run"),
        "--model": str(model),
        "--steps": "3",
        "--prompts": "2",
        "--num_generations": "3",
        "--sampling.max_tokens": "6",
        "--task.options": "{ max_value = 9, train = 20, held_out = 10 }",
        "--sampler": "vllm",
        "--exact": "false",
        "--evaluation.every": "2",
        "--loss.preset": "tis",
        "--sampling.min_p": "0.05",
        "--sampling.logit_bias": "{ 5 = -3.0, 13 = -2.5, 27 = 3.0, 47 = 2.0, 59 = 3.5 }",
    }
    words = [word for option in options.items() for word in option]
    words += [word for token in ALLOWED for word in ("--sampling.allowed_token_ids", str(token))]
    process = run_python("-m", "zerokl", "train", *words)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    assert "of them unequal" in process.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    drawn = [token for line in lines for token in line["completion_ids"]]
    assert set(drawn) <= set(ALLOWED)
    differences = [
        abs(float(a) - float(b))  # minus infinity is a text
        for line in lines
        for a, b in zip(line["logprobs"], line["trainer_logprobs"], strict=True)
    ]
    assert max(differences) < 1e-3, "vLLM and the trainer have the same filters"
