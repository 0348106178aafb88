"""`zerokl attest RUN`: a folder with all that is needed to do sampled steps of a run again, signed.

    BUNDLE/statement.json        what is attested: the run's fingerprint, the sampled steps, and the hash of
    BUNDLE/statement.json.sig    contents/manifest.json, which has the hash of every other file
    BUNDLE/contents/run          configuration, ledger, metrics, rollouts, summary, some checkpoints
    BUNDLE/contents/model        the model that the run began with; reference and adapter beside it

The steps are drawn by the last value of the ledger's chain, so that nobody chooses them; the last step is
always one of them. Of the checkpoints there are the newest, and the one before each sampled step.

The chain has no environment in it, so that equal runs of two machines have one fingerprint. The digest of a
bundle binds the two: it is the hash of the fingerprint and of the environments that the run had.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....files.inputs import check_folder, read_bytes
from ....files.reading import parse_json
from ....files.writing import MANIFEST, check_writable, hash_json, write_manifest, write_whole
from ....model.checkpoint import resolve_model
from ....verify.compare_runs import open_run
from ....verify.ledger import LedgerFile
from ....verify.run_files import LEDGER, checkpoint_folders
from ...config.run_config import Config
from ..base_model import base_model
from ..folder import METRICS, ROLLOUTS
from ..resume import run_config
from ..summary import SUMMARY
from .replayed_steps import drawn_steps
from .signature import sign
from .verify_run import verify_run

FORMAT = 2
STATEMENT, CONTENTS = "statement.json", "contents"
# Settings that are places, and the folder of the bundle that takes theirs.
_PLACES = {"model": "model", "loss.ref_model": "ref_model", "lora.adapter": "adapter"}
_DATA = "task"
_NAMED_CODE = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


def environments(ledger: LedgerFile) -> list[list[Any]]:
    """[step, environment] of each start of a run in another environment, as JSON holds them."""
    return [list(start) for start in ledger.starts]


def draw_of(ledger: LedgerFile) -> int:
    """The seed of the draw of the sampled steps: the first 32 bits of the run's fingerprint."""
    return int(ledger.chain[:8], 16)


def digest_of(ledger: LedgerFile) -> str:
    """The hash that binds a run's fingerprint and the environment of each of its starts."""
    return hash_json([ledger.chain, environments(ledger)])


def sampled_steps(ledger: LedgerFile, replays: int) -> list[int]:
    """The steps that the ledger chooses, ascending: those of `zerokl verify run --draw`."""
    return drawn_steps(len(ledger.lines), replays, draw_of(ledger))


def attest(run: Path, key: Path, out: Path, replays: int) -> dict[str, Any]:
    """Write a bundle. Returns its statement.

    Raises ValueError for a folder without a run, for a run that is not what its ledger says, for a number
    out of range, for a key that cannot sign, and for an `out` that exists.
    """
    if out.exists():
        raise ValueError(f"attest: --out ({out}) exists; choose another folder")
    if replays < 1:
        raise ValueError(
            f"attest: --replays ({replays}) must be at least 1: a bundle is there to be done again"
        )
    if not key.is_file():
        raise ValueError(f"attest: --key ({key}) is no file; name a private SSH key")
    ledger, config = open_run(run), run_config(run, {})
    if not ledger.lines:
        raise ValueError(f"attest: {run} has no step yet")
    if fault := next((f for f in verify_run(run, 0, 0, {}) if not f.holds), None):
        raise ValueError(f"attest: {run} is not what its ledger says: {fault.what}: {fault.result}")
    check_writable(out.parent)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        contents = partial / CONTENTS
        contents.mkdir(parents=True)
        steps = sampled_steps(ledger, replays)
        _copy_run(run, config, contents / "run", steps)
        for setting, folder in _places(config, run):
            _copy_folder(folder, contents / _PLACES[setting])
        _copy_data(config, contents / _DATA)
        write_manifest(contents)
        statement = statement_of(ledger, replays, config, contents)
        write_whole(partial / STATEMENT, (json.dumps(statement, indent=1) + "\n").encode())
        sign(partial / STATEMENT, key)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return statement


def statement_of(ledger: LedgerFile, replays: int, config: Config, contents: Path) -> dict[str, Any]:
    """What is attested of a run whose files are in `contents`."""
    return {
        "format": FORMAT,
        "fingerprint": ledger.chain,
        "digest": digest_of(ledger),
        "steps": len(ledger.lines),
        "replays": replays,
        "sampled": sampled_steps(ledger, replays),
        "contents": parse_json(read_bytes(contents / MANIFEST))["sha256"],
        "needs": needed_code(config),
        "environments": environments(ledger),
    }


def _copy_run(run: Path, config: Config, to: Path, steps: list[int]) -> None:
    """The files of a run that a check reads, with as many checkpoints as the steps need."""
    to.mkdir()
    for name in ("config.toml", LEDGER, METRICS, ROLLOUTS, SUMMARY):
        if (run / name).exists():
            shutil.copyfile(run / name, to / name)
    folders = {int(folder.name.rpartition("-")[2]): folder for folder in checkpoint_folders(run)}
    before = {max((c for c in folders if c <= step), default=None) for step in steps}
    wanted = {max(folders, default=None)} | (set() if config.samples_older_weights else before)
    for step in sorted(wanted - {None}):
        _copy_folder(folders[step], to / "checkpoints" / folders[step].name)
    if config.model.startswith("init:"):
        _copy_folder(base_model(config, run), to / "base")


def _copy_folder(folder: Path, to: Path) -> None:
    """A copy of all files. A link becomes what it leads to; what is no regular file is refused."""
    for part in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        check_folder(part)
    shutil.copytree(folder, to)


def _places(config: Config, run: Path) -> Iterator[tuple[str, Path]]:
    """The folders beside the run that it reads: its first model, a reference, a first adapter."""
    if not config.model.startswith("init:"):
        yield "model", base_model(config, run)
    if config.loss.ref_model:
        yield "loss.ref_model", resolve_model(config.loss.ref_model)
    if config.lora.adapter:
        yield "lora.adapter", Path(config.lora.adapter)


def _data(config: Config) -> dict[str, Path]:
    """The files that the task's options name: the name, which is chained, and the file."""
    directory = Path(config.task.directory or ".")
    names = [value for value in config.task.options.values() if isinstance(value, str)]
    return {name: directory / name for name in names if name and (directory / name).is_file()}


def _copy_data(config: Config, to: Path) -> None:
    for name, file in _data(config).items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            continue  # it is chained as it is, so it must lie there on the other machine too
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / name)


def needed_code(config: Config) -> list[str]:
    """Modules of the user's that decide bits. A bundle carries no code: its reader would run it.

    An option of the task may name code too, such as `make` of the task gym.
    """
    task = config.task
    settings = [task.name, task.reward, task.equivalence, config.loss.surrogate]
    settings += [x for x in _texts(task.options) if _NAMED_CODE.fullmatch(x)]
    return sorted({value.partition(":")[0] for value in settings if value and ":" in value})


def _texts(options: Any) -> Iterator[str]:
    """All strings in a value of JSON."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping | list | tuple):
        for value in options.values() if isinstance(options, Mapping) else options:
            yield from _texts(value)


def bundle_settings(bundle: Path) -> dict[str, Any]:
    """The places of a bundle's folders, as settings of its run."""
    contents = bundle / CONTENTS
    places = {key: str(contents / name) for key, name in _PLACES.items() if (contents / name).is_dir()}
    data = contents / _DATA
    return places | {"task.directory": str((data if data.is_dir() else contents).absolute())}
