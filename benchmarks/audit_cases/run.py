"""Plants faults that the audit was not written on, and sound logs, and shows what the audit says of each.

python benchmarks/audit_cases/run.py build --root R --seed 1      draw the logs
python benchmarks/audit_cases/run.py audit --root R --seed 1      audit those that were not yet
python benchmarks/audit_cases/run.py table --root R --seed 1      the table of docs/audit/found.md

named    the headline is the fault         missed   the headline is that nothing, or rounding, differs
seen     not sound, cause not told         wrong    the headline is another fault
clear    a sound log, and it says so       alarm    a fault named in a sound log
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch
from zerokl.pages.markdown import table as markdown_table

if TYPE_CHECKING:
    from zerokl.audit.faults.fault import Fault, Plant
    from zerokl.audit.faults.planting.world import World

FAMILIES = ("llama", "qwen3")  # --families takes qwen2, too
# The constants of audit/hypotheses/judgement.py were set on these families with these seeds. All else is
# held out.
SEEDS_SET = (0, 1, 2)
# Kinds of a cause that say that nothing is at fault, and that something is and no hypothesis fits.
SOUND_KINDS = ("equal", "equal columns", "rounded log", "rounding")
UNKNOWN_KINDS = ("unknown",)
RESULT = "result.json"
WORDS = ("named", "seen", "missed", "wrong", "clear", "unsure", "alarm")
CLASSES = {
    "numbers": "all numbers of a column",
    "column": "one column",
    "place": "wrong numbers at some places",
    "lines": "some lines, one version, long ones",
    "settings": "settings of the sampler",
    "weights": "weights and adapters",
    "attention": "attention, cache, positions",
    "composed": "two causes at once",
    "ids": "ids and random numbers",
    "signal": "rewards and advantages",
    "sound": "sound logs",
}


def build(root: Path, seed: int, only: str, families: Sequence[str] = FAMILIES) -> None:
    """Draw every plant of every fault, and every sound log, and write each with its options."""
    import models
    from sound import SOUND
    from zerokl.audit.faults.all_faults import everything

    worlds = [models.world(family, seed, root / "models") for family in families]
    planted = [(fault, plant) for fault in everything() for plant in fault.plants]
    cases = [*planted, *((None, plant) for plant in SOUND)]
    for fault, plant in cases:
        name = plant.make.__name__
        # The name decides the family. Another seed gives each case to the other family.
        world = worlds[(crc32(name.encode()) + seed) % len(worlds)]
        folder = root / f"seed-{seed}" / f"{plant.group}-{name}-{world.family}"
        if (folder / "case.json").exists() or not any(part in folder.name for part in only.split(",")):
            continue
        start = time.perf_counter()
        write_case(folder, world, plant, fault)
        print(f"{folder.name}: {time.perf_counter() - start:.1f} s", flush=True)


def write_case(folder: Path, world: "World", plant: "Plant", fault: "Fault | None" = None) -> dict:
    """Write the log of a plant into a folder; hand back the case, which stands beside it in case.json.

    fault: None for a sound log.
    """
    from zerokl.audit.faults.planting.sampling import row

    name = plant.make.__name__
    world.begin(name)
    log = plant.make(world)
    write_log(folder / "log.jsonl", [_finite(row(x, log.declared)) for x in log.lines])
    model = {"model": str(world.folder)} if log.with_model else {}
    named = fault.names_of(plant) if fault else ()
    case = {"group": plant.group, "name": name, "named": named, "family": world.family}
    case |= {"settings": {"dtype": "float32"} | model | log.options}
    (folder / "case.json").write_text(json.dumps(case))
    return case


def report_of(folder: Path, case: dict) -> dict:
    """The report on a case, as audit.json has it."""
    return audit_of(folder / "log.jsonl", **case["settings"])


def audit_of(log: Path, **settings: object) -> dict:
    """The report on a log, as audit.json has it. settings: of the audit."""
    from zerokl.audit.as_json import as_json
    from zerokl.audit.command import run_audit
    from zerokl.audit.config import AuditSettings

    return as_json(run_audit(str(log), "", None, AuditSettings(**settings)))


def cause_text(report: dict) -> str:
    """What a report says of the cause, in one line."""
    return " ".join(report["cause"]["text"].split())


def write_log(path: Path, lines: Sequence[dict]) -> None:
    """Write the lines of a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _finite(row: dict) -> dict:
    """A line of turns has no ids of its own; a probability of 0 is written as zerokl's logs do."""
    if "turns" in row:
        for name in ("prompt_ids", "completion_ids", "logprobs"):
            row.pop(name)
    for name in ("logprobs", "trainer_logprobs"):
        if name in row:
            row[name] = [x if x is None or np.isfinite(x) else "-Infinity" for x in row[name]]
    return row


