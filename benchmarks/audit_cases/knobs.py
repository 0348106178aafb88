"""Plants numbers at operations that no file of audit/faults/ plants, and shows what an audit locates.

python benchmarks/audit_cases/knobs.py plants --root R [--only NAME]     faulty samplers in bf16, two families
python benchmarks/audit_cases/knobs.py sound --root R --logs 40          sound logs, with --knobs

located  each operation is told, its layers, and its value within a tenth     seen    no cause is told
missed   the headline is rounding           wrong   another cause, one of two alone, or another known value

Nothing of audit/knobs/ plants: a plant changes a weight, a field of a module, or is a hook of its own.
"""

import argparse
import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from models import world
from run import audit_of, cause_text, without_a_name, write_log
from sound_logs import Kind, Models, rows_of, untried
from transformers import AttentionInterface
from zerokl.audit.faults.planting.sampling import row
from zerokl.audit.faults.planting.world import World

FAMILIES = ("qwen3", "gpt_neox")
SEED = 11
ALL = "in all layers"
Told = tuple[str, str, float]  # operation, layers and value, as a report tells them; 0 where it has no value


@dataclass(frozen=True)
class Plant:
    """A change of the sampler's model, and what may be told of each part of it, any of which is right."""

    name: str
    family: str
    change: Callable[[torch.nn.Module], None]
    told: tuple[tuple[Told, ...], ...]

    @property
    def means(self) -> str:
        """What its value is known as; empty where it is no known number."""
        return _MEANS.get(self.name, "")


def layers(model):
    """The layers of a model."""
    return model.model.layers if hasattr(model, "model") else model.gpt_neox.layers


def attention(layer):
    """The attention of a layer."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


def in_layers(change: Callable[[torch.nn.Module], None], *only: int) -> Callable:
    """A change of each layer. only: of these layers."""

    def of_model(model) -> None:
        for i, layer in enumerate(layers(model)):
            if not only or i in only:
                change(layer)

    return of_model


def times(factor: float, path: str, *only: int) -> Callable:
    """A hook on modules of the layers that multiplies what they return. only: these layers."""
    return hooked(path, lambda y: y * factor, *only)


def hooked(path: str, change: Callable[[torch.Tensor], torch.Tensor], *only: int) -> Callable:
    """A hook on modules of the layers that changes what they return. only: these layers."""

    def hook(layer) -> None:
        layer.get_submodule(path).register_forward_hook(lambda _m, _i, y: change(y))

    return in_layers(hook, *only)


def weighted(path: str, change: Callable[[torch.Tensor], object], *only: int) -> Callable:
    """A change, in place, of the weight [N, K] or [N] of modules of the layers. only: these layers."""
    return in_layers(lambda layer: change(layer.get_submodule(path).weight.data), *only)


def scaling(factor: float, *only: int) -> Callable:
    """Other scores of attention."""

    def change(layer) -> None:
        attention(layer).scaling *= factor

    return in_layers(change, *only)


def values(factor: float) -> Callable:
    """The value rows of a fused projection, [heads, 3, D] of its output."""

    def change(layer) -> None:
        qkv = layer.attention.query_key_value
        for x in (qkv.weight, qkv.bias):
            x.data.view(6, 3, 16, *x.shape[1:])[:, 2] *= factor

    return in_layers(change)


def field(path: str, name: str, value: float) -> Callable:
    """Another number in a field of a module."""
    return in_layers(lambda layer: setattr(layer.get_submodule(path), name, value))


def plus(path: str, value: float) -> Callable:
    """A weight with a number added to it."""
    return weighted(path, lambda w: w.add_(value))


def fp8(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x through e4m3. largest: of what shares a scale."""
    scale = largest.to(x.dtype) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def fp8_weights(path: str) -> Callable:
    """Weights through e4m3, with a scale for each tensor."""
    return weighted(path, lambda w: w.copy_(fp8(w, w.abs().max())))


def fp8_outputs(path: str) -> Callable:
    """Outputs through e4m3, with a scale for each token."""
    return hooked(path, lambda y: fp8(y.float(), y.float().abs().amax(-1, keepdim=True)).to(y.dtype))


def embedded(factor: float) -> Callable:
    """Embeddings times a number."""
    return lambda model: (
        model.get_input_embeddings().register_forward_hook(lambda _m, _i, y: y * factor) and None
    )


def stretched(factor: float) -> Callable:
    """Positions of the rotation times a number."""

    def change(model) -> None:
        rotary = next(m for m in model.modules() if "Rotary" in type(m).__name__)
        plain = rotary.forward
        rotary.forward = lambda x, position_ids, *more: plain(x, position_ids.float() * factor, *more)

    return change


