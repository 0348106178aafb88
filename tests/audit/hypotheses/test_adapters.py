"""A log whose sampler had a fault in its LoRA adapter is named, and a sound one is not.

The faults are planted by plain torch on the weights, or on the decoder's products.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from zerokl.cli import main
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.runs.merge_adapter import merge_adapter
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.blocks import attention, mlp
from zerokl.model.checkpoint import load_decoder, stored_dtype
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.decoder import Decoder
from zerokl.model.lora import Lora
from zerokl.model.peft import write_adapter
from zerokl.model.weights import Layout

from tests.audit.hypotheses.planted import (
    SAMPLING,
    WIDTHS,
    Case,
    audit_words,
    draw,
    perturbed,
    report_of,
    write,
)
from tests.helpers import randn
from tests.random_model import random_model

LORA = Lora(4, 12.0)  # s = 3
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by the matrix's name in the checkpoint: B and A


def adapter(folder: Path, base: Path, seed: int) -> Path:
    """Write an adapter of random A and B as a folder of PEFT."""
    layout = AdapterLayout(adapted_layout(load_decoder(base, torch.float32).config, LORA), LORA)
    flat = torch.zeros(layout.numel)
    for i, view in enumerate(layout.views(flat).values()):
        view.copy_(randn(100 * seed + i, *view.shape) * 0.1)
    write_adapter(folder, layout, flat, str(base))
    return folder


def factors(folder: Path) -> Factors:
    stored = load_file(folder / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith("lora_A.weight")]
    return {
        f"{name.removeprefix('base_model.model.')}.weight": (
            stored[f"{name}.lora_B.weight"],
            stored[f"{name}.lora_A.weight"],
        )
        for name in names
    }


@pytest.fixture(scope="module")
def base(case, tmp_path_factory) -> Path:
    """The model with weights that bf16 holds."""
    folder = tmp_path_factory.mktemp("base") / "model"
    flat = case.decoder.flat.detach().bfloat16().float()
    write_checkpoint(folder, case.decoder.layout, flat, companions=case.folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[Path]:
    """Those of steps 3, 1 and 2; the first one is the model's."""
    root = tmp_path_factory.mktemp("adapters")
    return [adapter(root / f"step-{i}", base, i) for i in (3, 1, 2)]


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def merged(request, case, base, adapters, tmp_path_factory) -> Case:
    """The trainer's model: the base with the first adapter merged in, stored in this dtype."""
    folder = tmp_path_factory.mktemp("merged") / "model"
    merge_adapter(adapters[0], folder, str(base), request.param)
    return Case(folder, load_decoder(folder, torch.float32), case.rollouts)


