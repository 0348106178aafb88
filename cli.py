"""The command line: a function for each subcommand. Bad input gives one line on stderr and exit code 2."""

import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter
from pydantic import BaseModel, ValidationError

from .engine.config import Config
from .engine.config_file import FREE_SECTIONS, check_key, load_config, validation_message

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Settings = Annotated[Config, Parameter(name="*")]
TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
Count = Annotated[int, Parameter(alias="-n")]
_NO_SETTINGS = Config()

app = App(
    name="zerokl",
    help="Exact reinforcement learning of language models: "
    "the trainer's log-probabilities are bit for bit the sampler's.",
    default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=()),
    result_action="return_value",
)
verify_app = App(name="verify")
app.command(verify_app)


@app.command
def init(
    out: str,
    /,
    *,
    task: str = "add",
    task_options: TaskOptions = None,
    preset: str = "tiny",
    seed: int = 0,
) -> int:
    """Make a small base model for a task, trained until it solves about half of the training prompts.

    Args:
        out: Folder to write; it must not exist.
        task: add, sort, countdown, or your own as module:object.
        task_options: Arguments of the task, e.g. --task.options.max_value 49.
        preset: Size of the model: tiny or small.
        seed: Seed of the weights and of the order of the examples.
    """
    from .engine.runs.init import initialise
    from .engine.runs.terminal import console

    report = initialise(Path(out), task, _toml_values(task_options), preset, seed)
    console.print(
        f"{out}: solves {report['accuracy']:.2f} of the training prompts after {report['steps']} supervised "
        f"steps; {len(report['prompts'])} of them, solved sometimes but not always, are its perfectible set"
    )
    return 0


@app.command
def train(
    config: str | None = None,
    /,
    *,
    preset: str | None = None,
    run_dir: str = "",
    resume: str = "",
    settings: Settings = _NO_SETTINGS,
) -> int:
    """Train by exact on-policy reinforcement learning.

    The exit code is 1 when a bit of the trainer differs from the sampler's. The run stops before the update.

    Args:
        config: TOML file.
        preset: A configuration that comes with zerokl, instead of a file.
        run_dir: Folder of the run; it must not hold a run.
        resume: Folder of an interrupted run to go on with. Only settings that decide no bit can follow.
    """
    from .engine.runs.run import resume as resume_run
    from .engine.runs.run import train as start_run
    from .engine.runs.terminal import console
    from .engine.train.monitor import MismatchError

    if resume and (config or preset or run_dir):
        raise ValueError(
            "train: --resume takes configuration and folder from the run; "
            "leave out the file, --preset and --run_dir"
        )
    if not run_dir and not resume:
        raise ValueError("train: --run_dir is missing; name the folder of the run")
    overrides = _given(settings)
    try:
        if resume:
            summary = resume_run(resume, overrides)
        else:
            summary = start_run(load_config(config, preset, overrides), run_dir)
    except MismatchError as error:
        print(f"zerokl: {error}", file=sys.stderr)
        return 1
    s, folder = summary, Path(run_dir or resume)
    console.print(f"reward {s.reward_first:.3f} -> {s.reward_last:.3f} (last 5 steps {s.reward_last5:.3f})")
    if s.held_out_accuracy is not None:
        console.print(f"held-out accuracy {s.held_out_accuracy:.3f}")
    unequal = f", {s.tokens_unequal} of them unequal" if s.tokens_unequal else ""
    console.print(f"mismatch {s.mismatch_max_abs} over {s.tokens} tokens{unequal}")
    console.print(f"plot {folder / 'reward.png'}\nweights {s.weights}\nfingerprint {s.fingerprint}")
    return 0


@app.command
def sample(
    model: str,
    /,
    *,
    prompt: str,
    n: Count = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_tokens: int = 64,
    seed: int = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    chat: bool = False,
) -> int:
    """Sample completions of a prompt.

    Args:
        model: Model folder or hub name.
        prompt: Text of the prompt.
        n: Number of completions.
        temperature: Temperature; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens until their probabilities together reach this; 1 keeps all.
        max_tokens: Tokens of a completion at most.
        seed: Seed of the draw.
        dtype: Compute dtype.
        device: Where to compute; auto is a GPU where there is one.
        chat: Put the prompt through the tokenizer's chat template.
    """
    from .engine.policy import load_policy
    from .engine.runs.terminal import console

    policy = load_policy(model, dtype, device)
    rollouts = policy.sample(
        [prompt],
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        chat=chat,
    )
    for rollout in rollouts:
        text = policy.tokenizer.decode(rollout.completion_ids)
        console.print(f"{text!r}  logprob {float(rollout.logprobs.sum()):.4f}  {rollout.finish}")
    return 0


