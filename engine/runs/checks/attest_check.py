"""`zerokl attest verify BUNDLE`: is a bundle what its signer attested, and do its steps come out again?

The signature and every byte are checked first. Where they do not hold, nothing else of the bundle is looked
at. Then the bundle's run is checked as `zerokl verify run` checks any run, with the steps that its ledger
chooses. Another kind of machine has other numbers. Where numbers of a step differ and the machines do too,
the step is open: neither confirmed nor refuted. What follows from tokens is the same on all machines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....files.inputs import read_bytes
from ....files.reading import one_line, parse_json, shown
from ....files.writing import MANIFEST, manifest_damage
from ....kernels.backend import find_device
from ....verify.divergence import open_run
from ....verify.environment import DECIDES, PACKAGE_ROOT, environment
from ....verify.ledger import LedgerFile
from ..resume import run_config
from .attest_bundle import (
    CONTENTS,
    FORMAT,
    STATEMENT,
    bundle_settings,
    digest_of,
    draw_of,
    environments,
    needed_code,
    sampled_steps,
)
from .signature import SUFFIX, SignatureError, check_signature
from .verify_run import Finding, verify_run

# Of these a difference explains that a step differs.
_DECIDES = (*DECIDES, "vllm", "device")
# Quantities that follow from the tokens, whatever machine computes.
_OF_TOKENS = ("random keys", "prompts", "between_turns", "ends", "rewards", "advantages")
_REPLAY = "replay of step "
_FIELDS = {"format", "fingerprint", "digest", "steps", "replays", "sampled", "contents", "needs"}
_FIELDS |= {"environments"}


def check_bundle(bundle: Path, signers: Path | None, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a bundle. signers: who may have signed it; see check_signature. given: settings of this machine.

    Yields each finding when it is known. Raises ValueError for what is no bundle, and for settings that are
    refused.
    """
    if not (bundle / STATEMENT).is_file():
        raise ValueError(f"attest: {bundle} is no bundle: it has no {STATEMENT}")
    try:
        who = check_signature(bundle / STATEMENT, signers)
    except SignatureError as error:
        yield Finding("signature", str(error), False)
        return
    yield Finding("signature", f"by {who}", True)
    if signers is None:
        yield Finding("signer", "no --signers was given, so nobody says whose key it is", True, checked=False)
    statement = _read(bundle)
    if fault := _bytes_fault(bundle, statement):
        yield Finding("contents", fault, False)
        return
    yield Finding("contents", "every byte is the one that was signed", True)
    run = bundle / CONTENTS / "run"
    try:
        ledger = open_run(run)
        config = run_config(run, {})
    except ValueError as error:
        yield Finding("ledger", str(error), False)
        return
    if fault := _statement_fault(statement, ledger, needed_code(config)):
        yield Finding("statement", fault, False)
        return
    yield Finding("digest", f"{statement['digest']}, of the fingerprint and its machines", True)
    steps = ", ".join(map(str, statement["sampled"]))
    yield Finding("sampled steps", f"{steps}, those that the ledger's last hash chooses, and the last", True)
    if statement["needs"] and "task.directory" not in given:
        raise ValueError(
            f"attest: the run calls code that the bundle does not carry ({', '.join(statement['needs'])}); "
            "read it, and name its folder with --task.directory"
        )
    settings = bundle_settings(bundle) | dict(given)
    yield from _steps(run, statement, ledger, settings)


def _read(bundle: Path) -> dict[str, Any]:
    """The statement, whose bytes were signed. Raises ValueError for one of another format."""
    try:
        statement = parse_json(read_bytes(bundle / STATEMENT))
    except ValueError:
        statement = None
    if not isinstance(statement, dict) or statement.get("format") != FORMAT or set(statement) != _FIELDS:
        raise ValueError(f"attest: {bundle / STATEMENT} is of another format; this zerokl reads {FORMAT}")
    return statement