def of_weights(base: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> list[Rollout]:
    """What a sampler draws in fp32 whose weights are `change` of the base's."""
    decoder = load_decoder(base, torch.float32)
    flat = decoder.flat.detach().clone()
    change(decoder.layout.checkpoint_views(flat))
    return draw(Decoder(decoder.config, flat, decoder.layout))


def add(views: dict[str, torch.Tensor], parts: Factors, s: float, dtype: torch.dtype) -> None:
    for name, (b, a) in parts.items():
        views[name].copy_((views[name].double() + s * (b.double() @ a.double())).to(dtype))


def found_in(merged: Case, drawn: list[Rollout], adapters: list[Path], tmp_path: Path, **more) -> dict | None:
    log = write(tmp_path / "log.jsonl", drawn)
    more = {"adapter": tuple(map(str, adapters))} | more
    return report_of(merged, log, **more)["hypotheses"]["found"]


SCALES = {  # alpha = 12 and rank 4, so s = 3
    "s = 1": 1.0,
    "s = 1 / rank": 0.25,
    "s = alpha": 12.0,
    "s = alpha / sqrt(rank)": 6.0,
    "s = alpha / (rank sqrt(rank))": 1.5,
}


@pytest.mark.parametrize("words", SCALES)
def test_another_scale_is_named(merged, base, adapters, tmp_path, words):
    dtype = stored_dtype(merged.folder)
    drawn = of_weights(base, lambda views: add(views, factors(adapters[0]), SCALES[words], dtype))
    named = found_in(merged, drawn, adapters, tmp_path)
    assert named["name"] == "adapter scaled otherwise"
    assert named["what"].endswith(words)
    assert named["share_left"] < 0.01


def test_a_stale_adapter_is_named(merged, base, adapters, tmp_path):
    """All adapters lie in one folder, as the checkpoints of a run, and the second step's drew the log."""
    drawn = of_weights(base, lambda views: add(views, factors(adapters[2]), 3.0, torch.float32))
    named = found_in(merged, drawn, [adapters[0], adapters[0].parent], tmp_path)
    assert named["name"] == "another adapter"
    assert named["what"].endswith("step-2")


def drift(views: dict[str, torch.Tensor], *adapters: Factors) -> None:
    """Merge each adapter in bf16, and take it away again."""
    for parts in adapters:
        add(views, parts, 3.0, torch.bfloat16)
        add(views, parts, -3.0, torch.bfloat16)


def test_a_base_that_merging_and_unmerging_has_changed_is_named(merged, base, adapters, tmp_path):
    adapter, *others = map(factors, adapters)

    def drifted(views: dict[str, torch.Tensor]) -> None:
        drift(views, *others)
        add(views, adapter, 3.0, torch.bfloat16)

    named = found_in(merged, of_weights(base, drifted), adapters, tmp_path)
    assert named["name"] == "adapter merged otherwise"
    assert named["what"].endswith("merging and unmerging the other adapters in bfloat16 left")


def test_the_rounding_of_a_merge_is_named(case, base, adapters, merged, tmp_path):
    """The two models are of one adapter: merged in fp32, and in bf16."""
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
    stored = (
        torch.bfloat16 if torch.equal(merged.decoder.flat, merged.decoder.flat.bfloat16()) else torch.float32
    )
    drawn = of_weights(base, lambda views: add(views, factors(adapters[0]), 3.0, other[stored]))
    named = found_in(merged, drawn, adapters, tmp_path)
    assert named["name"] == "adapter merged otherwise"
    assert named["what"].endswith(f"merged in {str(other[stored]).removeprefix('torch.')}")


@pytest.mark.parametrize("drifted", [False, True])
def test_an_adapter_beside_the_weights_is_named(merged, base, adapters, tmp_path, monkeypatch, drifted):
    """In bf16, where the merged weights are rounded and the adapter's product is not."""
    decoder = load_decoder(base, torch.bfloat16)
    if drifted:
        views = decoder.layout.checkpoint_views(decoder.flat.detach())
        drift(views, factors(adapters[0]))
    products: dict[torch.Tensor, list] = {}
    for name, (b, a) in factors(adapters[0]).items():
        entry = next(e for e in decoder.layout.entries.values() if name in dict(e.parts))
        start = sum(rows for part, rows in entry.parts[: [p for p, _ in entry.parts].index(name)])
        products.setdefault(decoder.w[entry.name], []).append((slice(start, start + len(b)), b, a))
    plain = mlp.linear

    def linear(x, w, *args):
        y = plain(x, w, *args)
        for rows, b, a in products.get(w, []):
            y[:, rows] = (y[:, rows].float() + 3.0 * (x.float() @ a.t() @ b.t())).bfloat16()
        return y

    with monkeypatch.context() as patch:
        for block in (attention, mlp):
            patch.setattr(block, "linear", linear)
        drawn = draw(decoder)
    named = found_in(merged, drawn, adapters, tmp_path, dtype="bfloat16")
    assert named["name"] == "adapter beside the weights"
    assert named["what"].endswith(
        "unmerging the adapter in bfloat16 left" if drifted else "nothing is merged"
    )


@pytest.mark.full
def test_a_sound_log_names_nothing_and_another_fault_no_adapter(merged, adapters, tmp_path):
    assert found_in(merged, draw(merged.decoder), adapters, tmp_path) is None
    other = Decoder(
        merged.decoder.config, perturbed(merged.decoder.flat.detach()), Layout(merged.decoder.config)
    )
    named = found_in(merged, draw(other), adapters, tmp_path)
    assert named is None or "adapter" not in named["name"]
    drawn = draw(load_decoder(merged.folder, torch.bfloat16))
    rounded = found_in(merged, drawn, adapters, tmp_path, trainer="hf", dtype="bfloat16")
    assert rounded is None, "the rounding of another engine"


@pytest.mark.parametrize(
    ("scored", "named", "reason"),
    [
        ("base", "adapter", "is the base of"),
        ("merged", "nothing", "holds no adapter_config.json"),
        ("other", "adapter", "has another"),
        ("", "adapter", "needs --model"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    case, base, adapters, merged, tmp_path, capsys, scored, named, reason
):
    log = write(tmp_path / "log.jsonl", draw(merged.decoder), SAMPLING)
    folders = {"base": base, "merged": merged.folder}
    if scored == "other":
        folders["other"] = random_model(tmp_path, WIDTHS | {"num_hidden_layers": 1})
    words = audit_words(case, log, tmp_path / "out")
    words[words.index("--model") + 1] = str(folders.get(scored, ""))
    if not scored:
        del words[words.index("--model") : words.index("--model") + 2]
    folder = adapters[0] if named == "adapter" else tmp_path
    assert main([*words, "--adapter", str(folder)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
