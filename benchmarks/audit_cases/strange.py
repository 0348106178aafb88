"""Plants that are no number at an operation and stand in no file of audit/faults/: what does an audit say?

python benchmarks/audit_cases/strange.py --root R [--only NAME]      plant, audit, and count
python benchmarks/audit_cases/strange.py --root R --plants FILE.py     those that another file has

located  a cause is named that is the plant's operation, and its layer and value where it has them
seen     something differs that is not rounding, and no cause is told
missed   the headline is that nothing, or rounding, differs
wrong    another cause is named
"""

import argparse
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

import torch
from knobs import attending, attention, hooked, layers, show_plants, weighted
from models import world
from run import without_a_name
from torch.nn import functional

SEED = 12


@dataclass(frozen=True)
class Plant:
    """A change of the sampler's Qwen3. told: patterns in the cause's text, any of which is right."""

    name: str
    change: Callable[[torch.nn.Module], None]
    told: tuple[str, ...]


def _norm_over_half(model) -> None:
    """Layer 1's second norm takes its mean over half of the width."""
    norm = layers(model)[1].post_attention_layernorm

    def forward(x):
        h = x.float()
        h = h * torch.rsqrt(h[..., : h.shape[-1] // 2].pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * h.to(x.dtype)

    norm.forward = forward


def _base_of_a_layer(model) -> None:
    """Layer 1 rotates with another base."""
    rotation = copy.deepcopy(model.model.rotary_emb)
    D = 2 * len(rotation.inv_freq)
    rotation.inv_freq = 1.0 / (300000.0 ** (torch.arange(0, D, 2).float() / D))

    def hook(_module, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)
        places = kwargs["position_ids"]
        return args, kwargs | {"position_embeddings": rotation(x, places)}

    attention(layers(model)[1]).register_forward_pre_hook(hook, with_kwargs=True)


def _swapped(path: str, *only: int) -> Callable:
    """Two heads of a projection's rows change places."""
    return weighted(path, lambda w: w[:32].copy_(torch.cat([w[16:32], w[:16]])), *only)


def _skip(factor: float, layer: int) -> Callable:
    """What a layer adds to is scaled."""

    def hook(_module, args, out):
        first = out[0] if isinstance(out, tuple) else out
        scaled = first + (factor - 1.0) * args[0]
        return (scaled, *out[1:]) if isinstance(out, tuple) else scaled

    return lambda model: layers(model)[layer].register_forward_hook(hook) and None


def _fp16_product(model) -> None:
    """One product's operands and result are fp16."""
    down = layers(model)[2].mlp.down_proj
    down.forward = lambda x: functional.linear(x.half(), down.weight.half()).to(x.dtype)


def _head_apart(model) -> None:
    """The head is tied no more, and has moved."""
    w = model.lm_head.weight.detach().clone().float()
    g = torch.Generator().manual_seed(5)
    w += 0.05 * w.std() * torch.randn(w.shape, generator=g)
    model.lm_head.weight = torch.nn.Parameter(w.to(model.lm_head.weight.dtype))


def _head_scaled(model) -> None:
    """The head is tied no more, and is larger."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.07)


def _activation(model) -> None:
    """GELU in place of SiLU."""
    for layer in layers(model):
        layer.mlp.act_fn = torch.nn.GELU()


def _halves_rotated(model) -> None:
    """Only the first half of the frequencies turns."""
    inv = model.model.rotary_emb.inv_freq
    inv[len(inv) // 2 :] = 0.0


def _paired(model) -> None:
    """Layer 0 has its queries and keys in the order of rotated pairs."""
    order = torch.arange(16).view(2, 8).t().reshape(-1)
    for path in ("self_attn.q_proj", "self_attn.k_proj"):
        w = layers(model)[0].get_submodule(path).weight.data
        w.copy_(w.view(-1, 16, w.shape[1])[:, order].reshape(w.shape))


def _gate_is_up(model) -> None:
    """Layer 1's gate and up change places."""
    mlp = layers(model)[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _layers_swapped(model) -> None:
    """Norms of two layers change places."""
    a, b = layers(model)[0].input_layernorm, layers(model)[1].input_layernorm
    layers(model)[0].input_layernorm, layers(model)[1].input_layernorm = b, a


def _no_embedding(model) -> None:
    """The assistant's token has no embedding, and its head keeps one."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.get_input_embeddings().weight.data[4] = 0.0


def _gemma_norm(model) -> None:
    """The last norm's weight counts from 1."""
    model.model.norm.weight.data += 1.0


def _lost_channels(model) -> None:
    """A shard of layer 1's attention output is lost."""
    layers(model)[1].self_attn.o_proj.weight.data[:, -48:] = 0.0


def _norm_forgotten(model) -> None:
    """Layer 2's queries are not normed by their weight."""
    layers(model)[2].self_attn.q_norm.weight.data.fill_(1.0)


def _old_layer(model) -> None:
    """Layer 1's MLP holds layer 0's output projection."""
    layers(model)[1].mlp.down_proj.weight.data.copy_(layers(model)[0].mlp.down_proj.weight.data)


def _parallel(model) -> None:
    """Layer 2's MLP reads the layer's input, as parallel blocks do."""
    layer, kept = layers(model)[2], {}
    layer.register_forward_pre_hook(lambda _m, args: kept.update(x=args[0]) and None)
    plain = layer.post_attention_layernorm.forward
    layer.post_attention_layernorm.forward = lambda _x: plain(kept["x"])


def plants() -> Iterator[Plant]:
    """All of them."""
    second, first, third = r"layers?\W*1", r"layers?\W*0", r"layers?\W*2"
    for name, change, *told in (
        ("a norm over half of the width", _norm_over_half, rf"post_attention_layernorm.*{second}"),
        ("a base of one layer", _base_of_a_layer, rf"(rotation|rope|rotary).*{second}"),
        ("key heads swapped", _swapped("self_attn.k_proj", 1), rf"k_proj.*{second}"),
        ("value heads swapped", _swapped("self_attn.v_proj"), r"v_proj"),
        ("a skip scaled", _skip(0.85, 1), rf"(residual|skip|input).*0?\.[89].*{second}"),
        ("fp16 in one product", _fp16_product, rf"down_proj.*{third}"),
        ("a head that has moved", _head_apart, r"lm_head"),
        ("a head that is scaled", _head_scaled, r"lm_head times 1\.0[67]", r"temperature was 0\.7[45]"),
        ("another activation", _activation, r"act_fn|activation|gelu"),
        ("the token itself is not read", attending("self", 1, lambda t, s: (s < t) | (t == 0)), second),
        ("the first token is not read", attending("sink", None, lambda t, s: (s > 0) | (t == 0)), "first"),
        ("half of the frequencies", _halves_rotated, r"partial rotary|half of"),
        ("pairs in place of halves", _paired, rf"(interleaved|pairs|q_proj|k_proj).*{first}"),
        ("gate and up swapped", _gate_is_up, rf"(gate|up)_proj.*{second}"),
        ("norms of layers swapped", _layers_swapped, r"input_layernorm|norm"),
        ("a token without an embedding", _no_embedding, r"token 4\b|embed"),
        ("a norm's weight from 1", _gemma_norm, r"\+1(\.0\d*)? on its weight"),
        ("a shard is lost", _lost_channels, rf"(o_proj|attention).*{second}"),
        ("a norm's weight is lost", _norm_forgotten, rf"q_norm.*{third}|scores.*{third}"),
        ("a layer's weight in another", _old_layer, rf"down_proj.*{second}"),
        (
            "an output clamped",
            hooked("mlp.down_proj", lambda y: y.clamp(-0.5, 0.5), 1),
            rf"(down_proj|mlp).*{second}",
        ),
        ("an MLP beside attention", _parallel, rf"(post_attention_layernorm|mlp).*{third}"),
    ):
        yield Plant(name, change, tuple(told))


def judged(plant: Plant, report: dict) -> str:
    """The word for a report."""
    if word := without_a_name(report):
        return word
    text = report["cause"]["text"]
    text = text.split(" It explains")[0]
    return "located" if any(re.search(x, text) for x in plant.told) else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs/audit-cases"))
    parser.add_argument("--only", default="", help="a part of the name")
    parser.add_argument("--plants", type=Path, help="a file whose plants() gives name, change and told")
    words = parser.parse_args()
    torch.set_num_threads(1)
    w = world("qwen3", SEED, words.root / "models")
    made = run_path(str(words.plants))["plants"]() if words.plants else plants()
    titled = [(plant.name, plant) for plant in made]
    show_plants(titled, lambda _: w, words.root / "strange", words.only, judged)


if __name__ == "__main__":
    main()
