"""transformers, vLLM and zerokl against each other on one model, in fp32 and bf16: one table of all pairs.

    python benchmarks/real/audits.py MODEL OUT

Each row is one `zerokl audit`, which is printed as it runs; its report lies in OUT/DTYPE-SAMPLER-TRAINER.
"""

import json
import sys
from pathlib import Path

from zerokl.benchmarks.engine_pairs import audit
from zerokl.pages.markdown import table

_PAIRS = (("hf", "zerokl"), ("vllm", "hf"), ("vllm", "zerokl"), ("vllm-zerokl", "zerokl"))
_DTYPES = ("float32", "bfloat16")


def audited(model: Path, out: Path, dtype: str, pair: tuple[str, str]) -> dict:
    """The report of one pair; of an earlier start, if there is one."""
    folder = out / f"{dtype}-{'-'.join(pair)}"
    if (folder / "audit.json").exists():
        return json.loads((folder / "audit.json").read_text())
    return audit(model, dtype, pair, folder, "--full_vocab", "-n", "16", "--max_tokens", "48")


def row(report: dict) -> list[str]:
    """One row of the table."""
    first = report["first_divergence"]
    return [
        report["dtype"],
        report["sampler"],
        report["trainer"],
        f"{report['tokens']:,}",
        f"{report['frac_equal']:.1%}" if report["frac_equal"] < 0.999 else f"{report['frac_equal']:.4%}",
        f"{report['max_abs']:.2g}",
        f"{report['k3']['value']:.1e}",
        f"{report['full_vocab']['kl_sampler_trainer']['value']:.1e}",
        first["op"] if first else "nowhere",
        report["cause"]["kind"],
    ]


def main() -> None:
    """Make all audits, and print the table as Markdown."""
    model, out = map(Path, sys.argv[1:3])
    rows = [row(audited(model, out, dtype, pair)) for dtype in _DTYPES for pair in _PAIRS]
    headings = ["dtype", "sampler", "trainer", "tokens", "equal", "largest", "k3", "KL", "part", "cause"]
    print(table(headings, rows))


if __name__ == "__main__":
    main()
