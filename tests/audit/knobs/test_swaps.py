"""An operation in place of another of its kind: what a swap computes, and that it is taken away again."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from zerokl.audit.knobs.knob import Turn, turned
from zerokl.audit.knobs.module_places import places_of
from zerokl.audit.knobs.swaps import swaps_of
from zerokl.engine.rollout.hf import load_model

IDS = torch.arange(5, 45).view(2, 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    folder = tmp_path_factory.mktemp("swaps")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(folder, torch.float32, "eager")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def swapped(model, words: str, layers: tuple[int, ...]) -> torch.Tensor:
    swap = next(x for x in swaps_of(places_of(model)) if x.name == words)
    with turned([Turn(swap, 1.0, layers)]):
        return logits(model)


def test_every_swap_is_taken_away_and_all_but_a_few_change_something(model):
    plain, idle = logits(model), []
    swaps = list(swaps_of(places_of(model)))
    assert len({x.name for x in swaps}) == len(swaps)
    for swap in swaps:
        try:
            with turned([Turn(swap, swap.values[0], swap.place.layers[-1:])]):
                if torch.equal(logits(model), plain):
                    idle.append(swap.name)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            idle.append(swap.name)
        assert torch.equal(logits(model), plain), f"{swap.name} stays"
    assert len(idle) < len(swaps) / 4, idle


def test_a_swap_is_the_change_that_its_words_say(model):
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert torch.equal(swapped(model, "GELU in place of mlp.act_fn", (1,)), logits(other))

    other = copy.deepcopy(model)
    a, b = other.model.layers
    a.mlp, b.mlp = b.mlp, a.mlp
    words = "mlp in layers 0 and 1 in each other's place"
    assert torch.equal(swapped(model, words, (0, 1)), logits(other))

    other = copy.deepcopy(model)
    other.model.layers[0].self_attn.o_proj.weight.data[:, :8] = 0.0
    words = "the input of self_attn.o_proj with head 0 lost"
    assert torch.allclose(swapped(model, words, (0,)), logits(other), atol=1e-6)
    assert not torch.allclose(logits(model), logits(other), atol=1e-6)
