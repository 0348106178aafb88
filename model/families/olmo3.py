"""OLMo 3: OLMo 2's layer; three layers of four see a window of keys, and the others may rotate by YaRN."""

from ..blocks.attention import WINDOW_TYPES, Attention, read_windows
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, post_norm
from ..blocks.rope import read_local_theta
from ..config_file import ConfigFile
from ..family import Family

_THETA = 500000.0


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a base of the rotation that libraries would read differently."""
    fields, theta = config.fields, read_local_theta(config, _THETA)
    if not fields.rope_parameters and fields.rope_theta != _THETA:
        config.wrong(
            f"rope_theta ({fields.rope_theta:g}): in layers of sliding_attention transformers takes "
            f"{_THETA:g} whatever stands there; name both in rope_parameters"
        )
    bias, windows = fields.attention_bias, read_windows(config, period=4)
    kinds = {
        window: post_norm(
            Attention(
                qkv_bias=bias,
                o_bias=bias,
                wide_qk_norm=True,
                window=window,
                local_rope_theta=theta if window else None,
            ),
            GatedMlp(),
        )
        for window in set(windows)
    }
    return [kinds[window] for window in windows]


FAMILY = Family(
    "Olmo3ForCausalLM",
    layers,
    defaults={"rope_theta": _THETA, "sliding_window": 4096},
    layer_types=WINDOW_TYPES,
    rope_by_layer_type=True,
    small={
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
)
