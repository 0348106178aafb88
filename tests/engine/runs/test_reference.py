"""The ledger names the frozen reference of the KL term by its weights; another bit of them is another run.

The folder of the weights decides nothing.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from zerokl.cli import main
from zerokl.engine.runs.checks.replayer import Replayer
from zerokl.engine.runs.run import resume, train
from zerokl.files.writing import hash_json
from zerokl.model.checkpoint import load_decoder
from zerokl.model.weights import fingerprint
from zerokl.verify.compare_runs import open_run

from tests.helpers import contents


def _flip(folder: Path) -> None:
    """Flip one bit of one weight."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.fixture
def reference(model, tmp_path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "reference"))


@pytest.fixture
def with_kl(config, reference):
    """A run with a KL term to `reference`."""
    return config(steps=2, checkpoint__every=1, loss__kl_coef=0.5, loss__ref_model=reference)


def test_the_ledger_holds_the_hash_of_the_weights(with_kl, reference, tmp_path):
    train(with_kl.model_copy(update={"dtype": "bfloat16"}), tmp_path / "run")
    decoder = load_decoder(reference, torch.bfloat16)
    head = open_run(tmp_path / "run").head
    names = ("architecture", "vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads")
    names += ("head_dim", "eps", "rope_theta", "tied")
    architecture = {name: getattr(decoder.config, name) for name in names}
    architecture |= {"rope_llama3": None, "qkv_bias": False, "o_bias": False, "qk_norm": True}
    weights = fingerprint(decoder.layout, decoder.flat.detach())
    assert head.settings["loss.ref_model"] == f"sha256:{hash_json([architecture, weights])}"
    assert head.environment["process.loss.ref_model"] == str(reference)


def test_a_moved_reference_keeps_the_fingerprint(config, with_kl, reference, tmp_path, capsys):
    first = train(with_kl, tmp_path / "run").fingerprint
    moved = reference.rename(tmp_path / "elsewhere")
    again = config(steps=2, checkpoint__every=1, loss__kl_coef=0.5, loss__ref_model=moved)
    assert train(again, tmp_path / "again").fingerprint == first
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    # Without a setting, the reference is the run's first model. It has the same weights here.
    implied = config(steps=2, checkpoint__every=1, loss__kl_coef=0.5)
    assert train(implied, tmp_path / "implied").fingerprint == first


def test_other_weights_in_the_same_place_are_found_and_refused_by_name(with_kl, reference, tmp_path, capsys):
    run = tmp_path / "run"
    first = train(with_kl, run).fingerprint
    kept = shutil.copytree(reference, tmp_path / "kept")
    _flip(reference)
    assert train(with_kl, tmp_path / "other").fingerprint != first
    assert main(["diff", str(run), str(tmp_path / "other")]) == 1
    difference = "first difference before the first step: configuration loss.ref_model: 'sha256:"
    assert difference in " ".join(capsys.readouterr().out.split())
    # As if the run had ended after its first step.
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    before = contents(run)
    message = (
        rf"resume: the weights of the reference, {reference}, are sha256:\w+; "
        r"the run began with sha256:"
    )
    with pytest.raises(ValueError, match=message):
        resume(run)
    message = r"what it started from is another now; before the first step: configuration loss\.ref_model"
    with pytest.raises(ValueError, match=message):
        Replayer(run)
    assert contents(run) == before, "refused before anything was changed"
    assert resume(run, {"loss.ref_model": str(kept)}).fingerprint == first, "the remedy of the message"


def test_without_a_kl_term_the_reference_is_no_part_of_the_run(config, tmp_path):
    plain = train(config(steps=1), tmp_path / "plain").fingerprint
    unused = train(config(steps=1, loss__ref_model=tmp_path / "nowhere"), tmp_path / "unused")
    assert unused.fingerprint == plain
    assert open_run(tmp_path / "plain").head.settings["loss.ref_model"] == ""


def _edit(folder: Path, **changes: object) -> None:
    """Change values in the model's config.json; the weights stay as they are."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


ROPE = {"rope_type": "default", "rope_theta": 50.0}


@pytest.mark.parametrize(
    ("change", "key", "now"),
    [({"rms_norm_eps": 3e-3}, "model.eps", 0.003), ({"rope_parameters": ROPE}, "model.rope_theta", 50.0)],
)
def test_the_architecture_of_the_model_is_in_the_ledger(
    config, reference, tmp_path, capsys, change, key, now
):
    """A run of a model with another epsilon but the same weights is another run."""
    cfg = config(steps=2, checkpoint__every=1, model=reference)
    first = train(cfg, tmp_path / "run")
    _edit(reference, max_position_embeddings=77)
    assert train(cfg, tmp_path / "longer").fingerprint == first.fingerprint, "the context only limits"
    _edit(reference, **change)
    assert train(cfg, tmp_path / "other").fingerprint != first.fingerprint
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "other")]) == 1
    assert f"configuration {key}" in " ".join(capsys.readouterr().out.split())
    message = rf"resume: {key} is {now} in config.json of the run's first model and .* in the ledger"
    with pytest.raises(ValueError, match=message):
        resume(tmp_path / "run", {"steps": 3})


def test_a_reference_of_another_architecture_is_another_reference(with_kl, reference, tmp_path):
    first = train(with_kl, tmp_path / "run").fingerprint
    _edit(reference, rms_norm_eps=3e-3)
    assert train(with_kl, tmp_path / "other").fingerprint != first
    with pytest.raises(ValueError, match="weights of the reference"):
        resume(tmp_path / "run", {"steps": 3})
