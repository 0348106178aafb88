"""An attested run is checked on a copy, and each forgery turns it red: a stranger's and the signer's own."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from zerokl.cli import main
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.checks import attest_check
from zerokl.engine.runs.checks.attest_bundle import digest_of, environments, needed_code, sampled_steps
from zerokl.engine.runs.checks.signature import sign
from zerokl.engine.runs.run import train
from zerokl.files.writing import MANIFEST, hash_json
from zerokl.verify.difference import CheckResult, Difference, Mark
from zerokl.verify.ledger import read_ledger

from tests.forged_run import all_solved, chain_again, forge_head, forge_manifest, forge_rollouts

pytestmark = pytest.mark.full
STEPS = 6


def make_key(folder: Path, name: str) -> Path:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
    subprocess.run(words, check=True)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """Two keys, `mine` and `other`, and the signers that somebody trusts: mine."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        make_key(folder, name)
    public = (folder / "mine.pub").read_text()
    (folder / "signers").write_text(f"me@example.org {public}")
    return folder


@pytest.fixture(scope="module")
def made(config, tmp_path_factory, keys) -> Path:
    """A bundle whose run and model are gone, as on another machine."""
    folder = tmp_path_factory.mktemp("attested")
    model = folder / "model"
    shutil.copytree(Path(config().model), model)
    train(config(model=model, steps=STEPS, checkpoint__every=2), folder / "run")
    words = ["attest", str(folder / "run"), "--key", str(keys / "mine"), "--replays", "2"]
    assert main([*words, "--out", str(folder / "B")]) == 0
    shutil.rmtree(folder / "run")
    shutil.rmtree(model)
    return folder / "B"


@pytest.fixture
def bundle(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "B")
    return tmp_path / "B"


@pytest.fixture
def check(capsys, keys) -> Callable[..., tuple[int, str]]:
    """check(bundle): exit code and output, with the signers that are trusted."""

    def run(bundle: Path, signers: bool = True) -> tuple[int, str]:
        capsys.readouterr()
        words = ["--signers", str(keys / "signers")] if signers else []
        code = main(["attest", "verify", str(bundle), *words, "--task.directory", str(bundle)])
        return code, capsys.readouterr().out

    return run


def failures(words: str) -> list[str]:
    return [line for line in words.splitlines() if line.startswith("FAIL")]


def test_a_bundle_holds_where_run_and_model_are_gone(bundle, check):
    code, words = check(bundle)
    assert code == 0, words
    steps = sampled_steps(read_ledger(bundle / "contents/run/ledger.jsonl"), 2)
    assert "ok    signature: by me@example.org, ED25519 key SHA256:" in words
    for step in steps:
        assert f"ok    replay of step {step}: the same bits" in words
    assert STEPS - 1 in steps
    assert f"note  shown: steps {', '.join(map(str, steps))} follow to the bit" in words
    assert f"note  not shown: the other {STEPS - len(steps)} steps" in words
    # Only the checkpoints that these steps need, and the newest.
    held = {int(p.name[-6:]) for p in (bundle / "contents/run/checkpoints").iterdir()}
    assert held == {STEPS} | {step - step % 2 for step in steps} - {0}


def test_code_of_the_users_is_not_in_a_bundle_and_is_asked_for(bundle, capsys):
    assert main(["attest", "verify", str(bundle)]) == 2
    assert "calls code that the bundle does not carry (toy); read it, and name" in capsys.readouterr().err


def sign_again(bundle: Path, key: Path, **changes: object) -> None:
    """What a signer with this key can do: hash all again, say what he likes, and sign."""
    contents = bundle / "contents"
    forge_manifest(contents)
    statement = json.loads((bundle / "statement.json").read_text())
    statement |= {"contents": json.loads((contents / MANIFEST).read_text())["sha256"]} | changes
    (bundle / "statement.json").write_text(json.dumps(statement))
    (bundle / "statement.json.sig").unlink()
    sign(bundle / "statement.json", key)


