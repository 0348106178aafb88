"""Checkpoints go to transformers and back with equal bits, and appear whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from zerokl.files.bitwise import equal
from zerokl.model import checkpoint_writing
from zerokl.model.checkpoint import check_weights, load_decoder, resolve_model
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.weights import FLAT_TILE, Layout, fingerprint

from tests.helpers import total_unequal
from tests.model.checkpoints import FAMILIES, buffers_of, checkpoint_parts, save_random


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 50_000], ids=["single", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_written_checkpoint_opens_in_transformers_with_equal_bits(family, shard_bytes, dtype, tmp_path):
    decoder = load_decoder(save_random(family, tmp_path / "source"), dtype)
    target = tmp_path / "deep" / "target"
    write_checkpoint(target, decoder.layout, decoder.flat, shard_bytes=shard_bytes)
    assert (target / "model.safetensors.index.json").exists() == (shard_bytes < 1 << 30)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == dtype
    parameters = {**dict(model.named_parameters()), **buffers_of(model)}
    parts = (checkpoint_parts(name, p, model) for name, p in parameters.items())
    parameters = {name: x for both in parts for name, x in both}
    views = decoder.layout.stored_tensors(decoder.flat)
    assert parameters.keys() == views.keys()
    # transformers keeps some routers in fp32, which holds what is read exactly.
    pairs = [(views[name], x.to(views[name].dtype)) for name, x in parameters.items()]
    assert total_unequal(*zip(*pairs, strict=True)) == 0
    again = load_decoder(target, dtype)
    assert again.config == decoder.config
    assert total_unequal([again.flat], [decoder.flat]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_single_and_sharded_checkpoints_of_transformers_load_alike(family, tmp_path):
    single = load_decoder(save_random(family, tmp_path / "single"), torch.float32)
    sharded = load_decoder(save_random(family, tmp_path / "sharded", shard="100KB"), torch.float32)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert total_unequal([single.flat], [sharded.flat]) == 0
    assert fingerprint(single.layout, single.flat) == fingerprint(sharded.layout, sharded.flat)


def _fuse(folder: Path) -> None:
    """Write the experts of layer 1 as transformers 5 and vLLM hold them: all in one tensor."""
    file, experts = folder / "model.safetensors", "model.layers.1.mlp.experts."
    tensors = load_file(file)

    def stack(kind: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{experts}{e}.{kind}_proj.weight") for e in range(6)])

    tensors[experts + "gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
    tensors[experts + "down_proj"] = stack("down")
    save_file(tensors, file)


def test_experts_in_one_tensor_load_as_those_in_many(tmp_path):
    folder = save_random("qwen3_moe", tmp_path)
    expected = load_decoder(folder, torch.float32)
    _fuse(folder)
    assert total_unequal([load_decoder(folder, torch.float32).flat], [expected.flat]) == 0
    check_weights(folder, expected.layout)


def test_experts_in_one_tensor_and_in_many_are_refused(tmp_path):
    folder = save_random("qwen3_moe", tmp_path)
    one = load_file(folder / "model.safetensors")["model.layers.1.mlp.experts.3.up_proj.weight"]
    _fuse(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.1.mlp.experts.3.up_proj.weight": one}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="which a Qwen3MoeForCausalLM of this config has no place for"):
        load_decoder(folder, torch.float32)


def test_transformers_continues_training(tmp_path):
    decoder = load_decoder(save_random("qwen3", tmp_path / "source"), torch.float32)
    write_checkpoint(tmp_path / "target", decoder.layout, decoder.flat)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    before = [p.detach().clone() for p in model.parameters()]
    ids = torch.arange(1, 30).unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = model(ids, labels=ids).loss
    first.backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model(ids, labels=ids).loss < first


def test_tied_head_stored_under_its_own_name_is_accepted(tmp_path):
    folder = save_random("qwen3", tmp_path)
    expected = load_decoder(folder, torch.float32).flat
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert total_unequal([load_decoder(folder, torch.float32).flat], [expected]) == 0


def test_buffers_that_follow_from_the_config_are_passed_over(tmp_path):
    folder = save_random("llama", tmp_path)
    expected = load_decoder(folder, torch.float32).flat
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert total_unequal([load_decoder(folder, torch.float32).flat], [expected]) == 0


def test_weights_are_rounded_once_and_padding_is_zero(tmp_path):
    folder = save_random("qwen2", tmp_path)
    full, half = load_decoder(folder, torch.float32), load_decoder(folder, torch.bfloat16)
    assert total_unequal([full.flat.bfloat16()], [half.flat]) == 0
    used = torch.zeros(full.layout.numel, dtype=torch.int64)
    for view in full.layout.checkpoint_views(used).values():
        view += 1
    assert used.max() == 1  # no two weights overlap
    assert (full.flat[used == 0] == 0).all()
    assert full.layout.numel % FLAT_TILE == 0


def test_fingerprint_changes_with_one_bit(tmp_path):
    decoder = load_decoder(save_random("llama", tmp_path), torch.float32)
    changed = decoder.flat.clone()
    changed.view(torch.int32)[5] ^= 1
    assert fingerprint(decoder.layout, changed) != fingerprint(decoder.layout, decoder.flat)


def test_companions_and_extra_files_are_written(tmp_path):
    source = save_random("llama", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "private.txt").write_text("not ours to copy")
    decoder = load_decoder(source, torch.float32)
    write_checkpoint(
        tmp_path / "target", decoder.layout, decoder.flat, companions=source, extra={"step.json": "7"}
    )
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "target" / "step.json").read_text() == "7"
    assert not (tmp_path / "target" / "private.txt").exists()
    assert json.loads((tmp_path / "target" / "config.json").read_text())["dtype"] == "float32"


def test_existing_target_is_left_alone(tmp_path):
    decoder = load_decoder(save_random("llama", tmp_path / "source"), torch.float32)
    before = (tmp_path / "source" / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="already exists"):
        write_checkpoint(tmp_path / "source", decoder.layout, decoder.flat)
    assert (tmp_path / "source" / "config.json").read_bytes() == before


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_written(tmp_path, monkeypatch):
    decoder = load_decoder(save_random("llama", tmp_path / "source"), torch.float32)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writing, "save_file", full_disk)
    with pytest.raises(OSError, match=r"could not be written.*No space left"):
        write_checkpoint(tmp_path / "target", decoder.layout, decoder.flat)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_layout_names_are_those_of_transformers(tmp_path):
    for family in FAMILIES:
        decoder = load_decoder(save_random(family, tmp_path / family), torch.float32)
        stored = load_file(tmp_path / family / "model.safetensors")
        layout = Layout(decoder.config)
        views = layout.stored_tensors(torch.zeros(layout.numel))
        assert {name: v.shape for name, v in views.items()} == {name: t.shape for name, t in stored.items()}


def test_resolve_model_takes_a_folder_and_refuses_other_names(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path
    for name in (str(tmp_path / "missing"), "./missing", "noslash"):
        with pytest.raises(ValueError, match="is no folder, and no hub name"):
            resolve_model(name)


def test_an_adapter_and_a_run_are_refused_with_what_to_give(tmp_path):
    adapter, run = tmp_path / "adapter", tmp_path / "run"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ValueError, match=r"is a LoRA \(PEFT\) adapter of 'owner/base'.*zerokl merge"):
        resolve_model(str(adapter))
    (adapter / "adapter_config.json").write_text("not JSON")
    with pytest.raises(ValueError, match=r"is a LoRA \(PEFT\) adapter, not a whole model"):
        resolve_model(str(adapter))
    (adapter / "config.json").write_text("{}")  # merged: the whole model lies there as well
    assert resolve_model(str(adapter)) == adapter
    run.mkdir()
    (run / "config.toml").write_text("")
    with pytest.raises(ValueError, match="is a run, not a model; it has no checkpoint yet"):
        resolve_model(str(run))
    for name in ("step-000009", "step-000010", "step-000011.damaged"):
        (run / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"give its newest checkpoint, .*step-000010$"):
        resolve_model(str(run))


def test_the_text_model_that_transformers_takes_out_of_one_with_images_is_read(tmp_path):
    """Its tensors keep the names of the whole model. The whole one is refused by its architecture."""
    text = FAMILIES["qwen3_5_text"].to_dict()
    images = dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64, patch_size=4)
    torch.manual_seed(0)
    both = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=images))
    both.save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match="'Qwen3_5ForConditionalGeneration' is not supported"):
        load_decoder(tmp_path / "both", torch.float32)
    AutoModelForCausalLM.from_pretrained(tmp_path / "both").save_pretrained(tmp_path / "text")
    assert "model.language_model.norm.weight" in load_file(tmp_path / "text/model.safetensors")
    decoder = load_decoder(tmp_path / "text", torch.float32)
    views, wanted = decoder.layout.checkpoint_views(decoder.flat.detach()), both.state_dict()
    for name, view in views.items():
        in_whole = name if name == "lm_head.weight" else name.replace("model.", "model.language_model.", 1)
        assert equal(view, wanted[in_whole]), name