def without_a_name(report: dict) -> str:
    """The word for a report on a plant whose cause names none; empty where it names one."""
    kind = report["cause"]["kind"]
    return "missed" if kind in SOUND_KINDS else "seen" if kind in UNKNOWN_KINDS else ""


def judged(case: dict, report: dict) -> str:
    """The word of the table for a report."""
    kind, text = report["cause"]["kind"], report["cause"]["text"]
    alarms = [name for name in report["outcome"]["faults"] if name not in SOUND_KINDS]
    sound = kind in SOUND_KINDS and not alarms
    if case["group"] == "sound":
        return "clear" if sound else "unsure" if kind in UNKNOWN_KINDS and not alarms else "alarm"
    if word := "missed" if sound else without_a_name(report):
        return word
    words = f"{kind}: {text.split(' As near')[0]}".lower()
    return "named" if any(name.lower() in words for name in case["named"]) else "wrong"


def audit(root: Path, seed: int, only: str, columns: bool = False) -> None:
    """Audit every case that was built and not yet audited, and keep what was said beside it.

    columns: only the cases of which no model is given, which take a second each.
    """
    folders = sorted((root / f"seed-{seed}").glob("*"))
    chosen = [folder for folder in folders if any(part in folder.name for part in only.split(","))]
    if not chosen:
        raise SystemExit(
            f"--only {only!r}: no case of {root}/seed-{seed} has that in its name; build it first"
        )
    for folder in chosen:
        if (folder / RESULT).exists():
            continue
        case, start = json.loads((folder / "case.json").read_text()), time.perf_counter()
        if columns and "model" in case["settings"]:
            continue
        report = report_of(folder, case)
        word, text = judged(case, report), cause_text(report)
        seconds = time.perf_counter() - start
        outcome = report["outcome"]
        result = {"word": word, "text": text, "outcome": outcome["kind"], "faults": outcome["faults"]}
        (folder / RESULT).write_text(json.dumps(result))
        print(
            f"{case['group']:10} {case['name']:38} {case['family']:6} {word:7} {seconds:5.1f} s  {text[:230]}"
        )
        if outcome["faults"]:
            print(f"{'':71}  outcome {outcome['kind']}: {outcome['faults']}", flush=True)
    table(root, seed, only)


def table(root: Path, seed: int, only: str) -> None:
    """Print what was named, seen, missed and wrong by class, in Markdown: held-out cases by themselves."""
    counts: dict[bool, dict[str, Counter[str]]] = {}
    others: list[str] = []
    for folder in sorted((root / f"seed-{seed}").glob("*")):
        if any(part in folder.name for part in only.split(",")) and (folder / RESULT).exists():
            case, result = (json.loads((folder / name).read_text()) for name in ("case.json", RESULT))
            held_out = seed not in SEEDS_SET or case["family"] not in FAMILIES
            by_group = counts.setdefault(held_out, {})
            by_group.setdefault(case["group"], Counter())[result["word"]] += 1
            if result["word"] not in ("named", "clear"):
                others.append(f"{result['word']}: {case['name']} ({case['family']}): {result['text'][:150]}")
    for held_out, by_group in counts.items():
        print(f"\n{'Held out' if held_out else 'What the constants were set on'}:\n")
        rows = [
            [CLASSES[group], str(words.total()), *(str(words[word]) for word in WORDS)]
            for group, words in by_group.items()
        ]
        print(markdown_table(("class", "audited", *WORDS), rows))
    print("\n".join(others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["build", "audit", "table"])
    parser.add_argument("--root", type=Path, default=Path("runs/audit-cases"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="parts of case names, with commas between")
    parser.add_argument("--families", default=",".join(FAMILIES), help="build: the models, in turn")
    parser.add_argument("--columns", action="store_true", help="audit: the cases without a model alone")
    words = parser.parse_args()
    torch.set_num_threads(1)
    where = words.root, words.seed, words.only
    if words.what == "build":
        build(*where, words.families.split(","))
    elif words.what == "audit":
        audit(*where, words.columns)
    else:
        table(*where)


if __name__ == "__main__":
    main()