def alter(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


FILES = ("ledger.jsonl", "metrics.jsonl", "rollouts.jsonl", "config.toml", "summary.json")


def test_code_that_an_option_of_the_task_names_is_asked_for():
    """Such as `make` of the task gym, and options inside lists and tables; a text with a colon is none."""
    options = {"make": "my_games.make:env", "parts": [{"tool": "tools:run"}], "text": "a: b", "max": 3}
    config = Config(task={"name": "own_tasks:Sums", "options": options})
    assert needed_code(config) == ["my_games.make", "own_tasks", "tools"]


def test_a_changed_byte_anywhere_is_found(bundle, check, made):
    """One bit of every file, one at a time. Nothing is looked at behind a byte that was not signed."""
    files = [p for p in bundle.rglob("*") if p.is_file()]
    assert {"statement.json.sig", "model.safetensors", *FILES} <= {p.name for p in files}
    for file in files:
        good = file.read_bytes()
        place = len(good) // 2
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        code, words = check(bundle)
        assert (code, len(failures(words))) == (1, 1), file
        assert "replay" not in words
        file.write_bytes(good)
    signature = bundle / "statement.json.sig"
    signature.write_bytes(signature.read_bytes().replace(b"\n", b"\v", 2))
    assert "or not as ssh-keygen writes it" in check(bundle)[1]  # ssh-keygen itself reads over it
    shutil.copy(made / signature.name, signature)
    (bundle / "contents" / "run" / "more.py").write_text("")
    assert "is foreign" in check(bundle)[1]


def test_a_stranger_cannot_sign_for_another(bundle, check, keys):
    sign_again(bundle, keys / "other")
    code, words = check(bundle)
    assert (code, failures(words)) == (
        1,
        [line for line in words.splitlines() if "is by no signer of" in line],
    )


def forge_metrics(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["reward/mean"] += 0.125
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def forge_ledger(run: Path) -> None:
    """A line with its own sum right and the chain broken."""
    lines = (run / "ledger.jsonl").read_text().splitlines()
    line = json.loads(lines[2])
    line["quantities"][-1][1] = "0" * 64
    line.pop("sum")
    lines[2] = json.dumps(line | {"sum": hash_json(line)}, separators=(",", ":"))
    (run / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def forge_checkpoint(run: Path) -> None:
    """Another weight, with the checkpoint's own manifest made again."""
    folder = run / "checkpoints" / f"step-{STEPS:06d}"
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    forge_manifest(folder)


@pytest.mark.parametrize(
    ("forge", "fault"),
    [
        (forge_metrics, "FAIL  metrics.jsonl: "),
        (forge_ledger, "the chain does not fit"),
        (forge_checkpoint, f"FAIL  step-{STEPS:06d}: "),
    ],
)
def test_the_signer_cannot_forge_the_run_either(bundle, check, keys, forge, fault):
    forge(bundle / "contents" / "run")
    sign_again(bundle, keys / "mine")
    code, words = check(bundle)
    assert code == 1
    assert any(fault in line for line in failures(words)), words


def test_the_signer_does_not_choose_the_steps(bundle, check, keys):
    chosen = sampled_steps(read_ledger(bundle / "contents/run/ledger.jsonl"), 2)
    others = [step for step in range(STEPS) if step not in chosen][:2]
    for changes in ({"sampled": others}, {"replays": 1}, {"fingerprint": "0" * 64}):
        sign_again(bundle, keys / "mine", **{"sampled": chosen, "replays": 2} | changes)
        code, words = check(bundle)
        assert (code, len(failures(words))) == (1, 1)
        assert "FAIL  statement: " in words
        assert "replay of" not in words


def test_a_forged_chain_is_found_where_the_hash_looks(bundle, check, keys):
    """Every gradient is another one in a ledger that fits itself: the sampled steps do not come out."""
    run = bundle / "contents" / "run"
    for step in range(STEPS):
        chain_again(run, step, lambda quantities: quantities.update(gradient="f" * 64))
    ledger = read_ledger(run / "ledger.jsonl").whole()
    steps = sampled_steps(ledger, 2)
    sign_again(bundle, keys / "mine", fingerprint=ledger.chain, sampled=steps, digest=digest_of(ledger))
    code, words = check(bundle)
    assert code == 1
    assert any("replay of step" in line and "gradient" in line for line in failures(words)), words


def differs(quantity: str) -> Callable[..., Iterator[CheckResult]]:
    """Results of a run in which one step differs, and another is the same."""
    where = Difference(quantity, step=1)
    return lambda *_: iter(
        [
            CheckResult("replay of step 0", "the same bits", Mark.EQUAL),
            CheckResult("replay of step 1", f"differs at {where}", Mark.DIFFERENT, where),
        ]
    )


@pytest.fixture
def machine(monkeypatch) -> Callable[[str], None]:
    """machine(cpu): from now on this machine has this CPU; empty is its own."""
    plain = attest_check.environment

    def becomes(cpu: str) -> None:
        monkeypatch.setattr(attest_check, "environment", lambda *a: plain(*a) | ({"cpu": cpu} if cpu else {}))

    return becomes


@pytest.mark.parametrize(
    "quantity", ["tokens", "sampling_logprobs", "trainer_logprobs", "gradient", "weights"]
)
def test_numbers_of_another_kind_of_machine_are_open_and_confirm_nothing(
    bundle, check, monkeypatch, machine, quantity
):
    monkeypatch.setattr(attest_check, "verify_run", differs(quantity))
    machine("another one")
    code, words = check(bundle)
    assert code == 3
    assert "note  machine: from step 0 on another kind than this one: cpu another one, was " in words
    assert "open  replay of step 1: differs at step 1: " in words
    assert "they are neither confirmed nor refuted" in words
    machine("")
    assert check(bundle)[0] == 1


@pytest.mark.parametrize(
    "quantity", ["prompts", "between_turns", "ends", "rewards", "advantages", "random keys"]
)
def test_what_follows_from_tokens_fails_on_any_machine(bundle, check, monkeypatch, machine, quantity):
    monkeypatch.setattr(attest_check, "verify_run", differs(quantity))
    machine("another one")
    assert check(bundle)[0] == 1


def test_another_machine_with_the_same_bits_confirms(bundle, check, machine):
    machine("another one")
    assert check(bundle)[0] == 0


def test_a_run_that_went_on_elsewhere_is_judged_by_the_machine_of_each_step(
    bundle, check, keys, monkeypatch, machine
):
    """Steps 0 and 1 were done on another machine; from step 2 on the run was on this one."""
    run = bundle / "contents/run"
    lines = (run / "ledger.jsonl").read_text().splitlines()
    note = {"kind": "resumed", "step": 2, "environment": json.loads(lines[0])["environment"]}
    lines.insert(3, json.dumps(note | {"sum": hash_json(note)}))
    (run / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    claim_machine(run, cpu="an older one")
    ledger = read_ledger(bundle / "contents/run/ledger.jsonl").whole()
    sign_again(bundle, keys / "mine", environments=environments(ledger), digest=digest_of(ledger))
    assert check(bundle)[0] == 0
    monkeypatch.setattr(attest_check, "verify_run", differs("tokens"))
    assert check(bundle)[0] == 3
    where = Difference("tokens", step=2)
    result = CheckResult("replay of step 2", f"differs at {where}", Mark.DIFFERENT, where)
    monkeypatch.setattr(attest_check, "verify_run", lambda *_: iter([result]))
    assert check(bundle)[0] == 1


def claim_machine(run: Path, **changes: str) -> None:
    """Another environment in the head of the ledger, which no link of the chain holds."""
    forge_head(run, lambda head: head["environment"].update(changes))


@pytest.mark.parametrize("claim", [{"cpu": "another one"}, {"torch": "1.0"}, {"device": "cuda"}])
def test_forged_rewards_and_a_claimed_machine_are_no_excuse(bundle, check, keys, claim):
    """Every reward is 1 and every hash is made again, as for a machine that nobody has."""
    run = bundle / "contents" / "run"
    for step in range(STEPS):
        forge_rollouts(run, step, all_solved)
    claim_machine(run, **claim)
    ledger = read_ledger(run / "ledger.jsonl").whole()
    changes = {"fingerprint": ledger.chain, "sampled": sampled_steps(ledger, 2)}
    changes |= {"environments": environments(ledger), "digest": digest_of(ledger)}
    sign_again(bundle, keys / "mine", **changes)
    code, words = check(bundle)
    assert code == 1
    assert "and its problem and tokens give" in "".join(failures(words))


def test_the_digest_binds_fingerprint_and_machine(bundle, check, keys):
    """The fingerprint of a claimed machine is the run's own, and the digest that was told before is not."""
    digest = json.loads((bundle / "statement.json").read_text())["digest"]
    assert f"ok    digest: {digest}" in check(bundle)[1]
    claim_machine(bundle / "contents" / "run", cpu="another one")
    sign_again(bundle, keys / "mine")
    assert "FAIL  statement: digest is " in check(bundle)[1]
    ledger = read_ledger(bundle / "contents/run/ledger.jsonl").whole()
    sign_again(bundle, keys / "mine", environments=environments(ledger), digest=digest_of(ledger))
    code, words = check(bundle)
    assert code == 0  # the steps come out here, whatever the signer says of his machine
    assert digest not in words


def test_without_signers_nobody_says_whose_key_it_is(bundle, check, keys):
    sign_again(bundle, keys / "other")
    code, words = check(bundle, signers=False)
    assert code == 0
    assert "note  signer: no --signers was given" in words


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--key", "nowhere", "--out", "o"], "--key (nowhere) is no file"),
        (["--key", __file__, "--out", "/tmp"], "--out (/tmp) exists"),
        (["--key", __file__, "--out", "o", "--replays", "0"], "--replays (0) must be at least 1"),
        (["--key", __file__, "--out", "o"], "no ledger.jsonl"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, reason):
    assert main(["attest", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_what_is_no_bundle_is_refused(tmp_path, capsys):
    assert main(["attest", "verify", str(tmp_path)]) == 2
    assert "is no bundle: it has no statement.json" in capsys.readouterr().err
