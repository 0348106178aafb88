"""Products of features: every pair of settings that go together is run, and read again by every reader.

A covering array (allpairspy) holds each pair of values of SETTINGS in some row. A row is a run of two steps.
A pair that a rule refuses is in no row; that it is refused in one line is a test of its own. Actors of a pool
are threads here. What vLLM draws is run by tests/vllm/test_products.py.

A run with exact = false and a cut (top_k, top_p, min_p) may hold a trainer logprob of -infinity in
rollouts.jsonl.
"""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, islice, product
from pathlib import Path
from random import Random

import pytest
from allpairspy import AllPairs
from zerokl.audit.knobs import column
from zerokl.cli import main
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs import samplers
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import train

from tests.presets import DRAWN_PRESETS
from tests.random_model import EXPERTS, ONE_LAYER, random_model
from tests.thread_actors import ThreadCluster

STEPS = 2
# The first value of each is the default of a run here. What refuses others comes first: allpairspy chooses
# the values of a row in this order, and asks the filter after each.
SETTINGS: OrderedDict[str, list] = OrderedDict(
    {
        "exact": [True, False],
        "loss.preset": [*DRAWN_PRESETS, "brpo", "dpo", "verifree"],
        "task": ["add", "turns"],
        "num_generations": [3, 1],
        "model": ["dense", "experts"],
        "sampler": ["native", "hf", "vllm-zerokl", "vllm"],
        "max_staleness": [0, 2, "2, lagged"],
        "pool.engine": ["", "ray"],
        "precision.sampler_dtype": ["", "float32", "bfloat16"],
        "precision.sampler_head_dtype": ["", "float32"],
        "precision.sampler_cache_dtype": ["", "bfloat16"],
        "perturb.logit_noise": [0.0, 0.1],
        "perturb.round_weights": ["", "float8_e4m3fn"],
        "perturb.weights": ["", "int8/row"],
        "perturb.kv": ["", "float8_e4m3fn/token_head"],
        "perturb.top_p": [0.0, 0.8],
        "perturb.top_k": [0, 3],
        "perturb.min_p": [0.0, 0.1],
        "perturb.temperature": [0.0, 1.3],
        "perturb.delay": [0, 1],
        "dtype": ["float32", "bfloat16", "float16"],
        "precision.head_dtype": ["compute", "float32"],
        "precision.cache_dtype": ["compute", "bfloat16"],
        "precision.weights": ["", "float8_e4m3fn/block32"],
        "precision.kv": ["", "float8_e5m2/unit"],
        "precision.attention": ["vllm", "chunked-512"],
        "precision.scaling": ["auto", "static"],
        "loss.max_resamples": [None, 2],
        "loss.kl_coef": [0.0, 0.1],
        "loss.kl": ["k3", "k1", "k2"],
        "loss.kl_in": ["loss", "reward"],
        "loss.surrogate": [None, "toy:ppo"],
        "updates_per_rollout": [1, 2],
        "micro_batch": [0, 1, 5],
        "shards_in_flight": [1, 2, 4],
        "virtual_shards": [4, 1, 8],
        "workers": [1, 2],
        "recompute": ["none", "layer"],
        "native.max_concurrency": [64, 2],
        "native.max_batch_tokens": [0, 3],
        "sampling.temperature": [1.0, 0.7],
        "sampling.top_p": [1.0, 0.9],
        "sampling.top_k": [0, 5],
        "sampling.min_p": [0.0, 0.05],
        "sampling.logit_bias": [{}, {"20": 3.0, "1": -2.0}],
        "sampling.allowed_token_ids": [None, list(range(1, 60, 2))],
        "evaluation.every": [0, 1],
        "checkpoint.every": [0, 1],
        "ledger.detail": ["full", "roots", "gradients"],
        "ledger.state_every": [1, 2],
        "lora.rank": [0, 2],
        "frozen": [[], ["model.layers.0.*", "model.norm.*"], ["model.embed_tokens.*"]],
        "tracking": [[], ["tensorboard"]],
        "optimizer.schedule": ["constant", "linear"],
        "parallel.engine": ["replicated", "fsdp"],
    }
)
# What a preset needs beside itself; DPO needs pairs, too.
NEEDS = {
    "brpo": {"task__answer_prefix": "=", "loss__budgets": [3, 8], "loss__answers": 2},
    "verifree": {"task__answer_prefix": "=", "task__reward": ""},
}
TURNS = {"task__name": "acts:echo", "task__options": {}, "task__reward": ""}
TURNS |= {"environment__processes": 1, "environment__max_turns": 2}
# Pairs that no rule of the configuration refuses: what the task, or the model's folder, has to do with it.
REFUSED_BY_WHAT_IS_LOADED = [
    ({"task": "turns", "loss.preset": "pass_at_k"}, "does not say that it is 0 or 1"),
    ({"task": "turns", "loss.preset": "brpo"}, "no answer that could follow one completion"),
    ({"task": "turns", "loss.preset": "verifree"}, "no answer that could follow one completion"),
    ({"model": "experts", "sampler": "vllm"}, "does not take new weights of a mixture of experts"),
]
Row = dict[str, object]
Pair = tuple[tuple[str, int], tuple[str, int]]  # of settings, each with the place of its value


