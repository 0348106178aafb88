"""Commands about capsules, small files with which an engine is asked again: make, replay, check."""

from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from ..audit.config import AuditConfig, Band, LogFormat
from ..files.inputs import append_text
from ..files.writing import check_writable, write_whole
from .app import Count, Device, Dtype, app, command, listed
from .exit_codes import ExitCode
from .outputs import check_outputs

if TYPE_CHECKING:
    from ..audit.capsule.asked_again import Replay

capsule_app = App(
    name="capsule",
    help="Keep an engine's tokens and log-probabilities, and ask it again later.",
    help_prologue="Example: zerokl capsule check c.zkc",
    **listed("capsule"),
)
app.command(capsule_app)
# The sampler of an AuditConfig whose tokens are a capsule's.
_OF_A_CAPSULE = "capsule"


@command("zerokl capsule make vllm --model MODEL --out c.zkc", parent=capsule_app)
def make(
    source: str,
    /,
    *,
    out: str,
    model: str = "",
    trainer: str = "",
    n: Count = 32,
    format: LogFormat = "auto",
    prompts: str = "",
    max_tokens: int = 64,
    temperature: float | None = None,
    seed: int = 0,
    dtype: Dtype = "bfloat16",
    sampler_dtype: Dtype | None = None,
    device: Device = "auto",
    max_k3: float | None = None,
    max_abs: float | None = None,
    band: Band | None = None,
) -> int:
    """Write a capsule: tokens, log-probabilities, and the hashes and versions of what computed them.

    A capsule has at most 1 MB and holds no pickle.

    Args:
        source: Log of rollouts, or an engine that draws: native, hf, hf-eager, vllm, vllm-zerokl.
        out: File to write (.zkc); it must not exist.
        model: Model folder or hub name. Of a local folder, the hashes of weights and tokenizer are kept.
        trainer: Engine that scores the tokens: zerokl, hf, hf-eager, vllm. By default a log keeps its own
            trainer column, and there is none of an engine's draw.
        n: Completions to keep, the first ones of a log.
        format: Which framework wrote the log; auto looks at its first row.
        prompts: Text file with one prompt in each line, for an engine; by default sums such as 3+14=.
        max_tokens: Tokens of a completion at most, for an engine.
        temperature: Temperature of an engine's draw, by default 1. Of a log that says none, what it was drawn
            with.
        seed: Seed of an engine's draw.
        dtype: Compute dtype.
        sampler_dtype: Compute dtype of the engine that draws; by default the same.
        device: Where the engines compute; auto is a GPU where there is one.
        max_k3: Tolerance of a replay that is given none, in nats a token.
        max_abs: Tolerance of a replay that is given none, of every log-probability.
        band: Tolerance of a replay that is given none; zerokl audit has the same.
    """
    from ..audit.capsule.capsule import Bounds
    from ..audit.capsule.make_capsule import make_capsule
    from ..engine.display.progress import Stages
    from ..engine.display.terminal import console

    check_writable(Path(out).parent)
    cfg = AuditConfig(
        model=model,
        sampler=_OF_A_CAPSULE,
        n=n,
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        sampler_dtype=sampler_dtype or "",
        device=device,
    )
    bounds = Bounds(max_k3=max_k3, max_abs=max_abs, band=band)
    with Stages("capsule") as stage:
        count, size = make_capsule(source, Path(out), cfg, trainer, format, bounds, stage)
    console.print(f"capsule {out}: {count} completions, {size:,} bytes")
    return ExitCode.DONE


@command("zerokl capsule replay c.zkc --sampler vllm --trainer hf", parent=capsule_app)
def replay(
    capsule: str,
    /,
    *,
    sampler: str = "",
    trainer: str = "",
    model: str = "",
    dtype: Dtype | None = None,
    sampler_dtype: Dtype | None = None,
    device: Device = "auto",
    max_k3: float | None = None,
    max_abs: float | None = None,
    band: Band | None = None,
    summary: str = "",
    junit: str = "",
) -> int:
    """Ask a capsule's engines again, and say what has changed since: weights, versions, settings, bits.

    The exit code is 0 when every engine that was asked has the capsule's bits, or when the tolerances hold;
    and 1 when not.

    Args:
        capsule: File that zerokl capsule make wrote.
        sampler: Engine that is asked for the sampler's column. The one that drew the capsule draws again with
            its seed; another one scores its tokens.
        trainer: Engine that is asked for the trainer's column: zerokl, hf, hf-eager, vllm.
        model: Model folder or hub name; by default the capsule's.
        dtype: Compute dtype; by default the capsule's.
        sampler_dtype: Compute dtype of the sampler; by default the capsule's.
        device: Where the engines compute; auto is a GPU where there is one.
        max_k3: Tolerance: k3 may be at most this, in nats a token; without any, those of the capsule.
        max_abs: Tolerance: no log-probability may differ by more than this.
        band: Tolerance: a band of zerokl audit.
        summary: File to which a summary in GitHub's Markdown is appended, such as $GITHUB_STEP_SUMMARY.
        junit: File to write in JUnit's XML.
    """
    from ..audit.capsule.asked_again import replay
    from ..audit.capsule.capsule import read_capsule
    from ..audit.conclusion.outcome import Tolerances
    from ..engine.display.progress import Stages

    check_outputs(summary, junit)
    read = read_capsule(Path(capsule))
    then = read.header.dtypes
    given = dtype or then.get("dtype", "bfloat16")
    cfg = AuditConfig(
        model=model or read.header.model,
        sampler=_OF_A_CAPSULE,
        dtype=given,
        head_dtype="" if dtype else then.get("head_dtype", ""),
        sampler_dtype=sampler_dtype or ("" if dtype else then.get("sampler_dtype", "")),
        sampler_head_dtype="" if dtype or sampler_dtype else then.get("sampler_head_dtype", ""),
        device=device,
    )
    tolerances = Tolerances(max_k3, max_abs, band)
    with Stages("capsule") as stage:
        result = replay(read, capsule, sampler, trainer, cfg, tolerances, stage)
    return _show(result, summary, junit)


@command("zerokl capsule check captures/*.zkc", parent=capsule_app)
def check(capsules: tuple[str, ...] = (), /, *, summary: str = "", junit: str = "") -> int:
    """Check that capsules are whole, and that their own two columns lie within their own tolerances.

    It needs no model and no torch. The exit code is 1 when a tolerance does not hold, and 2 for a file that
    is no capsule.

    Args:
        capsules: Files that zerokl capsule make wrote.
        summary: File to which a summary in GitHub's Markdown is appended.
        junit: File to write in JUnit's XML, for one capsule.
    """
    from ..audit.capsule.asked_again import check_columns
    from ..audit.capsule.capsule import read_capsule

    if not capsules:
        raise ValueError("capsule check: name a capsule")
    if junit and len(capsules) > 1:
        raise ValueError("capsule check: --junit is of one capsule")
    check_outputs(summary, junit)
    codes = [_show(check_columns(read_capsule(Path(name)), name), summary, junit) for name in capsules]
    return max(codes)


def _show(result: "Replay", summary: str, junit: str) -> int:
    """Print a replay, and write its summary and its cases. Returns the exit code."""
    from ..audit.capsule import show
    from ..audit.junit import junit as suite
    from ..engine.display.terminal import console

    for line in show.lines(result):
        console.say(line)
    console.print(f"outcome of {result.capsule}: {result.words}")
    if summary:
        append_text(summary, show.markdown(result))
    if junit:
        write_whole(Path(junit), suite("zerokl capsule", show.cases(result)).encode())
    return ExitCode.of(result.passed)
