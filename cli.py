"""The command line, a class for each subcommand. Bad input is one line on stderr and exit code 2."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .arguments import only_task_keys, parse


@dataclass(frozen=True)
class Init:
    """Make a small base model for a task, warm-started until it solves 30 to 60% of the training prompts.

    Options of the task follow as --task.options.NAME VALUE.
    """

    out: Positional[str]
    """Folder to write; must not exist."""
    task: str = "add"
    """add, sort, countdown, or your own as module:object."""
    preset: str = "tiny"
    """Size of the model: tiny or small."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.config import load_config
        from .engine.initialise import initialise
        from .engine.report import console

        only_task_keys("init", self, overrides)
        config = load_config(None, None, {"task.name": self.task, **overrides})
        report = initialise(Path(self.out), config.task.name, config.task.options, self.preset, self.seed)
        console.print(
            f"{self.out}: solves {report['accuracy']:.2f} of the training prompts after {report['steps']} supervised steps; "
            f"{len(report['prompts'])} of them, solved sometimes but not always, are its perfectible set"
        )
        return 0


@dataclass(frozen=True)
class Train:
    """Train by exact on-policy reinforcement learning. Any key of the configuration can follow as --section.key VALUE."""

    config: Positional[str | None] = None
    """TOML file."""
    preset: str | None = None
    """A configuration that comes with zerokl, instead of a file."""
    run_dir: str = ""
    """Folder of the run; must not hold one."""
    resume: str = ""
    """Instead: folder of an interrupted run to go on with. Only settings that decide no bit can follow."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.config import load_config
        from .engine.monitor import MismatchError
        from .engine.report import console
        from .engine.run import resume, train

        if self.resume and (self.config or self.preset or self.run_dir):
            raise ValueError("train: --resume takes configuration and folder from the run; leave out the file, --preset and --run-dir")
        if not self.run_dir and not self.resume:
            raise ValueError("train: --run-dir is missing; name the folder of the run")
        config = None if self.resume else load_config(self.config, self.preset, overrides)
        try:
            s = train(config, self.run_dir) if config else resume(self.resume, overrides)
        except MismatchError as error:
            print(f"zerokl: {error}", file=sys.stderr)
            return 1
        held = "" if s.held_out_accuracy is None else f"\nheld-out accuracy {s.held_out_accuracy:.3f}"
        console.print(f"reward {s.reward_first:.3f} -> {s.reward_last:.3f} (last 5 steps {s.reward_last5:.3f}){held}")
        verdict = f"mismatch {s.mismatch_max_abs} over {s.tokens} tokens"
        console.print(verdict if not s.tokens_unequal else f"{verdict}, {s.tokens_unequal} of them unequal")
        console.print(f"plot {Path(self.run_dir or self.resume) / 'reward.png'}\nweights {s.weights}\nfingerprint {s.fingerprint}")
        return 0


@dataclass(frozen=True)
class Sample:
    """Sample completions of a prompt."""

    model: Positional[str]
    """Model folder or hub name."""
    prompt: str
    """Text of the prompt."""
    n: Annotated[int, arg(aliases=["-n"])] = 1
    """Number of completions."""
    temperature: float = 1.0
    """Temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that reach this probability."""
    max_tokens: int = 64
    """Completion tokens at most."""
    seed: int = 0
    """Seed of the draw."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.policy import load_policy
        from .engine.report import console

        policy = load_policy(self.model, self.dtype, self.device)
        rollouts = policy.sample(
            [self.prompt], n=self.n, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, max_tokens=self.max_tokens,
            seed=self.seed, chat=self.chat,
        )  # fmt: skip
        for r in rollouts:
            console.print(f"{policy.text.decode(r.completion_ids)!r}  logprob {float(r.logprobs.sum()):.4f}  {r.finish}")
        return 0


