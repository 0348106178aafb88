"""Which settings go together: a table with one reason in each row.

A row says which combination is refused, and with which message. A row that asks for the device or for vLLM's
version refuses nothing until this is known. So one table serves when a configuration is read, when a run
starts, and in the docs. loss_rules.py has the rows of losses. The allowed arguments of vLLM's engine are in
rollout/vllm/arguments.py.
"""

from ...kernels.tile_tables import minor_version
from .loss_rules import LOSS_RULES
from .rule import Rule, Setting
from .run_config import Config


def _other_tiles(s: Setting) -> bool:
    return (
        s.vllm_exact
        and s.vllm is not None
        and minor_version(s.vllm) != minor_version(s.config.precision.tiles)
    )


RULES: tuple[Rule, ...] = (
    *LOSS_RULES,
    Rule(
        lambda s: (
            s.config.precision.scaling in ("auto", "dynamic")
            and not s.config.precision.minimum <= s.config.precision.scale <= s.config.precision.maximum
        ),
        lambda s: (
            f"precision.scale ({s.config.precision.scale}) must lie between precision.minimum "
            f"({s.config.precision.minimum}) and precision.maximum ({s.config.precision.maximum})"
        ),
    ),
    Rule(
        lambda s: bool(s.config.lora.rank and s.config.frozen),
        lambda s: (
            f"frozen with lora.rank ({s.config.lora.rank}): with LoRA only the adapters are trained, and all "
            "weights are frozen; leave frozen out, or choose lora.targets"
        ),
    ),
    Rule(
        lambda s: bool(s.config.lora.rank and s.config.precision.weights),
        lambda s: (
            f'precision.weights ("{s.config.precision.weights}") with lora.rank ({s.config.lora.rank}): this '
            "is not built with adapters; leave one out"
        ),
    ),
    Rule(
        lambda s: (
            bool(s.config.perturb.round_weights)
            and bool(s.config.perturb.weights or s.config.precision.weights)
        ),
        lambda s: (
            f'perturb.round_weights ("{s.config.perturb.round_weights}") with perturb.weights or '
            "precision.weights: each rounds the sampler's weights; leave one out"
        ),
    ),
    Rule(
        lambda s: bool(s.config.precision.kv or s.config.perturb.kv) and s.any_other("cache_dtype"),
        lambda s: (
            f'precision.kv ("{s.config.precision.kv}") and perturb.kv ("{s.config.perturb.kv}") with '
            "precision.cache_dtype or sampler_cache_dtype: each rounds keys and values; leave one out"
        ),
    ),
    Rule(
        lambda s: s.config.exact and s.config.sampler == "vllm",
        lambda s: (
            'sampler ("vllm") with exact = true: vllm is vLLM as it comes now, and no trainer has its bits; '
            'set exact = false, or sampler = "vllm-zerokl", which is zerokl\'s decoder inside vLLM, '
            'or, on a GPU, "vllm-exact"'
        ),
    ),
    Rule(
        lambda s: s.config.exact and s.config.sampler == "hf",
        lambda s: (
            'sampler ("hf") with exact = true: hf is transformers as it comes, and no trainer has its bits; '
            'set exact = false, or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: (
            s.config.sampler == "hf"
            and bool(
                s.config.sampling.min_p
                or s.config.perturb.min_p
                or s.config.sampling.sampling_params.changes_logits
            )
        ),
        lambda s: (
            'sampler ("hf") with sampling.min_p, logit_bias or allowed_token_ids, or with perturb.min_p: '
            "transformers applies min_p after top_p, and has the other two in another form; leave them out, "
            "or set another sampler"
        ),
    ),
    Rule(
        lambda s: s.config.exact and (s.config.precision.sampler_differs or s.config.perturb.any),
        lambda s: "precision.sampler_* and perturb.* make sampler and trainer differ; set exact = false",
    ),
    Rule(
        lambda s: s.vllm_exact and s.any_other("head_dtype", "cache_dtype"),
        lambda s: (
            "precision.head_dtype and cache_dtype, and those of the sampler: vLLM's own model has other "
            'kernels for them; set all to "compute"'
        ),
    ),
    Rule(
        lambda s: s.vllm_exact and bool(s.config.precision.kv or s.config.perturb.kv),
        lambda s: (
            f'precision.kv ("{s.config.precision.kv}") and perturb.kv ("{s.config.perturb.kv}"): vLLM\'s own '
            'model has other kernels for them; leave them out, or set sampler = "vllm-zerokl"'
        ),
    ),
    Rule(
        lambda s: s.keyed_vllm and s.any_other("router_dtype"),
        lambda s: (
            "precision.router_dtype and sampler_router_dtype: inside vLLM routers compute in the compute "
            'dtype; set both to "compute", or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: s.config.perturb.routing == "replayed" and s.given,
        lambda s: (
            'perturb.routing ("replayed") needs a loss of drawn tokens, whose experts the sampler names; '
            'set it to "free", or choose another loss'
        ),
    ),
    Rule(
        lambda s: (
            s.config.perturb.routing == "replayed"
            and s.config.sampler.startswith("vllm-")
            and s.config.vllm.cuda_graphs
        ),
        lambda s: (
            'perturb.routing ("replayed") with vllm.cuda_graphs: a graph of vLLM names no experts; set '
            'vllm.cuda_graphs = false, or routing = "free"'
        ),
    ),
    Rule(
        lambda s: s.external and s.config.perturb.logit_noise > 0,
        lambda s: (
            f'perturb.logit_noise with sampler "{s.config.sampler}": an engine as it comes has a draw of its '
            "own; set logit_noise = 0, or another sampler"
        ),
    ),
    Rule(
        lambda s: s.external and bool(s.config.perturb.kv),
        lambda s: (
            f'perturb.kv ("{s.config.perturb.kv}") with sampler "{s.config.sampler}": an engine as it comes '
            "has a cache of its own; leave it out, or set another sampler"
        ),
    ),
    Rule(
        lambda s: s.external and s.config.precision.of_sampler != s.config.precision,
        lambda s: (
            f"precision.sampler_head_dtype, sampler_cache_dtype, sampler_router_dtype with sampler "
            f'"{s.config.sampler}": an engine as it comes has numerics of its own; leave them empty'
        ),
    ),
    Rule(
        lambda s: (
            s.config.staleness_schedule == "lagged"
            and (not s.config.max_staleness or s.config.max_staleness % s.config.updates_per_rollout > 0)
        ),
        lambda s: (
            f'staleness_schedule ("lagged") counts whole steps: max_staleness ({s.config.max_staleness}) '
            f"must be above 0, and a multiple of updates_per_rollout ({s.config.updates_per_rollout})"
        ),
    ),
    Rule(
        lambda s: s.config.staleness_schedule == "lagged" and s.config.perturb.delay > 0,
        lambda s: 'perturb.delay with staleness_schedule = "lagged": both make weights late; leave one out',
    ),
    Rule(
        lambda s: bool(s.config.pool.engine) and s.config.lag is None,
        lambda s: (
            f'pool.engine ("{s.config.pool.engine}") with max_staleness ({s.config.max_staleness}) needs '
            'staleness_schedule = "lagged": a periodic sampler waits for the step that is still trained'
        ),
    ),
    Rule(
        lambda s: (
            bool(s.config.pool.engine)
            and (s.config.sampler != "native" or s.config.perturb.delay > 0 or s.given)
        ),
        lambda s: (
            f'pool.engine ("{s.config.pool.engine}") needs sampler = "native", perturb.delay = 0, and a loss '
            "of drawn tokens (not dpo or verifree): actors are native samplers; leave it out, or the others"
        ),
    ),
    Rule(
        lambda s: bool(s.config.monitor.gradient) and s.config.exact and not s.config.max_staleness,
        lambda s: (
            f"monitor.gradient ({s.config.monitor.gradient}) with exact = true: every rollout is exact, so "
            "its gradient has no bias to measure; set exact = false for a sampler that differs, or "
            "monitor.gradient = 0"
        ),
    ),
    Rule(
        lambda s: bool(s.config.monitor.gradient) and s.given,
        lambda s: (
            f"monitor.gradient ({s.config.monitor.gradient}) with a loss of given tokens (dpo, verifree): no "
            "sampler decides them; set it to 0, or choose another loss"
        ),
    ),
    Rule(
        lambda s: s.config.sampler == "vllm-zerokl" and s.any_other("cache_dtype"),
        lambda s: (
            "precision.cache_dtype and sampler_cache_dtype: vLLM's cache holds the compute dtype; "
            'set both to "compute", or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: s.vllm_exact and s.device == "cpu",
        lambda s: (
            'sampler ("vllm-exact") needs a GPU: vLLM\'s kernels for CPUs are not batch-invariant; '
            'set sampler = "vllm-zerokl"'
        ),
    ),
    Rule(
        lambda s: s.uses_vllm and s.device == "cuda" and s.vllm_on_cpu,
        lambda s: (
            f'sampler ("{s.config.sampler}"): the vLLM installed here computes on CPUs only; '
            'set device = "cpu"'
        ),
    ),
    Rule(
        lambda s: s.keyed_vllm and s.device == "cuda" and s.config.vllm.multiprocess,
        lambda s: (
            "vllm.multiprocess (true): on a GPU vLLM reads the trainer's own tensors, "
            "which are in this process; set it to false"
        ),
    ),
    Rule(
        lambda s: s.config.vllm.cuda_graphs and s.uses_vllm and s.device == "cpu",
        lambda s: "vllm.cuda_graphs (true): a CPU has no CUDA graphs; set it to false",
    ),
    Rule(
        _other_tiles,
        lambda s: (
            f'precision.tiles ("{s.config.precision.tiles}"): vLLM {s.vllm} is installed, '
            "and has other tiles; set it to that version"
        ),
    ),
    Rule(
        lambda s: s.device == "cuda" and s.config.workers > 1,
        lambda s: f"workers ({s.config.workers}) must be 0 or 1 on a GPU, which one process keeps busy",
    ),
    Rule(
        lambda s: bool(s.ranks & (s.ranks - 1)) or s.ranks > s.config.virtual_shards,
        lambda s: (
            f"ranks ({s.ranks}) must be a power of two and at most virtual_shards ({s.config.virtual_shards})"
        ),
    ),
    Rule(
        lambda s: bool(s.not_sharded),
        lambda s: (
            f'parallel.engine ("fsdp") with {s.not_sharded}: this is not built with sharded weights; leave '
            'it out, or set parallel.engine = "replicated"'
        ),
    ),
    Rule(
        lambda s: s.ranks > 1 and s.config.sampler == "hf",
        lambda s: (
            f'ranks ({s.ranks}) with sampler "hf": transformers draws a whole batch with one generator, so '
            "tokens would depend on the number of ranks; start one process, or set another sampler"
        ),
    ),
    Rule(
        lambda s: s.ranks > 1 and bool(s.config.pool.engine),
        lambda s: (
            f'ranks ({s.ranks}) with pool.engine ("{s.config.pool.engine}"): one process of the trainer runs '
            'this; set pool.engine = "", or start one process'
        ),
    ),
)


def check_settings(
    config: Config, device: str | None = None, vllm: str | None = None, ranks: int = 1
) -> None:
    """Raise ValueError for the first row of RULES that refuses the settings.

    device: "cpu" or "cuda". vllm: the installed version. See Setting.
    """
    setting = Setting(config, device, vllm, ranks)
    for rule in RULES:
        if rule.refused(setting):
            raise ValueError(f"config: {rule.message(setting)}")