@pytest.fixture(scope="module")
def make(config, tmp_path_factory) -> Callable[[Row], Config]:
    """The configuration of a row, or of a part of one, with the smallest models."""
    dense = ONE_LAYER | {"head_dim": 32}  # heads that vLLM's own attention takes
    widths = {"dense": dense, "experts": EXPERTS | dense | {"mlp_only_layers": []}}
    models = {name: random_model(tmp_path_factory.mktemp(name), w) for name, w in widths.items()}
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"{a}+1=", "chosen": f"{a + 1}", "rejected": f"{a}no"} for a in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"file": str(file), "held_out": 2, "chat": False}
    needs = NEEDS | {"dpo": {"task__name": "pairs", "task__options": options, "task__reward": ""}}

    def make(row: Row) -> Config:
        chosen = {k.replace(".", "__"): v for k, v in row.items() if v is not None}
        preset, several_turns = row.get("loss.preset"), chosen.pop("task", "add") == "turns"
        chosen["model"] = models[row.get("model", "dense")]
        if row.get("max_staleness") == "2, lagged":
            chosen |= {"max_staleness": 2, "staleness_schedule": "lagged"}
        if preset == "dpo" and row.get("num_generations", 3) == 3:
            chosen |= {"num_generations": 2}
        chosen |= needs.get(preset, {}) | (TURNS if several_turns else {})
        return config(**{"steps": STEPS, "tracking": [], **chosen})

    return make


@pytest.fixture(autouse=True)
def _turns_and_actors(monkeypatch):
    monkeypatch.setattr(column, "_MOST_WEIGHTS", 0)  # that an audit tries knobs is of tests/audit
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rollout"))
    monkeypatch.setattr(samplers, "RayCluster", lambda pool, blueprint, kept: ThreadCluster(blueprint))
    monkeypatch.setattr(run_module, "require_ray", lambda: None)


def allowed(make: Callable[[Row], Config], row: Row) -> bool:
    """Whether these settings are run."""
    if any(words.items() <= row.items() for words, _ in REFUSED_BY_WHAT_IS_LOADED):
        return False
    try:
        check_settings(make(row), "cpu")
    except ValueError:
        return False
    return True


def pairs(row: Row) -> Iterator[Pair]:
    """All pairs of values of a row."""
    return combinations([(key, SETTINGS[key].index(value)) for key, value in row.items()], 2)


def covering_rows(make: Callable[[Row], Config]) -> Iterator[Row]:
    """Rows that hold every pair of values that go together."""
    seen: set[Pair] = set()
    for values in AllPairs(list(SETTINGS.values()), filter_func=lambda part: allowed(make, named(part))):
        seen.update(pairs(named(values)))
        yield named(values)
    # allpairspy ends with a row that holds no new pair, and with a filter this is too early.
    places = [[(key, i) for i in range(len(values))] for key, values in SETTINGS.items()]
    missing = [(a, b) for x, y in combinations(places, 2) for a in x for b in y if (a, b) not in seen]
    while missing:
        row, missing = joined(make, missing)
        if row:
            yield row