@dataclass(frozen=True)
class Eval:
    """Measure a model on a task. Options of the task follow as --task.options.NAME VALUE."""

    model: Positional[str]
    """Model folder or hub name."""
    task: str = "add"
    """add, sort, countdown, jsonl, or your own as module:object."""
    split: str = "held_out"
    """held_out or train."""
    problems: int = 256
    """Problems at most."""
    samples: int = 1
    """Completions of each problem."""
    temperature: float = 0.0
    """Temperature; 0 is greedy."""
    max_tokens: int = 32
    """Completion tokens at most."""
    seed: int = 0
    """Seed of the draws."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.config import load_config
        from .engine.policy import load_policy
        from .engine.report import console

        only_task_keys("eval", self, overrides)
        config = load_config(None, None, {"task.name": self.task, **overrides})
        policy = load_policy(self.model, self.dtype, self.device)
        result = policy.evaluate(
            config.task, split=self.split, problems=self.problems, samples=self.samples, temperature=self.temperature,
            max_tokens=self.max_tokens, seed=self.seed,
        )  # fmt: skip
        P, G = result.rewards.shape
        console.print(f"{self.task} {self.split}: mean reward {result.mean_reward:.4f} over {P} problems x {G} samples")
        return 0


@dataclass(frozen=True)
class Verify:
    """Run the law's checks on this machine: what must not change a bit is changed, and every bit is compared."""

    model: Positional[str | None] = None
    """Model folder or hub name; without it a tiny random model is checked. "binaries": every Triton kernel is compiled and read instead."""
    dtype: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Compute dtypes to check."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""
    sequences: int = 12
    """Random sequences to compare."""
    longest: int = 80
    """Tokens of the longest one."""
    seed: int = 0
    """Seed of the sequences."""
    case: str = ""
    """Instead: score the rollouts of a saved mismatch (RUN/mismatch) again."""
    targets: tuple[str, ...] = ()
    """With binaries: what to compile for, of sm_80, sm_90, sm_100 and gfx942; all of them without it."""
    record: bool = False
    """With binaries: write the table of registers and shared memory again."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        if self.model == "binaries":
            from .engine.binaries import verify_binaries

            return verify_binaries(self.targets, self.record)
        if self.targets or self.record:
            raise ValueError("verify: --targets and --record belong to zerokl verify binaries")
        from .engine.law import check_case
        from .engine.policy import check_law
        from .engine.report import check_table, console
        from .kernels.backend import find_device

        if self.case:
            checks = check_case(Path(self.case), find_device(self.device))
        else:
            checks = check_law(self.model, self.dtype, self.sequences, self.longest, self.seed, self.device)
        console.print(check_table(checks))
        return 0 if all(c.holds for c in checks) else 1


@dataclass(frozen=True)
class Audit:
    """Measure how far a sampler and a trainer are apart, and name the operation at which they part.

    Exit code 0 when every log-probability is equal (or within the tolerances given), 1 when not.
    """

    model: Positional[str]
    """Model folder or hub name."""
    sampler: str = "native"
    """native, hf or hf-eager (transformers generate), vllm (stock), vllm-zerokl, or a JSONL file of logged rollouts."""
    trainer: str = "zerokl"
    """zerokl, hf (sdpa attention), hf-eager, or vllm (prompt logprobs)."""
    dtype: str = "bfloat16"
    """Compute dtype: float32, bfloat16 or float16."""
    sampler_dtype: str = ""
    """Compute dtype of the sampler, where it is another."""
    head_dtype: str = ""
    """Dtype of the logits, where it is another than the compute dtype."""
    sampler_head_dtype: str = ""
    """Dtype of the sampler's logits, where it is another than head_dtype."""
    prompts: str = ""
    """Text file with one prompt a line; without it, sums such as 3+14=."""
    n: Annotated[int, arg(aliases=["-n"])] = 64
    """Completions to compare."""
    max_tokens: int = 256
    """Tokens of a completion at most."""
    temperature: float = 1.0
    """Temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that reach this probability."""
    seed: int = 0
    """Seed of the draw."""
    weight_version: int | None = None
    """Of a log, only the rollouts drawn with this version of the weights."""
    device: str = "auto"
    """Of all engines: cpu, cuda, or auto: a GPU where there is one."""
    out: str = ""
    """Folder for audit.json and audit.html; must not hold an audit."""
    max_k3: float | None = None
    """Tolerance: k3 at most this, in nats a token."""
    max_abs: float | None = None
    """Tolerance: no log-probability differs by more."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.audit.audit import AuditConfig, audit
        from .engine.audit.page import summary_table, verdict, worst_table, write_page
        from .engine.report import console, finite
        from .kernels.logprob import Distribution

        if not self.out:
            raise ValueError("audit: --out is missing; name the folder of the report")
        out = Path(self.out)
        if (out / "audit.json").exists():
            raise ValueError(f"audit: {out} already holds an audit; choose another --out")
        done = audit(
            AuditConfig(
                self.model, self.sampler, self.trainer, self.dtype, self.sampler_dtype, self.head_dtype, self.sampler_head_dtype,
                self.prompts, self.n, self.max_tokens, Distribution(self.temperature, self.top_k, self.top_p), self.seed,
                self.weight_version, self.device,
            )
        )  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        (out / "audit.json").write_text(json.dumps(finite(done.report), indent=1) + "\n")
        write_page(done.report, out / "audit.html")
        console.print(summary_table(done.report))
        if not done.equal:
            console.print(worst_table(done.report))
        console.print(f"{verdict(done.report)}\nreport {out / 'audit.html'}")
        return 0 if done.within(self.max_k3, self.max_abs) else 1


@dataclass(frozen=True)
class Diff:
    """Name the first difference of two runs: the step, and in it the first quantity in causal order. Or of two traces of replay.

    Exit code 0 when they are equal to the bit, 1 when not.
    """

    a: Positional[str]
    """Run folder, or a trace (.safetensors)."""
    b: Positional[str]
    """Another of the same kind."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.differences import diff

        return diff(Path(self.a), Path(self.b))