def _bytes_fault(bundle: Path, statement: dict[str, Any]) -> str | None:
    """The first file that is not the one that was signed."""
    allowed = {STATEMENT, STATEMENT + SUFFIX, CONTENTS}
    if foreign := sorted(p.name for p in bundle.iterdir() if p.name not in allowed):
        return f"{one_line(foreign[0])} is foreign: nobody signed it"
    contents = bundle / CONTENTS
    if damage := manifest_damage(contents):
        return damage
    if parse_json(read_bytes(contents / MANIFEST))["sha256"] != statement["contents"]:
        return f"{contents / MANIFEST} is not the one that was signed"
    return None


def _statement_fault(statement: dict[str, Any], ledger: LedgerFile, code: list[str]) -> str | None:
    """What the signer says of the run and its ledger does not."""
    replays = statement["replays"]
    if type(replays) is not int or replays < 1:
        return f"replays is {shown(replays)}"
    true = {
        "fingerprint": ledger.chain,
        "digest": digest_of(ledger),
        "steps": len(ledger.lines),
        "sampled": sampled_steps(ledger, replays),
        "needs": code,
        "environments": environments(ledger),
    }
    for name, value in true.items():
        if statement[name] != value:
            return f"{name} is {shown(statement[name])}, and the ledger's is {shown(value)}"
    return None


def _steps(
    run: Path, statement: dict[str, Any], ledger: LedgerFile, settings: dict[str, Any]
) -> Iterator[Finding]:
    """The checks of the run, and what they show together."""
    here = environment(PACKAGE_ROOT, torch.device(find_device(run_config(run, settings).device)), {})
    for first, was in ledger.starts:
        if other := _differences(here, was):
            words = f"from step {first} on another kind than this one: {'; '.join(other)}"
            yield Finding("machine", words, True, checked=False)
    same, is_open = [], []
    for finding in verify_run(run, statement["replays"], draw_of(ledger), settings):
        where = finding.divergence
        if (
            where
            and where.quantity not in _OF_TOKENS
            and _differences(here, _environment_of(ledger, where.step))
        ):
            is_open.append(finding.what)
            finding = replace(finding, holds=True, is_open=True)
        elif finding.what.startswith(_REPLAY) and finding.holds:
            same.append(finding.what.removeprefix(_REPLAY))
        yield finding
    yield from _shown(statement, same, is_open)


def _environment_of(ledger: LedgerFile, step: int) -> Mapping[str, Any]:
    """The environment in which a step was done."""
    return next(was for first, was in reversed(ledger.starts) if first <= step)


def _differences(here: Mapping[str, Any], was: Mapping[str, Any]) -> list[str]:
    """How this machine differs from a run's in what decides bits."""
    return [
        f"{key} {one_line(str(here.get(key)))}, was {one_line(str(was.get(key)))}"
        for key in _DECIDES
        if here.get(key) != was.get(key)
    ]


def _shown(statement: dict[str, Any], same: list[str], is_open: list[str]) -> Iterator[Finding]:
    """What all of it shows, and what it does not."""
    if same:
        yield Finding(
            "shown",
            f"steps {', '.join(same)} follow to the bit from the state before them, on this machine; "
            "prompts, tokens, log-probabilities, rewards and advantages of every step have the hashes of "
            "one chain",
            True,
            checked=False,
        )
    if is_open:
        yield Finding(
            "not shown",
            f"{', '.join(is_open)}: this kind of machine has other bits, so they are neither "
            "confirmed nor refuted; check the bundle on the run's kind of machine",
            True,
            checked=False,
        )
    left = statement["steps"] - len({*map(int, same), *statement["sampled"]})
    yield Finding(
        "not shown",
        f"the other {left} steps; when it was signed; that the signer did not compute other ledgers first, "
        "until one chose steps that suit. `zerokl verify run` of the whole run does any step again",
        True,
        checked=False,
    )