def named(values: list) -> Row:
    """The values of a row, or of its first settings, by name."""
    return dict(zip(SETTINGS, values, strict=False))


def joined(make: Callable[[Row], Config], missing: list[Pair]) -> tuple[Row | None, list[Pair]]:
    """A row with the first of these pairs and as many others as go with it, and the pairs that are left.

    No row where the first pair is refused with every default of exact and loss.preset.
    """
    defaults = named([values[0] for values in SETTINGS.values()])
    first, *others = missing
    for exact, preset in ((True, "pg"), (False, "pg"), (True, "reinforce++"), (False, "reinforce++")):
        chosen = {"exact": exact, "loss.preset": preset} | {key: SETTINGS[key][i] for key, i in first}
        if allowed(make, defaults | chosen):
            break
    else:
        return None, others
    left = []
    for pair in others:
        both = chosen | {key: SETTINGS[key][i] for key, i in pair}
        if all(both[key] == value for key, value in chosen.items()) and allowed(make, defaults | both):
            chosen = both
        else:
            left.append(pair)
    return defaults | chosen, left


def drawn_here(row: Row) -> bool:
    """Whether its sampler needs no vLLM."""
    return not row["sampler"].startswith("vllm")


def random_row(
    make: Callable[[Row], Config], chosen: Row, random: Random, kept: Callable[[Row], bool] = drawn_here
) -> Row:
    """A row with these settings and random others, as many as go together and are kept."""
    row = named([values[0] for values in SETTINGS.values()]) | chosen
    row["exact"] = chosen.get("exact", allowed(make, row))
    for key in random.sample(list(SETTINGS), len(SETTINGS)):
        other = row | {key: random.choice(SETTINGS[key])}
        if key not in chosen and kept(other) and allowed(make, other):
            row = other
    return row


