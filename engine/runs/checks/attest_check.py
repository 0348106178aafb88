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
from ....verify.compare_runs import open_run
from ....verify.difference import CheckResult, Mark, differences, first_difference
from ....verify.ledger import LedgerFile
from ....verify.run_environment import DECIDES, PACKAGE_ROOT, environment
from ...config.run_config import Config
from ..resume import run_config
from .attest_bundle import CONTENTS, FORMAT, STATEMENT, bundle_settings, draw_of, statement_of
from .signature import SUFFIX, SignatureError, check_signature
from .verify_run import verify_run

# Of these a difference explains that a step differs.
_DECIDES = (*DECIDES, "vllm", "device")
# Quantities that follow from the tokens, whatever machine computes.
_OF_TOKENS = ("random keys", "prompts", "between_turns", "ends", "rewards", "advantages")
_REPLAY = "replay of step "
_FIELDS = {"format", "fingerprint", "digest", "steps", "replays", "sampled", "contents", "needs"}
_FIELDS |= {"environments"}


def check_bundle(bundle: Path, signers: Path | None, given: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Check a bundle. signers: who may have signed it; see check_signature. given: settings of this machine.

    Yields each result when it is known. Raises ValueError for what is no bundle, and for settings that are
    refused.
    """
    if not (bundle / STATEMENT).is_file():
        raise ValueError(f"attest: {bundle} is no bundle: it has no {STATEMENT}")
    try:
        who = check_signature(bundle / STATEMENT, signers)
    except SignatureError as error:
        yield CheckResult.judged("signature", error)
        return
    yield CheckResult.judged("signature", None, f"by {who}")
    if signers is None:
        yield CheckResult.note("signer", "no --signers was given, so nobody says whose key it is")
    statement = _read(bundle)
    fault = _bytes_fault(bundle, statement)
    yield CheckResult.judged("contents", fault, "every byte is the one that was signed")
    if fault:
        return
    run = bundle / CONTENTS / "run"
    try:
        ledger = open_run(run)
        config = run_config(run, {})
    except ValueError as error:
        yield CheckResult.judged("ledger", error)
        return
    if fault := _statement_fault(statement, ledger, config, bundle / CONTENTS):
        yield CheckResult.judged("statement", fault)
        return
    yield CheckResult.judged("digest", None, f"{statement['digest']}, of the fingerprint and its machines")
    steps = f"{', '.join(map(str, statement['sampled']))}, those that the ledger's last hash chooses"
    yield CheckResult.judged("sampled steps", None, f"{steps}, and the last")
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


def _statement_fault(
    statement: dict[str, Any], ledger: LedgerFile, config: Config, contents: Path
) -> str | None:
    """What the signer says of the run and its ledger does not."""
    replays = statement["replays"]
    if type(replays) is not int or replays < 1:
        return f"replays is {shown(replays)}"
    wrong = first_difference(statement, statement_of(ledger, replays, config, contents))
    return wrong and wrong.beside("the ledger's is")


def _steps(
    run: Path, statement: dict[str, Any], ledger: LedgerFile, settings: dict[str, Any]
) -> Iterator[CheckResult]:
    """The checks of the run, and what they show together."""
    here = environment(PACKAGE_ROOT, torch.device(find_device(run_config(run, settings).device)), {})
    others = [(first, _other_machine(here, was)) for first, was in ledger.starts]
    for first, other in others:
        if other:
            words = f"from step {first} on another kind than this one: {'; '.join(other)}"
            yield CheckResult.note("machine", words)
    same, is_open = [], []
    for result in verify_run(run, statement["replays"], draw_of(ledger), settings):
        where = result.difference
        elsewhere = where and next(other for first, other in reversed(others) if first <= where.step)
        if elsewhere and where.quantity not in _OF_TOKENS:
            is_open.append(result.what)
            result = replace(result, mark=Mark.OPEN)
        elif result.what.startswith(_REPLAY) and result.holds:
            same.append(result.what.removeprefix(_REPLAY))
        yield result
    yield from _shown(statement, same, is_open)


def _other_machine(here: Mapping[str, Any], was: Mapping[str, Any]) -> list[str]:
    """How this machine differs from a run's in what decides bits."""
    sides = ({key: x[key] for key in _DECIDES if key in x} for x in (here, was))
    pairs = ((d.quantity, *(one_line(str(x)) for x in d.values)) for d in differences(*sides, absent=None))
    return [f"{key} {now}, was {then}" for key, now, then in pairs]


def _shown(statement: dict[str, Any], same: list[str], is_open: list[str]) -> Iterator[CheckResult]:
    """What all of it shows, and what it does not."""
    if same:
        yield CheckResult.note(
            "shown",
            f"steps {', '.join(same)} follow to the bit from the state before them, on this machine; "
            "prompts, tokens, log-probabilities, rewards and advantages of every step have the hashes of "
            "one chain",
        )
    if is_open:
        yield CheckResult.note(
            "not shown",
            f"{', '.join(is_open)}: this kind of machine has other bits, so they are neither "
            "confirmed nor refuted; check the bundle on the run's kind of machine",
        )
    left = statement["steps"] - len({*map(int, same), *statement["sampled"]})
    yield CheckResult.note(
        "not shown",
        f"the other {left} steps; when it was signed; that the signer did not compute other ledgers first, "
        "until one chose steps that suit. `zerokl verify run` of the whole run does any step again",
    )
