"""Runs that are forged with care: what is changed is hashed again, in all files that have a hash of it."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.runs.checks.logged_steps import read_step
from zerokl.engine.runs.checks.replayer import Replayer
from zerokl.engine.runs.checks.verify_run import verify_run
from zerokl.engine.runs.intact_checkpoints import open_checkpoint
from zerokl.engine.runs.resume import derived_summary
from zerokl.engine.runs.run import resume
from zerokl.engine.runs.summary import write_summary
from zerokl.engine.train.ledger_recorder import hash_rewards, hash_rollouts
from zerokl.engine.train.metrics import rollout_metrics
from zerokl.files.writing import MANIFEST, hash_json, write_manifest
from zerokl.verify.ledger import read_ledger


def forge_manifest(folder: Path) -> None:
    """The manifest of a checkpoint made again, so that it fits what the folder holds now."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder)


def flip_bit(file: Path, name: str) -> None:
    """Flip the last bit of one element of a tensor."""
    tensors = load_file(file)
    tensors[name].view(torch.int32).view(-1)[3] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


def forge_file(folder: Path, file: str, change: Callable[[dict], Any]) -> None:
    """Change a JSON file of a checkpoint, and write a manifest that fits."""
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))
    forge_manifest(folder)


def forge_weight(path: Path, step: int, name: str = "model.norm.weight") -> None:
    """Another weight in a checkpoint, with a manifest that fits, and a summary that fits it."""
    folder = path / "checkpoints" / f"step-{step:06d}"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    forge_manifest(folder)
    checkpoint, _ = open_checkpoint(folder)
    history = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    write_summary(path, derived_summary(read_ledger(path / "ledger.jsonl"), history, checkpoint))


def chain_again(path: Path, step: int, change: Callable[[dict[str, str]], Any]) -> None:
    """Change the hashes of a step in the ledger, and make the sums and the chain from there on again."""
    head, *lines = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    chain = head["chain"]
    for number, line in enumerate(lines):
        line.pop("sum")
        quantities = dict(line["quantities"])
        if number == step:
            change(quantities)
            line |= {"leaves": {}, "quantities": list(quantities.items())}
        parts = [chain, line["step"], line["keys"], line["quantities"], line["updates"]]
        chain = line["chain"] = hash_json(parts)
        line["sum"] = hash_json(line)
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    for folder in (path / "checkpoints").glob("step-*"):
        newest = int(folder.name[-6:])
        logs = {
            name: hashlib.sha256(
                b"".join((path / name).read_bytes().splitlines(True)[: newest * n])
            ).hexdigest()
            for name, n in (("metrics.jsonl", 1), ("rollouts.jsonl", 9))
        }
        chain = lines[newest - 1]["chain"]
        forge_file(folder, "trainer/state.json", lambda x, c=chain, g=logs: x.update(chain=c, logs=g))
    newest = max((path / "checkpoints").glob("step-*"))
    checkpoint, damage = open_checkpoint(newest)
    assert checkpoint, damage
    history = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    write_summary(path, derived_summary(read_ledger(path / "ledger.jsonl").whole(), history, checkpoint))


def forge_head(path: Path, change: Callable[[dict], Any]) -> None:
    """Change what the ledger's head has beside the chain, and make its sum again."""
    head, *lines = (path / "ledger.jsonl").read_text().splitlines()
    values = json.loads(head)
    values.pop("sum")
    change(values)
    head = json.dumps(values | {"sum": hash_json(values)})
    (path / "ledger.jsonl").write_text("\n".join([head, *lines]) + "\n")


def forge_rollouts(path: Path, step: int, change: Callable[[list[dict]], Any]) -> None:
    """Change the rollouts of a step, and hash all again: ledger, metrics, checkpoints, summary."""
    lines = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
    step_lines = [line for line in lines if line["step"] == step]
    change(step_lines)
    (path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    logged = read_step(step_lines, 3)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[step] |= {k: v for k, v in rollout_metrics(logged.episodes).items() if k in rows[step]}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hashes = hash_rollouts(logged.rollouts) | hash_rewards(logged.episodes.rewards, logged.advantages)
    chain_again(path, step, lambda quantities: quantities.update(hashes))


def all_solved(lines: list[dict]) -> None:
    for line in lines:
        line |= {"reward": 1.0, "advantage": 0.0}


def assert_another_frozen_weight_is_refused(run: Path, model: Path, name: str) -> None:
    """A run goes on from a model that was moved to `model`, but not where a frozen weight is another."""
    config, ledger = run / "config.toml", (run / "ledger.jsonl").read_bytes()
    config.write_text(re.sub(r"^model = .*$", f'model = "{model}"', config.read_text(), flags=re.M))

    def of_replays(replays: int) -> list[str]:
        return [f.what for f in verify_run(run, replays, 0, {}) if not f.holds and f.what == "replay"]

    assert of_replays(0) == [], "control"
    flip_bit(model / "model.safetensors", name)
    with pytest.raises(ValueError, match=f"^resume: the frozen weight {name} of .* is sha256:.* put it back"):
        resume(run)
    with pytest.raises(ValueError, match=f"what it started from is another now.* frozen.{name}: 'sha256:"):
        Replayer(run)
    assert of_replays(1) == ["replay"]
    assert (run / "ledger.jsonl").read_bytes() == ledger


def assert_checkpoint_is_not_used(
    run: Path, whole: Path, file: str, name: str, what: str, capsys: pytest.CaptureFixture
) -> None:
    """A run of three steps goes on from its first where the checkpoint of its second has another bit.

    The checkpoint's manifest is made again, as a forger would. whole: the run that was never cut.
    """
    folder = run / "checkpoints" / "step-000002"
    flip_bit(folder / file, name)
    forge_manifest(folder)
    message = f"the {what} in {folder} are not those whose hash is in {run / 'ledger.jsonl'}"
    assert [f.result for f in verify_run(run, 0, 0, {}) if f.what == "step-000002"] == [message]
    resume(run)
    assert f"{message}; not used" in " ".join(capsys.readouterr().out.split())
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