@app.command(name="eval")
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
        task: add, sort, countdown, jsonl, or your own as module:object.
        task_options: Arguments of the task, e.g. --task.options.max_value 49.
        task_reward: Your own reward as module:function; empty is the task's own.
        split: held_out or train.
        problems: Number of problems at most.
        num_generations: Completions of each problem.
        temperature: Temperature; 0 is greedy.
        max_tokens: Tokens of a completion at most.
        seed: Seed of the draws.
        dtype: Compute dtype.
        device: Where to compute; auto is a GPU where there is one.
    """
    from .engine.config import TaskConfig
    from .engine.policy import load_policy
    from .engine.runs.terminal import console

    policy = load_policy(model, dtype, device)
    evaluation = policy.evaluate(
        TaskConfig(name=task, options=_toml_values(task_options), reward=task_reward),
        split=split,
        problems=problems,
        num_generations=num_generations,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
    )
    P, G = evaluation.rewards.shape
    console.print(
        f"{task} {split}: mean reward {evaluation.mean_reward:.4f} over {P} problems x {G} generations"
    )
    return 0


@verify_app.default
def verify(
    model: str | None = None,
    /,
    *,
    dtype: tuple[Dtype, ...] = ("float32", "bfloat16", "float16"),
    device: Device = "auto",
    sequences: int = 12,
    longest: int = 80,
    seed: int = 0,
    case: str = "",
) -> int:
    """Check the law on this machine: change what must not change a bit, and compare every bit.

    The exit code is 1 when a bit differs.

    Args:
        model: Model folder or hub name; by default a tiny random model. Write ./run for a folder called run.
        dtype: Compute dtypes to check; may be given several times.
        device: Where to compute; auto is a GPU where there is one.
        sequences: Number of random sequences to compare.
        longest: Tokens of the longest sequence.
        seed: Seed of the sequences.
        case: Folder of a saved mismatch (RUN/mismatch). Its rollouts are scored again, instead of the checks.
    """
    from .engine.commands.verify import check_case, check_law
    from .engine.runs.terminal import check_table, console
    from .kernels.backend import find_device

    if case:
        checks = check_case(Path(case), find_device(device))
    else:
        checks = check_law(model, dtype, sequences, longest, seed, device)
    console.print(check_table(checks))
    return 0 if all(check.holds for check in checks) else 1


@verify_app.command(name="binaries")
def verify_binaries(*, targets: tuple[str, ...] = (), record: bool = False) -> int:
    """Compile every Triton kernel for GPUs, and check that the binaries have no atomics and no spills.

    The GPUs need not be in this machine.

    Args:
        targets: sm_80, sm_90, sm_100 or gfx942; may be given several times. All of them by default.
        record: Write the table of registers and shared memory again.
    """
    from .engine.commands.verify_binaries import verify_binaries

    return verify_binaries(targets, record)


@verify_app.command(name="run")
def verify_run(
    path: str,
    /,
    *,
    replays: int = 3,
    draw: int | None = None,
    settings: Settings = _NO_SETTINGS,
) -> int:
    """Check a run: the chain of its ledger, the hashes of its checkpoints, and some of its steps, done again.

    The exit code is 0 when all checks hold, and 1 when not. Settings that decide no bit can follow.

    Args:
        path: Run folder.
        replays: Number of steps to do again; they are drawn at random.
        draw: Seed of this draw; by default every call draws other steps.
    """
    from .engine.commands.replay import verify_run
    from .engine.runs.terminal import console

    seed = int.from_bytes(os.urandom(4)) if draw is None else draw
    findings = verify_run(Path(path), replays, seed, _given(settings))
    for finding in findings:
        console.print(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.what}: {finding.result}")
    console.print(f"steps to replay were drawn with --draw {seed}")
    return 0 if all(finding.holds for finding in findings) else 1


@app.command
def audit(
    model: str,
    /,
    *,
    sampler: str = "native",
    trainer: str = "zerokl",
    dtype: Dtype = "bfloat16",
    sampler_dtype: str = "",
    head_dtype: str = "",
    sampler_head_dtype: str = "",
    prompts: str = "",
    n: Count = 64,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    weight_version: int | None = None,
    device: Device = "auto",
    out: str = "",
    max_k3: float | None = None,
    max_abs: float | None = None,
) -> int:
    """Measure how far a sampler and a trainer are apart, and name the first operation that differs.

    The exit code is 0 when every log-probability is equal (or within the given tolerances), and 1 when not.

    Args:
        model: Model folder or hub name.
        sampler: native, hf or hf-eager (transformers' generate), vllm (stock), vllm-zerokl, or a JSONL file
            of rollouts.
        trainer: zerokl, hf (sdpa attention), hf-eager, or vllm (prompt logprobs).
        dtype: Compute dtype.
        sampler_dtype: Compute dtype of the sampler; by default the same.
        head_dtype: Dtype of the logits; by default the compute dtype.
        sampler_head_dtype: Dtype of the sampler's logits; by default head_dtype.
        prompts: Text file with one prompt in each line; by default sums such as 3+14=.
        n: Number of completions to compare.
        max_tokens: Tokens of a completion at most.
        temperature: Temperature; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens until their probabilities together reach this; 1 keeps all.
        seed: Seed of the draw.
        weight_version: From a file of rollouts, take only those drawn with this version of the weights.
        device: Where all engines compute; auto is a GPU where there is one.
        out: Folder for audit.json and audit.html; it must not hold an audit.
        max_k3: Tolerance: k3 may be at most this, in nats a token.
        max_abs: Tolerance: no log-probability may differ by more than this.
    """
    from .engine.commands.audit.audit import AuditConfig
    from .engine.commands.audit.audit import audit as run_audit
    from .engine.commands.audit.page import summary_table, verdict, worst_table, write_page
    from .engine.runs.folder import finite
    from .engine.runs.terminal import console
    from .kernels.sampling_params import SamplingParams

    if not out:
        raise ValueError("audit: --out is missing; name the folder of the report")
    folder = Path(out)
    if (folder / "audit.json").exists():
        raise ValueError(f"audit: {folder} already holds an audit; choose another --out")
    result = run_audit(
        AuditConfig(
            model=model,
            sampler=sampler,
            trainer=trainer,
            dtype=dtype,
            sampler_dtype=sampler_dtype,
            head_dtype=head_dtype,
            sampler_head_dtype=sampler_head_dtype,
            prompts=prompts,
            n=n,
            max_tokens=max_tokens,
            sampling_params=SamplingParams(temperature, top_k, top_p),
            seed=seed,
            weight_version=weight_version,
            device=device,
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(finite(result.report), indent=1) + "\n")
    write_page(result.report, folder / "audit.html")
    console.print(summary_table(result.report))
    if not result.equal:
        console.print(worst_table(result.report))
    console.print(f"{verdict(result.report)}\nreport {folder / 'audit.html'}")
    return 0 if result.within(max_k3, max_abs) else 1


@app.command
def diff(a: str, b: str, /) -> int:
    """Name the first difference of two runs: its step, and the first quantity of this step in causal order.

    Two traces are compared as well. The exit code is 0 when both are equal to the bit, and 1 when not.

    Args:
        a: Run folder, or a trace that `zerokl replay` wrote (.safetensors).
        b: Another one of the same kind.
    """
    from .engine.commands.diff import diff

    return diff(Path(a), Path(b))


@app.command
def replay(
    path: str,
    /,
    *,
    step: int,
    until: int | None = None,
    trace: str = "",
    settings: Settings = _NO_SETTINGS,
) -> int:
    """Do steps of a run again from the nearest checkpoint, and compare every quantity with the run's ledger.

    The exit code is 0 when all bits are the same, and 1 when not. Settings that decide no bit can follow.

    Args:
        path: Run folder.
        step: Step to do again, after the steps between the checkpoint before it and this step.
        until: Last step to do again; by default this is step.
        trace: File (.safetensors) for a record of every operation of the step; zerokl diff compares two such
            files. This sets workers = 1.
    """
    from .engine.commands.replay import Replayer
    from .engine.runs.terminal import console

    if trace and not trace.endswith(".safetensors"):
        raise ValueError(f"replay: --trace ({trace}) must end with .safetensors")
    overrides = _given(settings) | ({"workers": 1} if trace else {})
    with Replayer(Path(path), overrides) as replayer:
        for line in replayer.messages:
            console.print(line)
        result = replayer.replay(step, until, Path(trace) if trace else None)
    verdict = str(result.divergence or "every bit is the ledger's")
    console.print(f"steps {result.first} to {result.last} done again: {verdict}")
    return 1 if result.divergence else 0


@app.command
def ablate(grid: str, /, *, out: str = "") -> int:
    """Run a grid of configurations and seeds, and compare the results.

    After an interruption the same command goes on. It keeps the runs that have ended.

    Args:
        grid: TOML file with seeds, [set], [grid] and [variants] (engine/commands/ablate.py shows one).
        out: Folder of the runs, of ablation.json and of the plots.
    """
    from .engine.commands.ablate import ablate
    from .engine.commands.ablation_report import result_table
    from .engine.runs.terminal import console

    if not out:
        raise ValueError("ablate: --out is missing; name the folder of the ablation")
    report = ablate(grid, out)
    console.width = max(console.width, 130)  # a narrower table would be cut
    console.print(result_table(report["combinations"]))
    console.print(f"report {Path(out) / 'ablation.json'}, plots beside it")
    return 0


def _given(settings: Config) -> dict[str, Any]:
    """The settings that are given on the command line, by dotted key."""
    given: dict[str, Any] = {}

    def walk(section: BaseModel, prefix: str) -> None:
        for name in section.model_fields_set:
            key, value = prefix + name, getattr(section, name)
            if isinstance(value, BaseModel):
                walk(value, f"{key}.")
            elif key in FREE_SECTIONS:
                given.update({f"{key}.{option}": _toml_value(word) for option, word in value.items()})
            else:
                given[key] = value

    walk(settings, "")
    return given


def _toml_values(options: dict[str, str] | None) -> dict[str, Any]:
    """A task's options with their values (see _toml_value)."""
    return {name: _toml_value(word) for name, word in (options or {}).items()}


def _toml_value(word: Any) -> Any:
    """A word of the command line as a TOML value, or the word itself where it is not valid TOML."""
    try:
        return tomllib.loads(f"x = {word}")["x"] if isinstance(word, str) else word
    except tomllib.TOMLDecodeError:
        return word


def _spelt_out(words: Sequence[str]) -> list[str]:
    """The words of a command line in the forms that the parser takes.

    --key true and --key false become --key=true and --key=false, the only form with a value for a flag.
    --task.options "{ a = 1 }" becomes --task.options.a=1.
    """
    result: list[str] = []
    for word in words:
        option = result[-1] if result and result[-1].startswith("--") and "=" not in result[-1] else ""
        if option and word in ("true", "false"):
            result[-1] += f"={word}"
        elif option.removeprefix("--") in FREE_SECTIONS and isinstance(table := _toml_value(word), dict):
            result[-1:] = [f"{option}.{name}={json.dumps(value)}" for name, value in table.items()]
        else:
            result.append(word)
    return result


def _message(error: cyclopts.CycloptsError) -> str:
    """What is wrong with the command line, in one line. Raises ValueError for an unknown setting."""
    if isinstance(error, cyclopts.UnknownOptionError) and _takes_settings(error):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        check_key(option.removeprefix("--").replace("-", "_"))  # its message names a renamed key's new name
    if isinstance(error.__cause__, ValidationError):
        return validation_message(error.__cause__)
    return str(error)


def _takes_settings(error: cyclopts.CycloptsError) -> bool:
    """Whether the command takes the keys of the configuration."""
    return error.command_chain is not None and error.command_chain[-1] in ("train", "replay", "run")


def _rank() -> str:
    """The beginning of an error line: the rank of this process, where there are several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    return f"rank {os.environ['RANK']}: " if several else ""


def main(argv: list[str] | None = None) -> int:
    """The entry point of the console script. With ZEROKL_TRACEBACK=1 an error shows its traceback."""
    words = _spelt_out(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return app(words, exit_on_error=False, print_error=False) or 0
        except cyclopts.CycloptsError as error:
            raise ValueError(_message(error)) from error
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("ZEROKL_TRACEBACK"):
            raise
        print(f"zerokl: {_rank()}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerokl: interrupted", file=sys.stderr)
        return 130
