"""Time one GRPO training step of TRL's own GRPOTrainer on a CPU.

One step samples `--samples` completions of exactly `--max-new-tokens` tokens for each of `--prompts`
prompts (temperature 1, end-of-sequence never sampled), scores them with a trivial reward, and makes one
AdamW update of the dr_grpo loss without a reference model (beta = 0).

`--warmup` steps are run first and dropped, then `--steps` steps are measured, each from the end of one
optimizer step to the end of the next, so that it holds everything TRL does, data loading included.
"""

import argparse
import itertools
import json
import random
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="local Hugging Face folder: config, safetensors, tokenizer")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--bf16-mode", choices=("pure", "autocast"), default="pure", help="autocast: float32 weights")
    p.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    p.add_argument("--steps", type=int, default=6, help="measured steps")
    p.add_argument("--warmup", type=int, default=2, help="steps before them, dropped")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--prompt-chars", type=int, default=16)
    p.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--micro-batch", type=int, default=32, help="completions per forward and backward pass")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", required=True, help="JSON file to write")
    args = p.parse_args()
    args.total = args.prompts * args.samples
    args.autocast = args.dtype == "bfloat16" and args.bf16_mode == "autocast"
    return args


def load_model(args):
    # Under autocast the weights stay in float32; otherwise weights and optimizer state are in `dtype`.
    dtype = torch.float32 if args.autocast else getattr(torch, args.dtype)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=args.attention)


def time_generate(args, tokenizer, prompts, suppress):
    """model.generate alone, on a model the trainer has not touched."""
    model = load_model(args).eval()
    batch = tokenizer([p for p in prompts for _ in range(args.samples)], return_tensors="pt", return_token_type_ids=False)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        disable_compile=True,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **suppress,
    )
    times = []
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            out = model.generate(**batch, generation_config=config)
        times.append(time.perf_counter() - start)
        assert out.shape[1] == batch["input_ids"].shape[1] + args.max_new_tokens, "generation stopped early"
    return times[args.warmup :]


class StepEnds(TrainerCallback):
    """Time stamps: the start of training, then the end of every optimizer step."""

    def __init__(self):
        self.stamps = []

    def on_train_begin(self, *_, **__):
        self.stamps.append(time.perf_counter())

    on_step_end = on_train_begin


def time_training(args, tokenizer, prompts, suppress):
    """Run TRL and return (seconds per step, seconds of sampling per step)."""
    updates = args.warmup + args.steps
    target = tokenizer(prompts[0])["input_ids"][-1]

    def reward(completion_ids, **_):
        return [ids.count(target) / len(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            seed=args.seed,
            max_steps=updates,
            # TRL turns both of these on by default; bf16 here means autocast, not the type of the weights.
            bf16=args.autocast,
            gradient_checkpointing=False,
            # steps_per_generation follows the accumulation, so one generation is one update and TRL can
            # skip its extra forward pass for the old log-probabilities.
            per_device_train_batch_size=args.micro_batch,
            num_iterations=1,
            gradient_accumulation_steps=args.total // args.micro_batch,
            num_generations=args.samples,
            max_completion_length=args.max_new_tokens,
            temperature=1.0,
            generation_kwargs=suppress,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # One row per prompt and update: a single epoch, so no step pays for restarting the data loader.
        data = Dataset.from_dict({"prompt": prompts * updates})
        ends, model, sample_s = StepEnds(), load_model(args), []
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[ends]
        )
        generate = trainer._generate  # tokenizing, model.generate and decoding: TRL's sampling part

        def timed_generate(batch):
            start = time.perf_counter()
            result = generate(batch)
            sample_s.append(time.perf_counter() - start)
            assert [len(ids) for ids in result[1]] == [args.max_new_tokens] * args.total, "wrong lengths"
            return result

        trainer._generate = timed_generate
        before = model.get_input_embeddings().weight.detach().clone()
        trainer.train()
    step_s = [b - a for a, b in itertools.pairwise(ends.stamps)]
    assert len(step_s) == len(sample_s) == updates, "expected one generation per update"
    assert not torch.equal(before, model.get_input_embeddings().weight), "the weights did not move"
    return step_s[args.warmup :], sample_s[args.warmup :]


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rng = random.Random(args.seed)
    # Letters and digits that the tokenizer has as single tokens.
    alphabet = sorted(t for t in tokenizer.get_vocab() if len(t) == 1 and t.isascii() and t.isalnum())
    prompts = ["".join(rng.choices(alphabet, k=args.prompt_chars)) for _ in range(args.prompts)]
    # The end token must never be sampled: TRL cuts a completion at the first one.
    suppress = {"suppress_tokens": [tokenizer.eos_token_id]}
    generate_s = time_generate(args, tokenizer, prompts, suppress)
    step_s, sample_s = time_training(args, tokenizer, prompts, suppress)
    assert torch.get_num_threads() == args.threads, "something changed the number of threads"
    result = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        **{k: getattr(args, k) for k in ("dtype", "bf16_mode", "attention", "micro_batch", "threads")},
        "step_s": step_s,
        "sample_s": sample_s,
        "rest_s": [a - b for a, b in zip(step_s, sample_s, strict=True)],
        "generate_alone_s": generate_s,
        "tokens_per_step": args.total * args.max_new_tokens,
    }
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
