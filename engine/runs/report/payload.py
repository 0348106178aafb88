"""What the page shows of runs, as plain values for JSON: figures, settings, ledgers and differences."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....files.reading import json_number, printable, read_json
from ....verify.compare_runs import compare_runs
from ....verify.ledger import LedgerFile
from ....verify.run_files import checkpoint_folders
from ...config.run_config import Config
from ...tasks.tokenizer import Tokenizer
from ..ablations.effects import COMPARED, LEAST_SEEDS, effects, rank, verdict
from ..ablations.figures import cell_result, collapse_step, summarise
from ..checks.run_diff import first_rollout
from ..folder import FAILED, ROLLOUTS, finite
from ..held_out import ACCURACY, MEAN_REWARD, SAMPLER_REWARD
from ..ledger_head import flat_settings, is_free
from ..loaded import LoadedRun, load_run
from .charts import ALSO, CHARTS, SECTIONS, STATIONS
from .rollouts import RolloutLog

# The figures of a combination's runs that the page draws.
_ENDS = (
    "reward_last10",
    "training_last",
    "sampler_held_out_last",
    "held_out_last",
    "mismatch_k3_sequence_mean",
)


class Source:
    """A run as the page reads it, again and again while the run goes on.

    label: its name on the page. factors: of a cell of an ablation, the settings of its combination. Runs with
    the same factors are one `group`, drawn as one line with a band; a run without has a line of its own.
    """

    def __init__(self, path: Path, label: str, factors: Mapping[str, str] | None = None):
        self.path, self.label, self.factors = path, label, dict(factors or {})
        self.group = "" if factors is None else describe(factors)
        self.log = RolloutLog(path / ROLLOUTS)
        self._tokenizer: Tokenizer | None = None
        self._pieces: dict[int, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since. Raises ValueError for files that cannot be read."""
        self.run: LoadedRun = load_run(self.path)
        self.ledger = _ledger(self.run)
        self.log.read()

    def pieces(self) -> dict[int, str]:
        """The text of each token that occurs; empty where the tokenizer is not to be found any more."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self.run)
        if self._tokenizer is not None:
            new = sorted(self.log.ids - self._pieces.keys())
            self._pieces |= dict(zip(new, self._tokenizer.pieces(new), strict=True))
        return self._pieces

    def payload(self) -> dict[str, Any]:
        """Everything about the run except its rollouts."""
        run = self.run
        metrics = {
            name: [_number(x) for x in run.metrics[name]]
            for name in (*ALSO, *(chart.metric for chart in CHARTS), *(station[0] for station in STATIONS))
            if name in run.metrics and name != MEAN_REWARD
        }
        return {
            "name": self.label,
            "group": self.group,
            "factors": self.factors,
            "path": str(self.path),
            "status": _status(run),
            "steps": run.steps,
            "planned": run.config.steps,
            "exact": run.config.exact,
            "figures": _figures(run),
            "facts": _facts(run),
            "metrics": metrics,
            "held_out": [(done, _number(x)) for done, x in run.held_out],
            "ledger": _ledger_facts(self.ledger, run),
            "examples": self.log.history.examples(),
            "commands": _commands(run, self.ledger),
            "pieces": self.pieces(),
            "rollouts": {
                "rows": self.log.rows,
                "left_out": self.log.left_out,
                "damage": self.log.damage,
            },
        }


def payload(sources: Sequence[Source], title: str) -> dict[str, Any]:
    """Everything that the page shows, except the rollouts."""
    shown = {
        "title": title,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "charts": [
            {"section": name, **asdict(chart)} for name, charts in SECTIONS.items() for chart in charts
        ],
        "stations": STATIONS,
        "runs": [source.payload() for source in sources],
        "settings": settings_table([source.run for source in sources]),
        "comparisons": [_comparison(sources[0], source) for source in sources[1:]],
        "factors": factors_of(sources),
        "least_seeds": LEAST_SEEDS,
    } | _ablation(sources)
    return finite(shown)  # rewards may be infinite, and so may sums of them


def factors_of(sources: Sequence[Source]) -> list[str]:
    """The factors of an ablation that have several values; none where not all runs are cells of one grid."""
    first = sources[0].factors.keys()
    if any(source.factors.keys() != first for source in sources):
        return []
    return [name for name in first if len({source.factors[name] for source in sources}) > 1]


def _ablation(sources: Sequence[Source]) -> dict[str, Any]:
    """Of the cells of one grid: what each combination earned, and what differs between values of a factor.

    The differences that exceed the seeds' spread come first.
    """
    axes = {(*source.factors,) for source in sources}
    if len(sources) < 2 or len(axes) > 1 or not all(source.group for source in sources):
        return {"effects": [], "combinations": []}
    cells = [cell_result(source.path, source.factors, source.run.config.seed) for source in sources]
    combinations = summarise(cells)
    return {
        "effects": [
            effect | {"name": COMPARED[effect["figure"]], "verdict": verdict(effect)}
            for effect in sorted(effects(combinations), key=rank)
        ],
        "combinations": [
            {
                "name": describe(c["settings"]),
                "settings": c["settings"],
                "mean": {figure: _number(c[figure]["mean"]) for figure in _ENDS},
                "runs": [{figure: _number(run[figure]) for figure in _ENDS} for run in c["runs"]],
            }
            for c in combinations
        ],
    }


def settings_table(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """A row for each key: its value in each run, whether they differ, and whether it decides bits.

    changed: whether a run has another value than the default.
    """
    flat, default = [flat_settings(run.config) for run in runs], flat_settings(Config())
    return [
        {
            "key": key,
            "values": [_shown(settings.get(key)) for settings in flat],
            "differs": any(settings.get(key) != flat[0].get(key) for settings in flat),
            "changed": any(settings.get(key) != default.get(key) for settings in flat),
            "decides": not all(is_free(key, run.config) for run in runs),
        }
        for key in {key: None for settings in flat for key in settings}
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _number(x: Any) -> Any:
    """x with seven significant digits, which is enough to draw; null where JSON has no number for it."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.7g}") if math.isfinite(x) else None


