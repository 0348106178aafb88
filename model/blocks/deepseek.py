"""The layers of DeepSeek's mixtures, and how config.json names their experts."""

from collections.abc import Collection
from dataclasses import replace

from pydantic import FiniteFloat, NonNegativeInt, PositiveInt

from ..config_file import ConfigFile, Fields
from ..sizes import Experts, GroupedRouter
from .block import Mixer
from .experts import ExpertNames, MixtureOfExperts, read_experts
from .mlp import GatedMlp
from .residual import Layer, pre_norm


class _DeepseekFields(Fields):
    """The fields of a mixture of DeepSeek's kind. transformers 5 writes num_local_experts, too."""

    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    routed_scaling_factor: FiniteFloat = 1.0
    norm_topk_prob: bool = True


class _FirstDense(Fields):
    first_k_dense_replace: NonNegativeInt


# Fields of which the architecture's class computes these values only. The first is taken where there is none.
# transformers' DeepSeek-V2 never divides by the sum, vLLM's does.
_BY_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_BY_SOFTMAX = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False,),
}


# Of `zerokl init`: an expert that all tokens share, groups of which half may be chosen, one dense layer.
SMALL_DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}


def read_deepseek_experts(
    config: ConfigFile, dense_layers: Collection[int] | None = None, softmax: bool = False
) -> Experts:
    """The experts of a model with DeepSeek-V3's router. Raises UnsupportedError (see read_experts).

    dense_layers: those without experts; None: config.json says how many they are, which come first. softmax:
    whether the router is DeepSeek-V2's.
    """
    if dense_layers is None:
        dense_layers = range(config.read(_FirstDense).first_k_dense_replace)
    raw = {"n_routed_experts": config.raw.get("num_local_experts")}
    raw |= {name: value for name, value in config.raw.items() if value is not None}
    c = config.read(_DeepseekFields, raw)
    kind = _BY_SOFTMAX if softmax else _BY_SIGMOID
    for field, values in kind.items():
        if config.raw.get(field, values[0]) not in values:
            config.refuse(
                field, config.raw[field], f"only {' and '.join(map(str, values))} is in this architecture"
            )
    if softmax and c.n_group > 1 and config.value("topk_method") != "group_limited_greedy":
        config.wrong(
            f"n_group ({c.n_group}) must be 1 with topk_method greedy: vLLM would choose of groups, and "
            "transformers does not"
        )
    group_size, rest = divmod(c.n_routed_experts, c.n_group)
    if rest or c.topk_group > c.n_group or (c.n_group > 1 and group_size < 2):
        config.wrong(
            f"n_group ({c.n_group}) must divide n_routed_experts ({c.n_routed_experts}) into groups of at "
            f"least two, and topk_group ({c.topk_group}) be at most n_group"
        )
    router = GroupedRouter(c.n_group, c.topk_group, c.routed_scaling_factor)
    decided = {
        "num_experts": c.n_routed_experts,
        "norm_topk_prob": c.norm_topk_prob and not softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense_layers),
    }
    experts = read_experts(
        config,
        decided,
        known=[*_DeepseekFields.model_fields, *kind],
        **{"softmax" if softmax else "sigmoid": router},
    )
    if experts.per_token > c.topk_group * group_size:
        config.wrong(
            f"num_experts_per_tok ({experts.per_token}) must be at most the {c.topk_group * group_size} "
            f"experts of topk_group ({c.topk_group}) groups"
        )
    return replace(experts, shared=c.n_shared_experts * experts.size)


def mixed_layers(config: ConfigFile, attention: Mixer, experts: Experts) -> list[Layer]:
    """The blocks of each layer: attention, and an MLP or experts beside a shared one."""
    mixture = MixtureOfExperts(experts, ExpertNames(shared="shared_experts"))
    dense, sparse = pre_norm(attention, GatedMlp()), pre_norm(attention, mixture)
    return [sparse if i in experts.layers else dense for i in range(config.fields.num_hidden_layers)]
