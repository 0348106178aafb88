"""Time steps of exact GRPO inside TRL beside steps of TRL as it comes, in one process, turn by turn.

    .venv-trl/bin/python benchmarks/exact_trl.py

A Qwen3 with random weights draws 4 completions of at most 32 tokens for each prompt. A turn is a step of each
side, in a changing order. A time is TRL's own step_time of the turn's second step: generation, scores,
forward and backward. Prints the median of the turns for each side, the median of the ratios, the share of a
step that comparing digests of the weights takes, and the largest difference of a log-probability.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.integrations.exact_trl import ExactGRPOTrainer
from zerokl.integrations.transformers import ExactModel

GENERATIONS, TOKENS = 4, 32
MODES = {"fp32": {}, "bf16 over fp32": {"bf16": True}}


def make_trainer(
    trainer_class: type[GRPOTrainer], model: Path, hidden_size: int, prompts: int, mode: str
) -> GRPOTrainer:
    """A trainer whose train() makes two steps."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=5,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=4096,  # so that a stop token is rare, and completions are long
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    options = dict(bf16=False, gradient_checkpointing=False, use_cpu=True) | MODES[mode]
    arguments = GRPOConfig(
        output_dir=str(model),
        per_device_train_batch_size=prompts * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return trainer_class(
        Qwen3ForCausalLM(config),
        lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i * 7}=" for i in range(11, 75)]}),
        processing_class=tokenizer,
    )


def step_s(trainer: GRPOTrainer) -> float:
    """The seconds of the second of two steps."""
    trainer.train()
    return [row["step_time"] for row in trainer.state.log_history if "step_time" in row][-1]


def timed(function, spent: list[float]):
    """The function, which adds its seconds to spent[0]."""

    def measured(*arguments):
        start = time.perf_counter()
        result = function(*arguments)
        spent[0] += time.perf_counter() - start
        return result

    return measured


def measure(mode: str, turns: int, hidden_size: int, prompts: int, spent: list[float]) -> str:
    """The line of a mode. spent[0]: the seconds that digests have taken."""
    times: dict[str, list[float]] = {"exact": [], "plain": []}
    whole = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        exact, plain = (
            make_trainer(trainer_class, Path(folder), hidden_size, prompts, mode)
            for trainer_class in (ExactGRPOTrainer, GRPOTrainer)
        )
        steps = {"exact": timed(partial(step_s, exact), whole), "plain": partial(step_s, plain)}
        spent[0] = 0.0
        for turn in range(turns):
            for name in sorted(steps, reverse=bool(turn % 2)):
                times[name].append(steps[name]())
    size = sum(p.numel() for p in exact.model.parameters())
    rows = [row for row in exact.state.log_history if "completions/mean_length" in row]
    largest = max(row["sampling/sampling_logp_difference/max"] for row in rows)
    ratios = [a / b for a, b in zip(times["exact"], times["plain"], strict=True)]
    return (
        f"{mode}, {size:,} parameters: exact {statistics.median(times['exact']):.2f} s, "
        f"plain {statistics.median(times['plain']):.2f} s, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) of {turns} turns; digests {spent[0] / whole[0]:.1%}; "
        f"largest difference {largest}; mean length {rows[-1]['completions/mean_length']:.1f}"
    )


def main() -> None:
    """Print a line for each mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=224)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    spent = [0.0]
    ExactModel._digests = timed(ExactModel._digests, spent)
    for mode in MODES:
        print(measure(mode, arguments.turns, arguments.hidden_size, arguments.prompts, spent), flush=True)


if __name__ == "__main__":
    main()