def attending(
    name: str,
    layer: int | None,
    read_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    cap: float = 0.0,
) -> Callable:
    """Attention of a layer (None: of all) that reads other tokens, or whose scores are capped.

    read_of: of places of queries [T, 1] and of keys [S] -> which are read [T, S].
    """

    def attend(module, q, k, v, attention_mask, scaling=None, dropout=0.0, **kwargs):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(2, 3)).float() * scaling
        T, S = scores.shape[-2:]
        here, there = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
        read = there <= here
        if layer in (None, module.layer_idx):
            scores = cap * torch.tanh(scores / cap) if cap else scores
            read &= read_of(here, there) if read_of else read
        p = scores.masked_fill(~read, -torch.inf).softmax(-1).to(q.dtype)
        return (p @ v).transpose(1, 2).contiguous(), None

    def change(model) -> None:
        AttentionInterface.register(f"planted_{name}", attend)
        model.config._attn_implementation = f"planted_{name}"

    return change


def window(size: int, layer: int) -> Callable:
    """Attention of one layer that reads few tokens."""
    return attending(f"window_{size}_{layer}", layer, lambda here, there: there > here - size)


def both(*changes: Callable) -> Callable:
    """Several changes at once."""
    return lambda model: [change(model) for change in changes] and None


def _told(where: str, value: float, *operations: str) -> tuple[Told, ...]:
    """Operations any of which may be told, in the same layers with the same value."""
    return tuple((operation, where, value) for operation in operations)


