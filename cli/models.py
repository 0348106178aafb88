"""Commands about one model: sample, eval, weights, merge, variants."""

from pathlib import Path

from .app import Count, Device, Dtype, command
from .command_line import toml_values
from .config_options import TaskOptions, TaskReward
from .exit_codes import ExitCode


@command("zerokl sample runs/demo/base --prompt 3+14= --n 4")
def sample(
    model: str,
    /,
    *,
    prompt: str,
    n: Count = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_tokens: int = 64,
    seed: int = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    chat: bool = False,
    system: str = "",
) -> int:
    """Sample completions of a prompt.

    Args:
        model: Model folder or hub name.
        prompt: Text of the prompt.
        n: Number of completions.
        temperature: Temperature; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens until their probabilities together reach this; 1 keeps all.
        min_p: Keep the tokens with at least this share of the largest probability; 0 keeps all.
        max_tokens: Tokens of a completion at most.
        seed: Seed of the draw.
        dtype: Compute dtype.
        device: Where to compute; auto is a GPU where there is one.
        chat: Put the prompt through the tokenizer's chat template.
        system: System prompt before it; with chat.
    """
    from ..engine.display.terminal import console
    from ..engine.rollout.policy import load_policy

    policy = load_policy(model, dtype, device)
    rollouts = policy.sample(
        [prompt],
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        chat=chat,
        system=system,
    )
    for rollout in rollouts:
        text = policy.tokenizer.decode(rollout.completion_ids)
        console.print(f"{text!r}  logprob {float(rollout.logprobs.sum()):.4f}  {rollout.finish}")
    return 0


@command("zerokl eval runs/demo/base --task add", name="eval")
def evaluate(
    model: str,
    /,
    *,
    task: str = "add",
    task_options: TaskOptions = None,
    task_reward: TaskReward = "",
    split: str = "held_out",
    problems: int = 256,
    num_generations: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 32,
    seed: int = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> int:
    """Measure a model on a task.

    Args:
        model: Model folder or hub name.
        task: add, sort, sums, countdown, jsonl, calculator, guesses, wordle, nim, python, or your own as
            module:object.
        task_options: Arguments of the task, e.g. --task.options.max_value 49.
        task_reward: exact, numeric, math, or your own as module:function; empty is the task's own.
        split: held_out or train.
        problems: Number of problems at most.
        num_generations: Completions of each problem.
        temperature: Temperature; 0 is greedy.
        max_tokens: Tokens of a completion, or of a turn, at most.
        seed: Seed of the draws.
        dtype: Compute dtype.
        device: Where to compute; auto is a GPU where there is one.
    """
    from ..engine.config.run_config import TaskConfig
    from ..engine.display.terminal import console
    from ..engine.rollout.policy import load_policy

    policy = load_policy(model, dtype, device)
    evaluation = policy.evaluate(
        TaskConfig(name=task, options=toml_values(task_options), reward=task_reward),
        split=split,
        problems=problems,
        num_generations=num_generations,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
    )
    P, G = evaluation.rewards.shape
    measure = "mean reward" if evaluation.accuracy is None else "accuracy"
    console.print(
        f"{task} {split}: {measure} {evaluation.mean_reward:.4f} over {P} problems x {G} generations"
    )
    return 0


@command("zerokl weights runs/a/checkpoints/step-000220 runs/b/checkpoints/step-000220")
def weights(a: str, b: str = "", /, *, out: str = "") -> int:
    """Hash a model tensor by tensor, or name the tensors in which two models differ.

    The exit code is 0 when all are equal, and 1 when not. An fp32 model and a bf16 one are equal when
    rounding the first gives the second. A server of vLLM is also asked whether prefixes that it keeps are of
    these weights. It finds one that was left by an update, if this command was called before the update.

    Args:
        a: Model folder or hub name, a safetensors file, hashes (.json) of an engine in its own process, or
            the address of a server of vLLM.
        b: Another one.
        out: File for the hashes of the first, where there is no second (.json); it must not exist.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.checks.tensor_hashes import (
        compare_hashes,
        read_both,
        read_hashes,
        vocab_size,
        write_hashes,
    )
    from ..engine.runs.checks.weight_server import stale_prefix
    from ..files.http_request import is_address

    if bool(b) == bool(out):
        raise ValueError("weights: name a second model, or --out for the hashes of one")
    if out:
        first = read_hashes(a)
        write_hashes(first, Path(out))
        console.print(f"hashes of {len(first)} tensors in {out}")
        return 0
    first, second = read_both(a, b)
    differences = compare_hashes(first, second)
    for line in differences:
        console.print(line, markup=False)
    console.print(f"{len(differences)} of {len(first.keys() | second.keys())} tensors differ")
    stale = {source: stale_prefix(source, vocab_size(first)) for source in (a, b) if is_address(source)}
    for source, words in stale.items():
        console.print(f"{source}: {words or 'no prefix of other weights was found'}", markup=False)
    return ExitCode.of(not differences and not any(stale.values()))


@command("zerokl merge runs/lora/checkpoints/step-000100 models/merged --dtype bf16")
def merge(adapter: str, out: str, /, *, base: str = "", dtype: Dtype = "float32") -> int:
    """Merge a LoRA adapter into its base, and write a whole model.

    In the compute dtype of the run that trained the adapter, the weights have the bits that the run computed
    with.

    Args:
        adapter: Folder of a PEFT adapter, or a checkpoint of a run with LoRA.
        out: Folder of the model; it must not exist.
        base: Model folder or hub name of the base; empty is the one that the adapter names.
        dtype: Dtype of the model's weights.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.merge_adapter import merge_adapter

    model = merge_adapter(Path(adapter), Path(out), base, dtype)
    console.print(f"{adapter} merged into {model}: {out}")
    return 0


@command("zerokl variants MODEL --dtype bf16")
def variants(model: str, /, *, dtype: Dtype = "float32", device: Device = "auto") -> int:
    """Call a transformers model in the ways in which trainers call it, and say which of them changes bits.

    The ways are train mode, autocast, gradient checkpointing, another micro-batch, and padding on the left
    and on the right, with and without position ids. The exit code is 0 when no way changes a bit, and 1 when
    one does.

    Args:
        model: Model folder or hub name.
        dtype: Compute dtype.
        device: Where the model computes; auto is a GPU where there is one.
    """
    from rich.table import Table

    from ..engine.display.terminal import console
    from ..engine.runs.checks.variants import compare_ways, vocabulary
    from ..engine.tasks.tokenizer import Tokenizer
    from ..files.reading import read_json
    from ..kernels.backend import find_device
    from ..model.checkpoint import resolve_model

    folder = resolve_model(model)
    tokenizer = Tokenizer(folder, vocabulary(read_json(folder / "config.json")))
    texts = [("3+14=", "17"), ("125+7=", "132"), ("8+8=", "16, 32, 64")]
    pairs = [tuple(tokenizer.encode(text, chat=False) for text in pair) for pair in texts]
    rows = compare_ways(folder, pairs, dtype, find_device(device))
    table = Table("way", "tokens that differ", "largest difference", "first at", "what to do")
    for column in table.columns:
        column.overflow = "fold"  # the name of a module is looked up, so none of it is left out
    for row in rows:
        unequal = f"{row['unequal']} of {row['tokens']}"
        table.add_row(row["way"], unequal, f"{row['max_abs']:.3g}", row["first"] or "-", row["remedy"] or "-")
    console.print(table)
    return ExitCode.of(not any(row["unequal"] for row in rows))
