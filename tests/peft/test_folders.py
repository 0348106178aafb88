"""PEFT opens a run's checkpoints, and runs go on from PEFT's folders."""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zerokl.cli import main
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.run import train
from zerokl.files.bitwise import count_unequal
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.config import ModelConfig
from zerokl.model.peft import read_adapter, stored_lora

from tests.helpers import assert_at_most_twice_the_error, write_letters_reward
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.peft


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), TWO_LAYERS)


@pytest.fixture(scope="module")
def run_of(model, tmp_path_factory) -> Callable[..., Path]:
    """run_of(**lora): the last checkpoint of a run of two steps."""

    def make(**lora: object) -> Path:
        path = tmp_path_factory.mktemp("run")
        write_letters_reward(path)
        values = {
            "model": str(model),
            "steps": 2,
            "prompts": 2,
            "num_generations": 4,
            "sampling.max_tokens": 6,
            "virtual_shards": 2,
            "optimizer.lr": 1e-2,
            "evaluation.every": 0,
            "task.reward": "letters_reward:reward",
            "task.directory": str(path),
            "task.options": {"max_value": 9, "train": 20, "held_out": 10},
            "workers": 1,
        }
        summary = train(
            load_config(None, None, values | {f"lora.{k}": v for k, v in lora.items()}), path / "run"
        )
        assert (summary.tokens_unequal, summary.mismatch_max_abs) == (0, 0.0)
        return path / "run" / "checkpoints" / "step-000002"

    return make


def merged_by_peft(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()


LORAS = [{"rank": 3, "alpha": 7.5}, {"rank": 1, "targets": ["q_proj", "down_proj"]}]


@pytest.mark.parametrize("lora", LORAS, ids=str)
def test_peft_opens_a_checkpoint_and_merges_what_zerokl_merges(model, run_of, tmp_path, lora):
    folder = run_of(**lora)
    assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == str(model)
    assert main(["merge", str(folder), str(tmp_path / "merged")]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    by_peft = merged_by_peft(model, folder)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    targets = lora.get("targets", ["_proj"])
    adapter, scale = load_file(folder / "adapter_model.safetensors"), lora.get("alpha", 32.0) / lora["rank"]
    adapted = [name for name in ours if any(target in name for target in targets)]
    assert [name for name in ours if count_unequal(ours[name], base[name])] == adapted
    for name in adapted:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        b, a = (adapter[f"{module}.lora_{letter}.weight"].double() for letter in "BA")
        assert_at_most_twice_the_error(ours[name], by_peft[name], base[name].double() + scale * (b @ a), name)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"], ids=str)
def test_a_run_goes_on_from_a_folder_of_peft(model, run_of, tmp_path, targets):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    made = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    made.save_pretrained(tmp_path / "adapter")
    lora = stored_lora(tmp_path / "adapter")
    settings = {"rank": 4, "alpha": 6.0, "targets": list(lora.targets)}
    folder = run_of(**settings, adapter=str(tmp_path / "adapter"))
    config = ModelConfig.from_file(model)
    layout = AdapterLayout(adapted_layout(config, lora), lora)
    first, last = (read_adapter(path, layout) for path in (tmp_path / "adapter", folder))
    assert count_unequal(first, last) > 0
    assert (first - last).abs().max() < 0.1 < first.abs().max(), "it began there"
    again = run_of(**settings, adapter=str(folder))  # from a checkpoint of a run, which is such a folder
    assert count_unequal(read_adapter(again, layout), last) > 0
    with pytest.raises(ValueError, match=r"lora: rank \(8\) must be 4, as in"):
        run_of(rank=8, alpha=6.0, targets=list(lora.targets), adapter=str(folder))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_would_compute_something_else_is_refused_by_name(model, run_of, tmp_path, setting, name):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **setting)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"lora: .*adapter_config.json: {name} \(.*\) is refused"):
        run_of(rank=4, alpha=8.0, targets=["q_proj"], adapter=str(tmp_path / "adapter"))
