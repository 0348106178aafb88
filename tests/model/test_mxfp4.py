"""MXFP4: every number is that of the format, and of transformers; a checkpoint of it is read and saved."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from zerokl.model.checkpoint import check_weights, load_decoder, read_rows, read_weights, stored_dtype
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.config import ModelConfig
from zerokl.model.mxfp4 import dequantised
from zerokl.model.weights import Layout

from tests.helpers import randint, total_unequal
from tests.model.checkpoints import save_random

HIGHEST = 252  # of the scales with which every value is finite in bf16


def every_number() -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [256, 1, 1, 16] that have all 16 codes in both halves of a byte, and all 256 scales."""
    codes = torch.arange(16, dtype=torch.uint8)
    block = codes | ((15 - codes) << 4)
    return block.expand(256, 1, 1, 16).contiguous(), torch.arange(256, dtype=torch.uint8).view(256, 1, 1)


def by_definition(code: int, scale: int) -> float:
    """The value of a code: sign, two bits of an exponent with the bias 1, one bit of a mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    value = (1.0 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return sign * value * 2.0 ** (scale - 127)


def test_every_code_with_every_scale_is_exact_in_bf16_up_to_252_and_never_finite_but_wrong():
    numbers = dequantised(*every_number())
    assert numbers.dtype == torch.bfloat16
    for scale in range(256):
        for i, x in enumerate(numbers[scale, :, 0].tolist()):
            code = 15 - i // 2 if i % 2 else i // 2
            exact = by_definition(code, scale)
            if scale <= HIGHEST or (abs(exact) < 2.0**128 and scale < 255):
                assert x == exact, (code, scale)
                assert torch.tensor(x).signbit() == bool(code & 8)
            else:
                assert not abs(x) < float("inf"), (code, scale)


def packed(E: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales around 2^-4, as trained weights have them."""
    blocks = randint(seed, 256, E, N, K // 32, 16).to(torch.uint8)
    return blocks, (randint(seed + 1, 8, E, N, K // 32) + 119).to(torch.uint8)


def test_the_numbers_are_those_of_transformers():
    blocks, scales = packed(3, 10, 96, 0)
    assert total_unequal([dequantised(blocks, scales)], [convert_moe_packed_tensors(blocks, scales)]) == 0
    blocks, scales = (x[1 : HIGHEST + 1] for x in every_number())
    in_transformers = convert_moe_packed_tensors(blocks, scales)
    assert total_unequal([dequantised(blocks, scales)], [in_transformers]) == 0
    swapped = (blocks >> 4) | (blocks << 4)
    assert total_unequal([dequantised(swapped, scales)], [in_transformers]) > 0, (
        "control: the other half first"
    )


def quantise_experts(plain: Path, target: Path) -> dict[str, torch.Tensor]:
    """A copy of a folder in bf16 whose experts are random MXFP4. `plain` gets their numbers. Its tensors."""
    tensors = {n: x.bfloat16() for n, x in load_file(plain / "model.safetensors").items()}
    blocks = dict(tensors)
    for i, name in enumerate([n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]):
        E, K, N = blocks.pop(name).shape
        both = blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = packed(E, N, K, i)
        tensors[name] = dequantised(*both).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    shutil.copytree(plain, target)
    save_file(blocks, target / "model.safetensors", {"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (target / "config.json").write_text(json.dumps(raw))
    return blocks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """One model with experts in MXFP4, in one file and in shards, and the same with its numbers in bf16."""
    root = tmp_path_factory.mktemp("mxfp4")
    quantised, plain, sharded = (root / x for x in ("quantised", "plain", "sharded"))
    blocks = quantise_experts(save_random("gpt_oss", plain), quantised)
    shutil.copytree(quantised, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    # Blocks and their scales lie in different files.
    parts = [{n: x for n, x in blocks.items() if n.endswith("_scales") == last} for last in (False, True)]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, parts, strict=True):
        save_file(part, sharded / file, {"format": "pt"})
    places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return quantised, plain, sharded


def test_a_checkpoint_of_mxfp4_is_the_checkpoint_of_its_numbers(folders):
    quantised, plain, sharded = folders
    layout = Layout(ModelConfig.from_file(plain))
    expected = read_weights(plain, layout)
    rows = {name: slice(1, 4) for name in layout.checkpoint_views(expected) if "experts" in name}
    for folder in (quantised, sharded):
        assert ModelConfig.from_file(folder) == layout.config
        assert total_unequal([read_weights(folder, layout)], [expected]) == 0
        assert stored_dtype(folder) == torch.bfloat16
        check_weights(folder, layout)
        read = read_rows(folder, layout, rows)
        assert read.keys() == rows.keys()
        for name, part in read_rows(plain, layout, rows).items():
            assert total_unequal([read[name]], [part]) == 0, name


def test_it_is_saved_in_bf16_and_opens_in_transformers(folders, tmp_path):
    decoder = load_decoder(folders[0], torch.bfloat16)
    write_checkpoint(tmp_path / "saved", decoder.layout, decoder.flat.detach())
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    stored = load_file(folders[1] / "model.safetensors")
    for name, p in model.named_parameters():
        assert total_unequal([p.detach()], [stored[name]]) == 0, name


def _changed(source: Path, target: Path, name: str, change) -> Path:
    tensors = load_file(source / "model.safetensors")
    tensors[name] = change(tensors[name])
    target.mkdir()
    save_file({n: x for n, x in tensors.items() if x is not None}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


_BLOCKS, _SCALES = (f"model.layers.0.mlp.experts.down_proj_{x}" for x in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (_SCALES, lambda x: x.fill_(254), "down_proj holds .* NaN or infinite numbers"),
        (_SCALES, lambda x: x.fill_(255), "down_proj holds .* NaN or infinite numbers"),
        (_SCALES, lambda x: x[:, :1].clone(), r"down_proj_blocks: blocks .* must be \[E, N, G, 16\]"),
        (_SCALES, lambda x: None, "holds model.layers.0.mlp.experts.down_proj_blocks, which a GptOss"),
        (_BLOCKS, lambda x: None, "holds model.layers.0.mlp.experts.down_proj_scales, which a GptOss"),
        (_BLOCKS, lambda x: x.short(), "must be bytes"),
    ],
)
def test_what_is_no_mxfp4_is_refused_by_name(folders, tmp_path, name, change, message):
    folder = _changed(folders[0], tmp_path / "changed", name, change)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, torch.bfloat16)


def test_other_quantised_weights_and_mxfp4_of_other_families_are_refused(folders):
    raw = json.loads((folders[0] / "config.json").read_text())
    with pytest.raises(ValueError, match="quantization_config = 'fp8' is not supported"):
        ModelConfig.from_dict(raw | {"quantization_config": {"quant_method": "fp8"}})
    llama = {**raw, "architectures": ["LlamaForCausalLM"], "layer_types": None, "rope_parameters": None}
    with pytest.raises(ValueError, match="quantization_config = 'mxfp4' is not supported"):
        ModelConfig.from_dict(llama)