def run_and_read(config: Config, folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Run twice, and read the run by diff, verify run, replay with a trace, report, load_run and audit."""
    a, b = folder / "a", folder / "b"
    for path in (a, b):
        train(config, path)
    commands = [
        ("diff", a, a),
        ("diff", a, b),
        ("verify", "run", a, "--replays", "1", "--draw", "0"),
        ("replay", a, "--step", STEPS - 1, "--trace", folder / "trace.safetensors"),
        ("report", a, "--out", folder / "report.html"),
    ]
    for words in commands:
        code = main([str(word) for word in words])
        assert code == 0, (words[0], *capsys.readouterr())
    run = load_run(a)
    rollouts = list(run.rollouts())
    assert run.steps == STEPS == len(run.ledger.lines)
    assert run.summary["fingerprint"] == run.ledger.lines[-1].chain
    assert len(rollouts) == STEPS * config.prompts * config.rollouts_per_prompt
    code = main([str(word) for word in audit_words(config, a, rollouts, folder)])
    errors = capsys.readouterr().err
    assert code == 0 or (code == 1 and differs(config)), errors


def audit_words(config: Config, run: Path, rollouts: list[dict], folder: Path) -> list[object]:
    """The command that audits a run's log: between its columns, or with the model that drew its first step.

    The log lacks only how it was drawn.
    """
    params = config.sampling.sampling_params
    drawn_with = params._asdict() | {"logit_bias": dict(params.logit_bias)}
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    (folder / "log.jsonl").write_text("".join(json.dumps(json.loads(x) | drawn_with) + "\n" for x in lines))
    words: list[object] = ["audit", folder / "log.jsonl", "--out", folder / "audit"]
    if all("trainer_logprobs" in rollout for rollout in rollouts):
        return words
    words += ["--model", config.model, "--weight_version", "0", "--dtype", config.dtype]
    head = config.precision.head_dtype
    return words if head == "compute" else [*words, "--head_dtype", head]


def differs(config: Config) -> bool:
    """Whether an audit may find a difference: the sampler has one, or numerics that no option sets."""
    precision = config.precision
    set_in_trainer = precision.cache_dtype != "compute" or precision.kv or precision.weights
    return not config.exact or bool(set_in_trainer or precision.attention != "vllm")


def run_rows(
    rows: Iterable[Row], make: Callable[[Row], Config], folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Run and read all rows. Fails with all that do not hold, each by its settings that are no defaults."""
    failures = []
    for number, row in enumerate(rows):
        target = folder / str(number)
        target.mkdir()
        try:
            run_and_read(make(row), target, capsys)
        except Exception as error:  # the next row is run too
            others = {key: value for key, value in row.items() if value != SETTINGS[key][0]}
            failures.append(f"{others}\n    {type(error).__name__}: {error}")
        shutil.rmtree(target)
    assert not failures, "\n".join(failures)


@pytest.mark.full
def test_a_sample_of_the_products_is_run_and_read_again(make, tmp_path, capsys):
    """The rows with the most new pairs, and among them one with two workers."""
    rows = list(islice(filter(drawn_here, covering_rows(make)), 12))
    alone = [row for row in rows if row["workers"] == 1]
    beside = [row for row in rows if row["workers"] == 2 and row["max_staleness"] == 0]
    run_rows([*alone[:5], *beside[:1]], make, tmp_path, capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    "chosen",
    [
        {"loss.preset": "dpo"},
        {"loss.preset": "verifree"},
        {"task": "turns"},
        {"pool.engine": "ray", "max_staleness": "2, lagged"},
    ],
    ids=str,
)
def test_a_row_of_each_kind_of_rollout_is_run_and_read_again(make, tmp_path, capsys, chosen):
    """With as many random settings as go together: the first covering rows have one or two of these."""
    run_rows([random_row(make, chosen, Random(0))], make, tmp_path, capsys)


@pytest.mark.proof
@pytest.mark.parametrize("share", range(8))
def test_every_pair_is_run_and_read_again(make, tmp_path, capsys, share):
    rows = filter(drawn_here, covering_rows(make))
    run_rows(islice(rows, share, None, 8), make, tmp_path, capsys)


@pytest.mark.full
def test_every_pair_is_in_a_row_or_is_refused_in_one_line(make, tmp_path):
    """A pair in no row is refused with every value of the settings that a refusal looks at."""
    seen = {pair for row in covering_rows(make) for pair in pairs(row)}
    defaults = named([values[0] for values in SETTINGS.values()])
    refused = set()
    for a, b in combinations([(key, i) for key, values in SETTINGS.items() for i in range(len(values))], 2):
        if a[0] == b[0] or (a, b) in seen:
            continue
        chosen = {key: SETTINGS[key][i] for key, i in (a, b)}
        if any(words.items() <= chosen.items() for words, _ in REFUSED_BY_WHAT_IS_LOADED):
            continue
        for exact, preset in product(SETTINGS["exact"], SETTINGS["loss.preset"]):
            row = defaults | {"exact": exact, "loss.preset": preset} | chosen
            with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the table has the words)
                train(make(row), tmp_path / "run")
            assert str(refusal.value).startswith("config: ")
            assert len(str(refusal.value).splitlines()) == 1
        refused.add((a, b))
    dpo = "loss.preset", SETTINGS["loss.preset"].index("dpo")
    assert {(dpo, ("task", 1)), (dpo, ("pool.engine", 1))} <= refused
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("chosen", "why"), [x for x in REFUSED_BY_WHAT_IS_LOADED if "sampler" not in x[0]], ids=str
)
def test_a_pair_that_the_task_refuses_is_refused_in_one_line(make, tmp_path, chosen, why):
    with pytest.raises(ValueError, match=why) as refusal:
        train(make(chosen), tmp_path / "run")
    assert len(str(refusal.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_sharded_weights_are_run_and_read_with_what_they_go_with(make, tmp_path, capsys, seed):
    row = random_row(make, {"parallel.engine": "fsdp"}, Random(seed))
    run_rows([row], make, tmp_path, capsys)
