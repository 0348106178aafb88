"""The command line: a function for each subcommand. Bad input gives one line on stderr and exit code 2."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import App, Parameter

from .engine.command_line import (
    error_message,
    failure_line,
    given_settings,
    spelt_out,
    toml_values,
    version_line,
)
from .engine.config import Config
from .engine.config_file import load_config
from .verify.files import check_writable
from .verify.reading import one_line

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Settings = Annotated[Config, Parameter(name="*")]
TaskOptions = Annotated[dict[str, str] | None, Parameter(name="task.options")]
TaskReward = Annotated[str, Parameter(name="task.reward")]
LogFormat = Literal[
    "auto", "zerokl", "nemo-rl", "tinker", "titanrl", "prime-rl", "skyrl", "slime", "trl", "verl"
]
Band = Literal["strict", "1%", "5%"]
CountOrAll = Annotated[int | None, Parameter(alias="-n")]
Count = Annotated[int, Parameter(alias="-n")]
_NO_SETTINGS = Config()
# Lines about differences that `zerokl ablate` prints; its page has all of them.
_MOST_EFFECTS = 12

# The exit code after Ctrl-C.
INTERRUPTED = 130
app = App(
    name="zerokl",
    help="Exact reinforcement learning of language models: "
    "the trainer's log-probabilities are bit for bit the sampler's.",
    version=version_line,
    default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main says what happened
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

    report = initialise(Path(out), task, toml_values(task_options), preset, seed)
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
    run_dir: str | None = None,
    resume: str | None = None,
    profile: int | None = None,
    settings: Settings = _NO_SETTINGS,
) -> int:
    """Train by exact on-policy reinforcement learning.

    The exit code is 1 when a bit of the trainer differs from the sampler's. The run stops before the update.

    Args:
        config: TOML file.
        preset: A configuration that comes with zerokl, instead of a file.
        run_dir: Folder of the run; it must not hold a run.
        resume: Folder of an interrupted run to go on with. Only settings that decide no bit can follow.
        profile: A step of which a torch profiler's trace is written to the folder profile of the run. It
            decides no bit.
    """
    from .engine.runs.ending import after_interrupt, after_stop, figures, next_commands
    from .engine.runs.interrupt import StoppedError
    from .engine.runs.run import resume as resume_run
    from .engine.runs.run import train as start_run
    from .engine.runs.terminal import console
    from .engine.train.monitor import MismatchError
    from .verify.ledger import LEDGER

    if resume and (config or preset or run_dir):
        raise ValueError(
            "train: --resume takes configuration and folder from the run; "
            "leave out the file, --preset and --run_dir"
        )
    if not run_dir and not resume:
        raise ValueError("train: --run_dir is missing; name the folder of the run")
    overrides, folder = given_settings(settings), Path(run_dir or resume or "")
    try:
        if resume:
            summary = resume_run(resume, overrides, profile)
        else:
            summary = start_run(load_config(config, preset, overrides), run_dir, profile)
    except MismatchError as error:
        print(f"zerokl: {one_line(str(error))}", file=sys.stderr)
        _write_report(folder)
        return 1
    except StoppedError as stopped:
        for line in after_stop(folder, stopped.step):
            console.print(line)
        raise
    except KeyboardInterrupt:
        if (folder / LEDGER).exists():
            for line in after_interrupt(folder):
                console.print(line)
        raise
    for line in figures(summary, folder):
        console.print(line)
    _write_report(folder)
    for line in next_commands(folder):
        console.print(line)
    return 0


def _write_report(folder: str | Path) -> None:
    """Write the page of a run or an ablation that has ended, and print its name. Rank 0 does it for all."""
    from .engine.commands.report.page import write_report
    from .engine.runs.terminal import console

    if not console.quiet:
        console.print(f"report {write_report([folder])}")


@app.command
def report(runs: tuple[str, ...] = (), /, *, out: str | None = None) -> int:
    """Write one HTML page about one or several runs. It needs no network and no server.

    The page has the curves of all runs, the time split of a step, the settings and where they differ, the
    ledgers and where they first differ, and every rollout with its tokens.

    Args:
        runs: Folders of runs, finished or not. The folder of an ablation stands for its runs.
        out: File to write; by default report.html in the folder, and in the working directory for several.
    """
    from .engine.commands.report.page import write_report
    from .engine.runs.terminal import console

    console.print(f"report {write_report(runs, out)}")
    return 0


@app.command
def watch(runs: tuple[str, ...] = (), /, *, port: int = 0) -> int:
    """Show the page of `zerokl report` in a browser while the runs go on. Ctrl-C ends it.

    It listens on 127.0.0.1 only. A token in the address guards it. It only reads the files of the runs.

    Args:
        runs: Folders of runs. The folder of an ablation stands for its runs.
        port: Port to listen on; 0 takes a free one.
    """
    from .engine.commands.report.watch import watch

    return watch(runs, port)


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
        TaskConfig(name=task, options=toml_values(task_options), reward=task_reward),
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
    from .engine.commands.verify import check_case, check_law, count_checks
    from .engine.runs.progress import Display
    from .engine.runs.terminal import check_table, console
    from .kernels.backend import find_device

    if case:
        checks = check_case(Path(case), find_device(device))
    else:
        with Display(count_checks(dtype), "verify", transient=True) as display:
            checks = check_law(model, dtype, sequences, longest, seed, device, display.step)
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
    from .engine.commands.verify_run import verify_run
    from .engine.runs.terminal import console

    seed = int.from_bytes(os.urandom(4)) if draw is None else draw
    holds = True
    for finding in verify_run(Path(path), replays, seed, given_settings(settings)):
        holds = holds and finding.holds
        console.print(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.what}: {finding.result}")
    console.print(f"steps to replay were drawn with --draw {seed}")
    return 0 if holds else 1


@app.command
def audit(
    target: str,
    trainer_model: str = "",
    /,
    *,
    model: str = "",
    format: LogFormat = "auto",
    sampler: str = "native",
    trainer: str = "zerokl",
    dtype: Dtype = "bfloat16",
    sampler_dtype: str = "",
    head_dtype: str = "",
    sampler_head_dtype: str = "",
    prompts: str = "",
    n: CountOrAll = None,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    weight_version: int | None = None,
    checkpoints: list[str] | None = None,
    device: Device = "auto",
    out: str | None = None,
    max_k3: float | None = None,
    max_abs: float | None = None,
    band: Band | None = None,
    summary: str = "",
) -> int:
    """Measure how far a sampler and a trainer are apart, where their bits part, and what causes it.

    With two models, the sampler computes with the first and the trainer with the second: `zerokl audit A B`.

    The exit code is 0 when every log-probability is equal (or within the given tolerances), and 1 when not.

    Args:
        target: Model folder or hub name; or a log of rollouts, a file or a folder of files.
        trainer_model: The trainer's model, to compare two checkpoints; by default the same.
        model: The model that scores a log; by default the log's own trainer column is compared.
        format: Which framework wrote the log; auto looks at its first row.
        sampler: native, hf or hf-eager (transformers' generate), vllm (stock), vllm-zerokl, or a JSONL file
            of rollouts.
        trainer: zerokl, hf (sdpa attention), hf-eager, or vllm (prompt logprobs).
        dtype: Compute dtype.
        sampler_dtype: Compute dtype of the sampler; by default the same.
        head_dtype: Dtype of the logits; by default the compute dtype.
        sampler_head_dtype: Dtype of the sampler's logits; by default head_dtype.
        prompts: Text file with one prompt in each line; by default sums such as 3+14=.
        n: Number of completions to compare; by default 64, or all of a log that has both columns.
        max_tokens: Tokens of a completion at most.
        temperature: Temperature; 0 is greedy. Of a log that says none, what it was drawn with.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens until their probabilities together reach this; 1 keeps all.
        seed: Seed of the draw.
        weight_version: From a file of rollouts, take only those drawn with this version of the weights.
        checkpoints: Other weights that may have drawn a log: a model, or a folder of models such as a run's
            checkpoints. May be given several times.
        device: Where all engines compute; auto is a GPU where there is one.
        out: Folder for audit.json and audit.html; it must not hold an audit.
        max_k3: Tolerance: k3 may be at most this, in nats a token.
        max_abs: Tolerance: no log-probability may differ by more than this.
        band: Tolerance: the geometric mean ratio of every sequence lies in 0.999 to 1.002 (strict), or within
            1% or 5% of 1.
        summary: File to which a summary in GitHub's Markdown is appended, such as $GITHUB_STEP_SUMMARY.
    """
    from .engine.commands.audit.audit import AuditConfig
    from .engine.commands.audit.bands import band_lines
    from .engine.commands.audit.command import append_summary, run_audit
    from .engine.commands.audit.page import write_page
    from .engine.commands.audit.tables import hypotheses_table, settings_table, summary_table, worst_table
    from .engine.commands.audit.verdict import verdict
    from .engine.runs.folder import finite
    from .engine.runs.progress import Stages
    from .engine.runs.terminal import console
    from .kernels.sampling_params import SamplingParams

    if not out:
        raise ValueError("audit: --out is missing; name the folder of the report")
    for name, value in (("max_k3", max_k3), ("max_abs", max_abs)):
        if value is not None and not value >= 0.0:
            raise ValueError(f"audit: {name} ({value}) must be 0 or more")
    folder = Path(out)
    if (folder / "audit.json").exists():
        raise ValueError(f"audit: {folder} already holds an audit; choose another --out")
    check_writable(folder)
    config = AuditConfig(
        model=model,
        trainer_model=trainer_model,
        sampler=sampler,
        format=format,
        trainer=trainer,
        dtype=dtype,
        sampler_dtype=sampler_dtype,
        head_dtype=head_dtype,
        sampler_head_dtype=sampler_head_dtype,
        prompts=prompts,
        max_tokens=max_tokens,
        sampling_params=SamplingParams(temperature, top_k, top_p),
        seed=seed,
        weight_version=weight_version,
        checkpoints=tuple(checkpoints or ()),
        device=device,
    )
    with Stages("audit") as stage:
        result = run_audit(target, n, config, stage)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(finite(result.report), indent=1, allow_nan=False) + "\n")
    write_page(result.report, folder / "audit.html")
    console.print(summary_table(result.report))
    if not result.equal:
        console.print(worst_table(result.report))
        if result.report.get("hypotheses", {}).get("rows"):
            console.print(hypotheses_table(result.report))
    console.print(settings_table(result.report))
    passed = result.within(max_k3, max_abs, band)
    if summary:
        append_summary(result, passed, band, Path(summary))
    for line in (verdict(result.report), *result.report["log_notes"], *band_lines(result.report, band)):
        console.say(line)
    console.print(f"report {folder / 'audit.html'}")
    return 0 if passed else 1


@app.command
def convert(file: str, out: str = "", /, *, format: LogFormat = "auto") -> int:
    """Write a log of another framework as a log of zerokl.

    zerokl loads no pickle. Of one it prints the script that does this in the framework's own environment.

    Args:
        file: Log to read, a file or a folder of files.
        out: File to write (.jsonl); it must not exist.
        format: Which framework wrote the log; auto looks at its first row.
    """
    from .engine.commands.convert import convert

    return convert(Path(file), Path(out) if out else None, format)


@app.command
def weights(a: str, b: str = "", /, *, out: str = "") -> int:
    """Hash a model tensor by tensor, or name the tensors in which two models differ.

    The exit code is 0 when all are equal, and 1 when not. An fp32 model and a bf16 one are equal when
    rounding the first gives the second.

    Args:
        a: Model folder or hub name, a safetensors file, or hashes (.json) of an engine in its own process.
        b: Another one.
        out: File for the hashes of the first, where there is no second (.json); it must not exist.
    """
    from .engine.commands.weights import compare_hashes, read_hashes, write_hashes
    from .engine.runs.terminal import console

    if bool(b) == bool(out):
        raise ValueError("weights: name a second model, or --out for the hashes of one")
    first = read_hashes(a)
    if out:
        write_hashes(first, Path(out))
        console.print(f"hashes of {len(first)} tensors in {out}")
        return 0
    differences = compare_hashes(first, read_hashes(b))
    for line in differences:
        console.print(line, markup=False)
    console.print(f"{len(differences)} of {len(first)} tensors differ")
    return 1 if differences else 0


@app.command
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

    from .engine.commands.variants import compare_ways
    from .engine.runs.terminal import console
    from .engine.tasks.tokenizer import Tokenizer
    from .kernels.backend import find_device
    from .model.checkpoint import resolve_model
    from .model.config import ModelConfig

    folder = resolve_model(model)
    tokenizer = Tokenizer(folder, ModelConfig.from_file(folder).vocab_size)
    texts = [("3+14=", "17"), ("125+7=", "132"), ("8+8=", "16, 32, 64")]
    pairs = [tuple(tokenizer.encode(text, chat=False) for text in pair) for pair in texts]
    rows = compare_ways(folder, pairs, dtype, find_device(device))
    table = Table("way", "tokens that differ", "largest difference", "first at", "what to do")
    for row in rows:
        unequal = f"{row['unequal']} of {row['tokens']}"
        table.add_row(row["way"], unequal, f"{row['max_abs']:.3g}", row["first"] or "-", row["remedy"] or "-")
    console.print(table)
    return 1 if any(row["unequal"] for row in rows) else 0


@app.command
def diff(a: str, b: str, /) -> int:
    """Name the first difference of two runs: its step, and the first quantity of this step in causal order.

    Two traces, two logs of rollouts or two files of metrics are compared as well; the framework that wrote
    them does not matter. The exit code is 0 when both are equal to the bit, and 1 when not.

    Args:
        a: Run folder, a trace that `zerokl replay` wrote (.safetensors), a log of rollouts, or a file of
            metrics (.jsonl, .json, .csv).
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
    if trace:
        check_writable(Path(trace).parent)
    overrides = given_settings(settings) | ({"workers": 1} if trace else {})
    with Replayer(Path(path), overrides) as replayer:
        for line in replayer.messages:
            console.print(line)
        result = replayer.replay(step, until, Path(trace) if trace else None)
    verdict = str(result.divergence or "every bit is the ledger's")
    console.print(f"steps {result.first} to {result.last} done again: {verdict}")
    return 1 if result.divergence else 0


@app.command
def ablate(grid: str, /, *, out: str | None = None, jobs: int = 1) -> int:
    """Run a grid of configurations and seeds, and compare the results.

    After an interruption the same command goes on where it was. It keeps the runs that have ended.

    Args:
        grid: TOML file with seeds, [set], [grid] and [variants] (engine/commands/ablation_grid.py shows one).
        out: Folder of the runs, of ablation.json and of the plots.
        jobs: Runs side by side, each in a process with its share of the threads. It changes no bit.
    """
    from .engine.commands.ablate import ablate
    from .engine.commands.ablation_effects import effect_lines
    from .engine.commands.ablation_report import result_table
    from .engine.runs.terminal import console
    from .verify.reading import one_line

    if not out:
        raise ValueError("ablate: --out is missing; name the folder of the ablation")
    report = ablate(grid, out, jobs)
    if report["combinations"]:
        console.width = max(console.width, 130)  # a narrower table would be cut
        console.print(result_table(report["combinations"]))
        for line in effect_lines(report["effects"])[:_MOST_EFFECTS]:
            console.print(one_line(line))
        console.print(f"figures {Path(out) / 'ablation.json'}, plots beside it")
        _write_report(out)
    if failures := report["failures"]:
        folder, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise ValueError(f"ablate: {folder}{more} failed: {reason}; the same command does what failed again")
    return 0


def _rank() -> str:
    """The beginning of an error line: the rank of this process, where there are several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    return f"rank {os.environ['RANK']}: " if several else ""


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command line. With ZEROKL_TRACEBACK=1 an error shows its traceback."""
    words = spelt_out(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return app(words, exit_on_error=False, print_error=False) or 0
        except cyclopts.CycloptsError as error:
            raise ValueError(error_message(error)) from error
    except Exception as error:
        if os.environ.get("ZEROKL_TRACEBACK"):
            raise
        print(f"zerokl: {_rank()}{failure_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerokl: interrupted", file=sys.stderr)
        return INTERRUPTED


def run() -> None:
    """The console script: main, and the end of the process with its exit code."""
    code = main()
    if code == INTERRUPTED:
        # Python waits at its end for the threads of executors. It never wakes one whose start Ctrl-C has
        # broken off: the thread runs, and its executor does not know of it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
