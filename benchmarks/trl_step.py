"""Time one GRPO training step of TRL's own GRPOTrainer, on a CPU or a GPU.

One step samples `--num-generations` completions of exactly `--max-new-tokens` tokens for each of `--prompts`
prompts (temperature 1, end-of-sequence never sampled). It scores them with a trivial reward. It makes one
AdamW update of the dr_grpo loss without a reference model (beta = 0).

Each step waits for its turn (by_turns.py) at the end of the optimizer step before it. It is measured from
there to its own end, so the time holds everything that TRL does, data loading included. With `--what
generate` a turn is model.generate alone, on a model that no trainer has touched. With `--vllm` the samples
are vLLM's, in the same process and on the same GPU (TRL's colocate mode, with TRL's defaults).
"""

import argparse
import random
import tempfile
import time

import by_turns
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
    p.add_argument(
        "--bf16-mode", choices=("pure", "autocast"), default="pure", help="autocast: float32 weights"
    )
    p.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    p.add_argument("--what", choices=("train", "generate"), default="train")
    p.add_argument("--turns", type=int, default=8, help="steps")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--prompt-chars", type=int, default=16)
    p.add_argument("--num-generations", type=int, default=8, help="completions of each prompt")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--micro-batch", type=int, default=32, help="completions per forward and backward pass")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--vllm", action="store_true", help="sample with vLLM instead of model.generate")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    args.total = args.prompts * args.num_generations
    args.autocast = args.dtype == "bfloat16" and args.bf16_mode == "autocast"
    return args


def load_model(args):
    """The model. Its weights are in fp32 under autocast; otherwise they and the optimizer are in `dtype`."""
    dtype = torch.float32 if args.autocast else getattr(torch, args.dtype)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=args.attention)


def generate_alone(args, tokenizer, prompts, suppress):
    """model.generate, turn by turn."""
    model = load_model(args).eval()
    model = model.to(args.device)
    batch = tokenizer(
        [p for p in prompts for _ in range(args.num_generations)],
        return_tensors="pt",
        return_token_type_ids=False,
    ).to(args.device)
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
    for _ in range(args.turns):
        by_turns.wait()
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
            out = model.generate(**batch, generation_config=config)
        by_turns.answer(generate_s=time.perf_counter() - start)
        assert out.shape[1] == batch["input_ids"].shape[1] + args.max_new_tokens, "generation stopped early"


class StepTurns(TrainerCallback):
    """A turn is from the end of one optimizer step to the end of the next."""

    def __init__(self, turns_left):
        self.turns_left, self.sample_s = turns_left, []

    def on_train_begin(self, *_, **__):
        by_turns.wait()
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        (sample_s,) = self.sample_s  # there is one generation for each update
        self.sample_s.clear()
        by_turns.answer(
            step_s=now - self.start,
            sample_s=sample_s,
            trl=trl.__version__,
            transformers=transformers.__version__,
        )
        self.turns_left -= 1
        if self.turns_left:
            self.on_train_begin()


def grpo_config(args, folder, suppress):
    return GRPOConfig(
        output_dir=folder,
        use_cpu=args.device == "cpu",
        use_vllm=args.vllm,
        vllm_max_model_length=args.prompt_chars + args.max_new_tokens if args.vllm else None,
        seed=args.seed,
        max_steps=args.turns,
        # TRL turns both on by default. bf16 means autocast here, not the dtype of the weights.
        bf16=args.autocast,
        gradient_checkpointing=False,
        # steps_per_generation follows the accumulation. So one generation is one update, and TRL can skip its
        # extra forward pass for the old log-probabilities.
        per_device_train_batch_size=args.micro_batch,
        num_iterations=1,
        gradient_accumulation_steps=args.total // args.micro_batch,
        num_generations=args.num_generations,
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


def train(args, tokenizer, prompts, suppress):
    """TRL's training, one step a turn."""

    def reward(completion_ids, **_):
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        config = grpo_config(args, folder, suppress)
        # One row for each prompt and update. So there is one epoch, and no step restarts the data loader.
        data = Dataset.from_dict({"prompt": prompts * args.turns})
        steps, model = StepTurns(args.turns), load_model(args)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[steps],
        )
        generate = trainer._generate  # tokenizing, model.generate and decoding: TRL's sampling part

        def timed_generate(batch):
            start = time.perf_counter()
            result = generate(batch)
            steps.sample_s.append(time.perf_counter() - start)
            assert [len(ids) for ids in result[1]] == [args.max_new_tokens] * args.total, "wrong lengths"
            return result

        trainer._generate = timed_generate
        before = model.get_input_embeddings().weight.detach().clone()
        trainer.train()
    assert steps.turns_left == 0, "expected one generation and one update a step"
    assert not torch.equal(before, model.get_input_embeddings().weight), "the weights did not move"


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rng = random.Random(args.seed)
    # Letters and digits that the tokenizer has as single tokens.
    alphabet = sorted(t for t in tokenizer.get_vocab() if len(t) == 1 and t.isascii() and t.isalnum())
    prompts = ["".join(rng.choices(alphabet, k=args.prompt_chars)) for _ in range(args.prompts)]
    # The end token must never be sampled: TRL cuts a completion at the first one.
    end = tokenizer.eos_token_id
    suppress = {"ignore_eos": True, "logit_bias": {end: -100.0}} if args.vllm else {"suppress_tokens": [end]}
    (train if args.what == "train" else generate_alone)(args, tokenizer, prompts, suppress)
    assert torch.get_num_threads() == args.threads, "something changed the number of threads"


if __name__ == "__main__":
    main()