def _finite(run: LoadedRun, name: str) -> list[float]:
    return [x for x in run.metrics.get(name, []) if isinstance(x, int | float) and math.isfinite(x)]


def _figures(run: LoadedRun) -> dict[str, Any]:
    """The figures at the top of the page.

    seconds: of the whole process where it has ended. step_s: of a step, without set-up, evaluations and
    checkpoints.
    """
    rewards, held_out = _finite(run, "reward/mean"), [x for _, x in run.held_out]
    drawn, tokens = _finite(run, "tokens"), run.metrics.get("tokens", [])
    equal = run.metrics.get("mismatch/frac_equal", [])
    seconds = sum(_finite(run, "time/sample_s")) + sum(_finite(run, "time/train_s"))
    return {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": sum(rewards[-5:]) / len(rewards[-5:]) if rewards else None,
        "collapse_step": collapse_step(rewards),
        "no_signal": sum(norm == 0.0 for norm in _finite(run, "grad_norm")),
        "held_out_first": held_out[0] if len(held_out) > 1 else None,
        "held_out_last": held_out[-1] if held_out else None,
        "sampler_held_out_last": next(reversed(_finite(run, SAMPLER_REWARD)), None),
        "held_out_is_accuracy": ACCURACY in run.metrics,
        "tokens": int(sum(drawn)),
        "unequal": sum(
            round(n * (1 - share))
            for n, share in zip(tokens, equal, strict=True)
            if math.isfinite(n) and math.isfinite(share)
        ),
        "max_abs": max(_finite(run, "mismatch/max_abs"), default=None),
        "k3": _number(sum(k3) / len(k3)) if (k3 := _finite(run, "mismatch/k3")) else None,
        "skipped": int(sum(_finite(run, "scaling/skipped"))),
        "tokens_per_s": sum(drawn) / seconds if seconds else None,
        "step_s": seconds / run.steps if run.steps else None,
        "seconds": run.summary["seconds"] if run.summary else seconds,
    }


def _facts(run: LoadedRun) -> list[str]:
    """What the run was, in a few words each."""
    config = run.config
    cuts = config.loss.cuts(config.num_generations)
    answers = f", each with {len(cuts.budgets)} x {cuts.answers} answers" if cuts else ""
    return [
        f"task {config.task.name}",
        config.dtype,
        f"loss {config.loss.preset}",
        f"sampler {config.sampler}",
        f"{config.prompts} prompts x {config.num_generations} completions a step{answers}",
        f"seed {config.seed}",
    ]


def _status(run: LoadedRun) -> dict[str, str]:
    """How the run ended: `state` is done, stopped or open, and `text` says more."""
    if run.summary:
        return {"state": "done", "text": f"finished, {run.steps} steps"}
    if (run.path / FAILED).exists():
        reason = read_json(run.path / FAILED)["error"]
        return {"state": "stopped", "text": f"ended by itself after {run.steps} steps: {reason}"}
    if mismatch := _mismatch(run):
        return {"state": "stopped", "text": mismatch}
    return {"state": "open", "text": f"{run.steps} of {run.config.steps} steps, running or interrupted"}


