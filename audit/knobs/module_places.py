"""Where a model of transformers can be turned: its modules by kind, by their names, whatever the family.

A kind is the name of a module without the number of its layer: `self_attn.v_proj` of every layer. So no list
of families is needed, and an operation has the name that it has in the checkpoint.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

import torch

# Modules that compute nothing when a model scores.
_IDLE = (torch.nn.Dropout, torch.nn.Identity, torch.nn.ModuleList, torch.nn.ModuleDict)
_LAYER = re.compile(r"^(?P<before>.*?\.)(?P<layer>\d+)\.(?P<rest>.+)$")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """The modules of one kind, by layer; {-1: module} for one that is in no layer."""

    kind: str
    modules: dict[int, torch.nn.Module] = field(hash=False, compare=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have it, from the first one on."""
        return tuple(sorted(self.modules))

    @cached_property
    def first(self) -> torch.nn.Module:
        """The module of the first layer."""
        return self.modules[self.layers[0]]

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight of the first one; None where it has none."""
        weight = getattr(self.first, "weight", None)
        return weight if isinstance(weight, torch.Tensor) else None

    @property
    def eps(self) -> str:
        """The attribute that holds a norm's epsilon; empty for what is no norm."""
        names = ("variance_epsilon", "eps", "epsilon", "norm_eps")
        return next((x for x in names if isinstance(getattr(self.first, x, None), float)), "")

    @property
    def is_norm(self) -> bool:
        """Whether it divides by a root mean square, or by a standard deviation."""
        return bool(self.eps)

    @property
    def is_embedding(self) -> bool:
        """Whether it reads rows of a weight by their number."""
        return isinstance(self.first, torch.nn.Embedding)

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies with a matrix."""
        weight = self.weight
        return weight is not None and weight.dim() == 2 and not self.is_embedding


@dataclass(frozen=True)
class Places:
    """All places of a model."""

    modules: tuple[Place, ...]  # that compute, in the order of computation
    attention: tuple[Place, ...]  # that multiply queries with keys
    rotations: tuple[Place, ...]  # that turn positions into angles
    lm_head: str  # the kind of the module that makes the logits
    layers: int
    blocks: tuple[Place, ...]  # whole layers, and the parts of a layer that hold modules
    head_dim: int


def places_of(model: torch.nn.Module) -> Places:
    """The places of a causal language model."""
    kinds: dict[str, dict[int, torch.nn.Module]] = {}
    head, lm_head = model.get_output_embeddings(), ""
    for name, module in model.named_modules():
        if not name or isinstance(module, _IDLE):
            continue
        match = _LAYER.match(name)
        kind, layer = (match["rest"], int(match["layer"])) if match else (name.rpartition(".")[2], -1)
        lm_head = kind if module is head else lm_head
        kinds.setdefault(kind, {})[layer] = module
    all_places = [Place(kind, modules) for kind, modules in kinds.items()]
    attention = [x for x in all_places if _is_attention(x)]
    rotations = [x for x in all_places if "rotary" in type(x.first).__name__.lower()]
    computing = [
        x
        for x in all_places
        if x not in rotations and (not list(x.first.children()) or x.kind.endswith("experts"))
    ]
    layers = 1 + max((max(x.layers) for x in all_places), default=0)
    whole = dict(enumerate(layers_of(model)))
    blocks = [Place("layer", whole)] if whole else []
    blocks += [
        x for x in all_places if list(x.first.children()) and "." not in x.kind and -1 not in x.modules
    ]
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Places(
        tuple(computing), tuple(attention), tuple(rotations), lm_head, layers, tuple(blocks), head_dim
    )


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers in their order: of the outermost list that is as long as the config says."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = (x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == count)
    return list(next(lists, ()))


def _is_attention(place: Place) -> bool:
    """Whether a module is a layer's attention as a whole."""
    is_whole = bool(list(place.first.children())) and "." not in place.kind
    return is_whole and -1 not in place.modules and bool(_ATTENTION.search(type(place.first).__name__))
