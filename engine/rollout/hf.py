"""transformers as a sampler: its own model with eager or sdpa attention, and its own generate.

Nothing of transformers is patched. Shapes: C completion tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...model.config import ModelConfig
from ...model.routing import id_dtype
from ...model.weights import Layout
from .types import GenerationParams, Rollout


def load_model(folder: Path, dtype: torch.dtype, attention: str = "sdpa") -> torch.nn.Module:
    """AutoModelForCausalLM of a folder in one dtype, on the CPU. attention: "eager" or "sdpa".

    Raises ValueError for weights that the folder lacks: transformers would fill them in at random.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would be written across the audit's own display
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        # transformers takes sdpa by itself, and eager attention for a family that has none.
        attn_implementation=None if attention == "sdpa" else attention,
        output_loading_info=True,
        trust_remote_code=False,
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"model: {folder} lacks {len(missing)} weights, the first being {missing[0]}")
    return model.eval()


class HfGenerator:
    """AutoModelForCausalLM in one dtype. attention: "eager" or "sdpa"."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        attention: str = "sdpa",
        device: torch.device | None = None,
    ):
        from transformers import GenerationConfig

        self._folder = folder
        self.model = load_model(folder, dtype, attention).to(device or "cpu")
        # The checkpoint's own generation config may penalise tokens or cut the distribution.
        self.model.generation_config = GenerationConfig()

    def draw(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seeds: Sequence[int]
    ) -> list[Rollout]:
        """As `generate`. transformers draws all prompts with one generator: the first seed decides."""
        return self.generate(prompts, generation_params, seeds[0])

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """One completion of each prompt, with the logprobs of its tokens.

        All prompts are padded on the left and drawn together, as trainers call `generate`. Raises ValueError
        for min_p, logit_bias and allowed_token_ids, which transformers has in another order or form.
        """
        params, longest = generation_params.sampling_params, max(map(len, prompts))
        if params.min_p or params.changes_logits:
            raise ValueError(
                "hf: transformers applies min_p after top_p, and has logit_bias and allowed_token_ids in "
                "another form; leave them out"
            )
        torch.manual_seed(seed)  # transformers draws from the global generator
        ids = self.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = self.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        routers = _Routers(self.model) if generation_params.experts else None
        random = dict(do_sample=True, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        with routers or nullcontext():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=generation_params.max_tokens,
                eos_token_id=sorted(generation_params.stop_ids) or None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
                **(random if params.temperature else {"do_sample": False}),
            )
        experts = routers.chosen(len(prompts)) if routers else None
        drawn = out.sequences[:, longest:]
        logp = torch.stack([_gather(z, drawn[:, i]) for i, z in enumerate(out.scores)], dim=1).cpu()
        rollouts = []
        for i, prompt in enumerate(prompts):
            tokens = drawn[i].tolist()
            end = next((n + 1 for n, t in enumerate(tokens) if t in generation_params.stop_ids), len(tokens))
            finish = "stop" if tokens[end - 1] in generation_params.stop_ids else "length"
            rollout = Rollout.of_one_turn(i, 0, prompt, tuple(tokens[:end]), logp[i, :end].numpy(), finish, 0)
            if experts is not None:
                rollout = replace(rollout, experts=experts[i, longest - len(prompt) : longest + end - 1])
            rollouts.append(rollout)
        return rollouts

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights from now on.

        They have checkpoint names and any float dtype, and are rounded to the model's dtype.
        """
        layout = Layout(ModelConfig.from_file(self._folder))
        for name, parameter in self.model.named_parameters():
            if name in layout.fused:  # such as the matrices of all experts of a layer
                weight, shape = layout.fused[name]
                parts = [weights[part] for part, _ in layout.entries[weight].parts]
                parameter.copy_(torch.cat(parts).view(shape))
            else:
                parameter.copy_(weights[name])

    def tensor(self, ids: list[list[int]]) -> torch.Tensor:
        """Token ids of one length, on the model's device."""
        return torch.tensor(ids, device=self.model.device)


class _Routers:
    """Inside this context the experts that the model's routers choose are kept, forward after forward."""

    def __init__(self, model: torch.nn.Module):
        mlps = [layer.mlp for layer in model.model.layers]
        # gpt-oss calls it a router.
        self._routers = [
            getattr(mlp, name) for mlp in mlps for name in ("gate", "router") if hasattr(mlp, name)
        ]
        self._kept: list[list[torch.Tensor]] = [[] for _ in self._routers]

    def __enter__(self) -> None:
        self._handles = [
            router.register_forward_hook(lambda _, inputs, outputs, kept=kept: kept.append(outputs[2]))
            for router, kept in zip(self._routers, self._kept, strict=True)
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def chosen(self, n: int) -> np.ndarray:
        """The experts of each row of n sequences of one length, [n, rows, L, k]."""
        layers = [torch.cat([ids.view(n, -1, ids.shape[1]) for ids in kept], dim=1) for kept in self._kept]
        return torch.stack(layers, dim=2).to("cpu", id_dtype(self._routers[0].num_experts)).numpy()


def _gather(z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(z.float(), dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