def _mismatch(run: LoadedRun) -> str:
    """The place of the mismatch that stopped the run; empty where none did."""
    reports = [read_json(f) for f in run.path.glob("mismatch*/mismatch.json")]
    last = max(reports, key=lambda report: report["step"], default=None)
    if last is None or last["step"] < run.steps:
        return ""  # the run went on after it
    return (
        "stopped before the update of step {step}: at prompt {prompt}, sample {sample}, position {position} "
        "the trainer's log-probability is {trainer!r}, the sampler's {sampler!r}; "
        "{unequal} of {compared} tokens of this step are unequal".format(
            **{name: json_number(value) for name, value in last.items()}
        )
    )


def _ledger(run: LoadedRun) -> LedgerFile | None:
    try:
        return run.ledger
    except FileNotFoundError:
        return None


def _ledger_facts(ledger: LedgerFile | None, run: LoadedRun) -> dict[str, Any]:
    if ledger is None or ledger.head is None:
        damage = (ledger.damage if ledger else None) or "there is no ledger"
        return {"fingerprint": "", "weights": "", "steps": 0, "damage": damage, "environment": {}}
    summary = run.summary or {}
    damage = ledger.damage or ""
    if not damage and summary and summary["fingerprint"] != ledger.chain:
        damage = "the fingerprint in summary.json is not the ledger's last chain value"
    return {
        "fingerprint": ledger.chain,
        "weights": summary.get("weights", ""),
        "steps": len(ledger.lines),
        "damage": damage,
        "data": ledger.head.data,
        "first_weights": ledger.head.weights,
        "environment": {
            key: str(value)
            for key, value in ledger.head.environment.items()
            if not key.startswith("process.")
        },
        "resumed": [entry["step"] for entry in ledger.resumed],
    }


def _commands(run: LoadedRun, ledger: LedgerFile | None) -> list[dict[str, str]]:
    """What a person types next."""
    path = run.path
    again = f"{path}-again"
    commands = []
    if not run.summary:
        commands.append(
            {"what": "Go on with this run, to the bit", "command": f"zerokl train --resume {path}"}
        )
    commands += [
        {
            "what": "Run it again",
            "command": f"zerokl train {path / 'config.toml'} --run_dir {again}",
        },
        {"what": "Compare the two, bit for bit", "command": f"zerokl diff {path} {again}"},
        {
            "what": "Check it: chain, files, three steps and the last one done again",
            "command": f"zerokl verify run {path}",
        },
    ]
    return commands if ledger is not None else commands[:-2]


def _comparison(a: Source, b: Source) -> dict[str, Any]:
    """The first difference of two runs, as `zerokl diff` finds it."""
    entry: dict[str, Any] = {"runs": [a.label, b.label], "explains": [], "lawful": [], "place": ""}
    damaged = next((s for s in (a, b) if s.ledger is None or s.ledger.damage or s.ledger.head is None), None)
    if damaged is not None:
        return entry | {"equal": False, "text": f"not compared: the ledger of {damaged.label} is not whole"}
    result = compare_runs(a.ledger, b.ledger)
    return entry | {
        "equal": result.difference is None,
        "text": "; ".join(result.lines),
        "place": first_rollout(a.path, b.path, result.first_step),
        "explains": result.environment,
        "lawful": result.lawful,
    }


def _tokenizer(run: LoadedRun) -> Tokenizer | None:
    """The tokenizer of the newest checkpoint that has a usable one, or else of the run's first model."""
    for folder in (*checkpoint_folders(run.path), run.path / "base", Path(run.config.model)):
        if (folder / "tokenizer.json").exists():
            try:
                return Tokenizer(folder, 1 << 31)
            except ValueError:
                continue  # a damaged one ends no report; resume and verify run name it
    return None


def page_title(paths: Sequence[Path]) -> str:
    """The title of the page: the names of the runs, or how many they are."""
    names = [printable(path.resolve().name, keep="") for path in paths]
    return " · ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} other runs"


def labels(paths: Sequence[Path]) -> list[str]:
    """A short name for each run: the folder's, with folders above it where two are called the same."""
    parts, names = [path.resolve().parts for path in paths], []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def describe(settings: Mapping[str, str]) -> str:
    """The label of a combination of an ablation."""
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in settings.items()) or "all runs"