_SCORES, _VALUES = "attention's scores", "attention's values"
# Modules of a layer in transformers.
_Q_NORM, _K_NORM = "self_attn.q_norm", "self_attn.k_norm"
_V, _O = "self_attn.v_proj", "self_attn.o_proj"
_UP, _GATE, _DOWN, _ACT = "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.act_fn"
_IN, _POST = "input_layernorm", "post_attention_layernorm"
_QKV, _DENSE, _H, _OUT = (
    "attention.query_key_value",
    "attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)
# A change, and for each part of it what may be told.
_Table = dict[str, tuple[Callable, *tuple[tuple[Told, ...], ...]]]
# What the values of some plants are known as. The values of the others are no known numbers.
_MEANS = {
    "scores by YaRN's factor": "YaRN's attention factor for a scaling of 8, squared",
    "an MLP left out": "left out",
    "positions halved": "linear scaling by 2",
    "positions stretched": "linear scaling by 4",
}


def _of_qwen3() -> _Table:
    """Changes of the Qwen3: queries and keys have norms, so their projections have no scale."""
    scores, values = (_SCORES, _Q_NORM, _K_NORM), (_VALUES, _V, _O, _IN)
    mlp = (_UP, _DOWN, _ACT)
    return {
        "scores doubled": (scaling(2.0), _told(ALL, 2.0, *scores)),
        "scores by YaRN's factor": (scaling(1.459), _told(ALL, 1.459, *scores)),
        "scores of a layer": (scaling(1.6, 1), _told("in layer 1", 1.6, *scores)),
        "values": (times(1.15, _V), _told(ALL, 1.15, *values)),
        "attention's output of a layer": (times(0.7, _O, 2), _told("in layer 2", 0.7, *values)),
        "last MLP's output": (times(0.75, _DOWN, 2), _told("in layer 2", 0.75, *mlp)),
        "gate": (times(1.25, _GATE), _told(ALL, 1.25, _GATE)),
        "an MLP left out": (times(0.0, _DOWN, 1), _told("in layer 1", 0.0, *mlp, _GATE, _POST)),
        "embeddings": (embedded(1.6), _told("", 1.6, "embed_tokens")),
        "norm's weight": (plus(_POST, 0.3), _told(ALL, 0.3, _POST)),
        "positions halved": (stretched(0.5), _told("", 0.5, "positions")),
        "a window in a layer": (window(8, 1), _told("in layer 1", 8.0, "attention that reads")),
        "fp8 weights of a projection": (
            fp8_weights(_DOWN),
            _told(ALL, 0.0, f"weight of {_DOWN} rounded to fp8"),
        ),
        "two at once": (
            both(scaling(1.6), times(0.7, _DOWN, 2)),
            _told(ALL, 1.6, *scores),
            _told("in layer 2", 0.7, *mlp),
        ),
    }


def _of_gpt_neox() -> _Table:
    """Changes of the GPT-NeoX: queries, keys and values are one projection."""
    epsilon, cap = f"{_POST} with an epsilon", "soft-capped"
    return {
        "scores halved": (scaling(0.5), _told(ALL, 0.5, _SCORES)),
        "scores of a layer": (scaling(1.7, 0), _told("in layer 0", 1.7, _SCORES)),
        "values of a fused projection": (values(1.2), _told(ALL, 1.2, _VALUES)),
        "attention's output": (times(0.8, _DENSE), _told(ALL, 0.8, _DENSE, _VALUES)),
        "MLP's output of a layer": (times(1.3, _OUT, 1), _told("in layer 1", 1.3, _OUT)),
        "MLP's input": (times(1.2, _H), _told(ALL, 1.2, _H)),
        "fused projection": (times(1.2, _QKV, 2), _told("in layer 2", 1.2, _QKV)),
        "norm's epsilon": (field(_POST, "eps", 0.5), _told(ALL, 0.5, epsilon)),
        "activation": (times(0.8, "mlp.act"), _told(ALL, 0.8, "mlp.act", _OUT)),
        "positions stretched": (stretched(0.25), _told("", 0.25, "positions")),
        "scores capped in a layer": (attending("cap", 1, cap=1.0), _told("in layer 1", 1.0, cap)),
        "fp8 outputs": (fp8_outputs(_DENSE), _told(ALL, 0.0, f"output of {_DENSE} rounded to fp8")),
    }


def plants() -> Iterator[Plant]:
    """All plants: kinds that no file of audit/faults/ has."""
    for family, table in (("qwen3", _of_qwen3()), ("gpt_neox", _of_gpt_neox())):
        for name, (change, *told) in table.items():
            yield Plant(name, family, change, tuple(told))


def judged(plant: Plant, report: dict) -> str:
    """The word for a report."""
    if word := without_a_name(report):
        return word
    text = report["cause"]["text"]
    text, brackets = text.split(" It explains")[0], r" \(([^()]*)\)"
    known = [x for x in re.findall(brackets, text) if not x.startswith("e4m3")]
    text = re.sub(brackets, "", text)
    is_whole = all(any(_is_told(x, text) for x in part) for part in plant.told)
    return "located" if is_whole and all(_is_meant(plant, x) for x in known) else "wrong"


def _is_meant(plant: Plant, known: str) -> bool:
    """Whether the words of a known value are those of the plant."""
    return bool(plant.means) and re.sub(r"^near [^,]*, ", "", known) == plant.means


def _is_told(told: Told, text: str) -> bool:
    """Whether a text tells an operation, its layers and its value."""
    operation, where, value = told
    for part in re.split(r"; and |, or |; not told from ", text):
        if operation not in part or (where and not re.search(rf"{where}\b", part)):
            continue
        numbers = [
            float(x) for x in re.findall(r"(?:times|epsilon of|with|reads|at) ([+-]?[\d.e-]+\d|\d)", part)
        ]
        if not value and ("rounded" in operation or 0.0 in numbers):
            return True
        if any(abs(x - value) <= 0.1 * abs(value) for x in numbers):
            return True
    return False


def show_plants(
    plants: Iterable[tuple[str, Plant]],
    world_of: Callable[[Plant], World],
    folder: Path,
    only: str,
    judged: Callable[[Plant, dict], str],
) -> None:
    """Plant, audit, and print each word, then the counts: a faulty sampler in bf16, a sound trainer in fp32.

    plants: each with its title. folder: of the logs. only: a part of a title. judged: the word of a report.
    """
    counts: Counter[str] = Counter()
    for title, plant in plants:
        if only not in title:
            continue
        w = world_of(plant)
        model = copy.deepcopy(w.bf16)
        plant.change(model)
        path = folder / f"{title.replace(' ', '-')}.jsonl"
        write_log(path, [row(line, w.usual) for line in w.both(w.drawn(model=model))])
        start = time.process_time()
        report = audit_of(path, model=str(w.folder), dtype="float32")
        counts[word := judged(plant, report)] += 1
        print(
            f"{word:8} {time.process_time() - start:5.1f} s  {title}: {cause_text(report)[:330]}", flush=True
        )
    print(dict(counts))


def run_sound(root: Path, logs: int, part: int, parts: int) -> None:
    """Sound logs beside their model, their knobs tried whatever fits. part, parts: as of the plants."""
    models, counts, folder = Models(root), Counter(), root / "knobs-sound"
    for number in range(part, logs, parts):
        kind = Kind(number)
        kind.family = FAMILIES[number % 2]
        path = folder / f"{number}.jsonl"
        write_log(path, rows_of(kind, models))
        version = {"weight_version": 5} if kind.shape == "versions" else {}
        model = str(models.world(kind.family, number).folder)
        report = audit_of(path, model=model, dtype=kind.trainer, knobs=True, **version)
        columns = [report["hypotheses"], report.get("trainer_column") or {"rows": []}]
        knobs = [
            x for column in columns for x in column["rows"] if x["name"].startswith("knob") and x["fits"]
        ]
        told = report["cause"]["kind"].startswith("knob") or knobs
        reasons = untried(report)
        counts["alarm" if told else "untried" if reasons else "clear"] += 1
        if reasons:
            print(f"{number} untried: {kind}\n    {' '.join(reasons)}", flush=True)
        if told:
            print(
                f"{number}: {kind}\n    {report['cause']['text'][:300]} {[x['what'] for x in knobs]}",
                flush=True,
            )
    print(dict(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["plants", "sound"])
    parser.add_argument("--root", type=Path, default=Path("runs/audit-cases"))
    parser.add_argument("--only", default="", help="plants: a part of family and name")
    parser.add_argument("--logs", type=int, default=40)
    parser.add_argument("--part", type=int, default=0, help="of --parts: which share of the cases")
    parser.add_argument("--parts", type=int, default=1)
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.what == "plants":
        worlds = {family: world(family, SEED, words.root / "models") for family in FAMILIES}
        chosen = [(f"{x.family} {x.name}", x) for x in plants()][words.part :: words.parts]
        show_plants(chosen, lambda x: worlds[x.family], words.root / "knobs", words.only, judged)
    else:
        run_sound(words.root, words.logs, words.part, words.parts)


if __name__ == "__main__":
    main()
