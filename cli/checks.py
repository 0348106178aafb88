"""Commands that check a machine or a run, or attest one: verify, attest, replay."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from ..files.writing import check_writable
from .app import Device, Dtype, app, command, listed
from .command_line import given_settings
from .config_options import NO_SETTINGS, Settings
from .exit_codes import ExitCode

if TYPE_CHECKING:
    from ..verify.difference import CheckResult

attest_app = App(
    name="attest",
    help_prologue="Example: zerokl attest runs/demo --key ~/.ssh/id_ed25519 --out B",
    **listed("attest"),
)
app.command(attest_app)
verify_app = App(name="verify", help_prologue="Example: zerokl verify runs/demo/base", **listed("verify"))
app.command(verify_app)


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
    from ..engine.display.progress import Display
    from ..engine.display.terminal import check_table, console
    from ..engine.runs.checks.mismatch_case import check_case
    from ..engine.runs.checks.verify import CHECKS, check_law
    from ..kernels.backend import find_device

    if case:
        checks = check_case(Path(case), find_device(device))
    else:
        with Display(len(CHECKS) * len(dtype), "verify", transient=True) as display:
            checks = check_law(model, dtype, sequences, longest, seed, device, display.step)
    console.print(check_table(checks))
    return ExitCode.of(all(check.holds for check in checks))


@command("zerokl verify binaries --targets sm_90", name="binaries", parent=verify_app)
def verify_binaries(*, targets: tuple[str, ...] = (), table: str | None = None, record: bool = False) -> int:
    """Compile every Triton kernel for GPUs, and check that the binaries have no atomics and no spills.

    The GPUs need not be in this machine.

    Args:
        targets: sm_80, sm_90, sm_100 or gfx942; may be given several times. All of them by default.
        table: File of registers and shared memory, by version of Triton. A binary that takes more is a fault.
        record: Write this Triton's part of the table again.
    """
    if not find_spec("triton"):
        raise ValueError("verify binaries: Triton is not installed; pip install triton (Linux only)")
    from ..engine.runs.checks.verify_binaries import verify_binaries

    return ExitCode.of(verify_binaries(targets, Path(table) if table else None, record))


@command("zerokl verify run runs/demo --replays 5", name="run", parent=verify_app)
def verify_run(
    path: str,
    /,
    *,
    replays: int = 3,
    draw: int | None = None,
    settings: Settings = NO_SETTINGS,
) -> int:
    """Check a run: the chain of its ledger, the files of its checkpoints, and some of its steps, done again.

    The exit code is 0 when all checks hold, and 1 when not. Settings that decide no bit can follow.

    Args:
        path: Run folder.
        replays: Number of steps to do again; they are drawn at random, and the last step comes on top. 0 does
            none again.
        draw: Seed of this draw; by default every call draws other steps.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.checks.verify_run import verify_run

    seed = int.from_bytes(os.urandom(4)) if draw is None else draw
    code = _show(verify_run(Path(path), replays, seed, given_settings(settings)))
    console.print(f"steps to replay were drawn with --draw {seed}")
    return code


def _show(results: Iterable["CheckResult"]) -> int:
    """Print each result when it is known. Returns the exit code."""
    from ..engine.display.terminal import console

    marks = []
    for result in results:
        marks.append(result.mark)
        console.print(f"{result.mark.value:<4}  {result.what}: {result.result}")
    return ExitCode.after(marks)


@attest_app.default
def attest(run: str, /, *, key: str, out: str, replays: int = 3) -> int:
    """Write a signed bundle of a run, whose steps others can do again: `zerokl attest verify`.

    It holds configuration, ledger, metrics, rollouts, the first model and the checkpoints that the sampled
    steps begin at. The ledger's last hash chooses the steps. Prompts and completions are in it; code of
    yours is not.

    Args:
        run: Run folder.
        key: SSH key that signs, a private one or a public one whose private key an agent holds.
        out: Folder to write; it must not exist.
        replays: Number of steps to sample, beside the last one.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.checks.attest_bundle import attest

    statement = attest(Path(run), Path(key), Path(out), replays)
    steps = ", ".join(map(str, statement["sampled"]))
    console.print(f"{out}: steps {steps} of {statement['steps']}, fingerprint {statement['fingerprint']}")
    console.print(f"digest {statement['digest']}, of the fingerprint and its machines")
    console.print(f"check it           zerokl attest verify {out}")
    return ExitCode.DONE


@command("zerokl attest verify B --signers allowed_signers", name="verify", parent=attest_app)
def attest_verify(bundle: str, /, *, signers: str = "", settings: Settings = NO_SETTINGS) -> int:
    """Check a bundle: the signature, every byte, the run, and the sampled steps, done again here.

    The exit code is 0 when all checks hold and every sampled step came out, and 1 when a check fails. Another
    kind of machine has other bits: where a step's numbers differ there and nothing else does, the code is 3.
    Settings that decide no bit can follow.

    Args:
        bundle: Folder that `zerokl attest` wrote.
        signers: File of the keys that may have signed, as ssh-keygen's allowed signers (NAME KEYTYPE KEY).
    """
    from ..engine.runs.checks.attest_check import check_bundle

    signed_by = Path(signers) if signers else None
    return _show(check_bundle(Path(bundle), signed_by, given_settings(settings)))


@command("zerokl replay runs/demo --step 12 --trace step-12.safetensors")
def replay(
    path: str,
    /,
    *,
    step: int,
    until: int | None = None,
    trace: str = "",
    update: int = 0,
    settings: Settings = NO_SETTINGS,
) -> int:
    """Do steps of a run again from the nearest checkpoint, and compare every quantity with the run's ledger.

    The exit code is 0 when all bits are the same, and 1 when not. Settings that decide no bit can follow.

    Args:
        path: Run folder.
        step: Step to do again, after the steps between the checkpoint before it and this step.
        until: Last step to do again; by default this is step.
        trace: File (.safetensors) for a record of every operation of the step; zerokl diff compares two such
            files. This sets workers = 1.
        update: Update of the step that is traced; a step has updates_per_rollout of them, from 0.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.checks.replayer import Replayer

    if trace and not trace.endswith(".safetensors"):
        raise ValueError(f"replay: --trace ({trace}) must end with .safetensors")
    if update and not trace:
        raise ValueError(f"replay: --update ({update}) chooses what is traced; give --trace FILE too")
    if trace:
        check_writable(Path(trace).parent)
    overrides = given_settings(settings) | ({"workers": 1} if trace else {})
    with Replayer(Path(path), overrides, recorded=True) as replayer:
        for line in replayer.messages:
            console.print(line)
        result = replayer.replay(step, until, Path(trace) if trace else None, update)
    verdict = str(result.difference or "every bit is the ledger's")
    console.print(f"steps {result.first} to {result.last} done again: {verdict}")
    return ExitCode.of(result.difference is None)