@dataclass(frozen=True)
class Replay:
    """Do steps of a run again from the nearest checkpoint, and compare every quantity with the run's ledger.

    Exit code 0 when all bits are the same, 1 when not. Settings that decide no bit can follow as --key VALUE.
    """

    path: Positional[str]
    """Run folder."""
    step: int
    """Step to do again; steps before it are done as far as there is no checkpoint."""
    until: int | None = None
    """Go on to this step."""
    trace: str = ""
    """File (.safetensors) to record every operation of the step in; `zerokl diff` compares two. Needs workers = 1, which it sets."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.replay import Replayer
        from .engine.report import console

        if self.trace and not self.trace.endswith(".safetensors"):
            raise ValueError(f"replay: --trace ({self.trace}) must end with .safetensors")
        with Replayer(Path(self.path), {**overrides, **({"workers": "1"} if self.trace else {})}) as replayer:
            for line in replayer.said:
                console.print(line)
            done = replayer.replay(self.step, self.until, Path(self.trace) if self.trace else None)
        console.print(f"steps {done.first} to {done.last} done again: " + (str(done.divergence or "every bit is the ledger's")))
        return 1 if done.divergence else 0


@dataclass(frozen=True)
class VerifyRun:
    """Check a run: the chain of its ledger, the hashes of its checkpoints, and steps drawn at random, done again.

    Exit code 0 when all of it holds, 1 when not. Settings that decide no bit can follow as --key VALUE.
    """

    path: Positional[str]
    """Run folder."""
    replays: int = 3
    """Steps to do again."""
    draw: int | None = None
    """Seed of the choice of steps; without it, others at every call."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.replay import verify_run
        from .engine.report import console

        draw = int.from_bytes(os.urandom(4)) if self.draw is None else self.draw
        findings = verify_run(Path(self.path), self.replays, draw, overrides)
        for f in findings:
            console.print(f"{'ok  ' if f.holds else 'FAIL'}  {f.what}: {f.result}")
        console.print(f"steps to replay were drawn with --draw {draw}")
        return 0 if all(f.holds for f in findings) else 1


@dataclass(frozen=True)
class Ablate:
    """Run a grid of configurations and seeds, and compare what came out. Runs that have ended are kept when it is started again."""

    grid: Positional[str]
    """TOML file with seeds, [set], [grid] and [variants] (engine/ablate.py shows one)."""
    out: str = ""
    """Folder of the runs, of ablation.json and of the plots."""

    def run(self, overrides: dict[str, str]) -> int:
        """Run the subcommand; returns the exit code."""
        from .engine.ablate import ablate
        from .engine.ablation_report import result_table
        from .engine.report import console

        if not self.out:
            raise ValueError("ablate: --out is missing; name the folder of the ablation")
        report = ablate(self.grid, self.out)
        console.width = max(console.width, 130)  # narrower, the table's figures are cut
        console.print(result_table(report["combinations"]))
        console.print(f"report {Path(self.out) / 'ablation.json'}, plots beside it")
        return 0


_COMMANDS = {
    "init": Init, "train": Train, "sample": Sample, "eval": Eval, "verify": Verify, "audit": Audit, "diff": Diff, "replay": Replay,
    "verify-run": VerifyRun, "ablate": Ablate,
}  # fmt: skip


def _rank() -> str:
    """Which of several ranks speaks."""
    return f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script. ZEROKL_TRACEBACK=1 shows where an error comes from."""
    try:
        command, overrides = parse(sys.argv[1:] if argv is None else argv, _COMMANDS, __doc__)
        return command.run(overrides)
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("ZEROKL_TRACEBACK"):
            raise
        print(f"zerokl: {_rank()}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerokl: interrupted", file=sys.stderr)
        return 130
