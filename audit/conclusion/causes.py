"""The likely cause of a difference, and what to do: the first of these rules that knows an answer."""

import math

from ...files.reading import first_few
from ..finding import Finding
from ..hypotheses.judgement import EDGE
from ..report import Measurements
from ..sections import CheckpointsDifference, Jump
from ..settings import distribution_words
from .log_findings import fitting, guilty_trainer, none_fits
from .notes import LISTED

# The kind of the cause where the two columns of a log are equal.
EQUAL_COLUMNS = "equal columns"


def cause(measured: Measurements) -> Finding:
    """The likely cause of what differs, or that nothing does. Faults beside a difference are faults.py's."""
    for find in _FINDERS:
        if finding := find(measured):
            return finding
    raise AssertionError("the last finder always answers")


def _equal(measured: Measurements) -> Finding | None:
    if not measured.figures.equal or _vocab_differs(measured):
        return None
    if not measured.columns_alone:
        return Finding("equal", "nothing differs.", "Nothing is to be done.")
    return Finding(
        EQUAL_COLUMNS,
        "nothing differs between the two columns. That is no proof that the tokens were drawn from this "
        f"distribution: {_how_drawn(measured)}, and two columns of the raw logits would be equal as well.",
        "Name the model that drew the log with --model. It scores the tokens in the distribution that the "
        "log declares, or that --temperature, --top_p and --top_k say.",
    )


def _how_drawn(measured: Measurements) -> str:
    """How the tokens were drawn, as far as a log says it, as the beginning of a sentence."""
    if measured.log and measured.log.distribution_unsaid:
        return "the log does not say how all of them were drawn"
    return f"the log says that they were drawn {distribution_words(measured.assumed.distributions)}"


def _vocab_differs(measured: Measurements) -> bool:
    """Whether the whole vocabulary was compared, and differs."""
    return measured.full_vocab is not None and measured.full_vocab.frac_values_equal < 1.0


def _not_drawn(measured: Measurements) -> Finding | None:
    """What the numbers of a log say against a column, whatever the other one is."""
    return measured.log and measured.log.distribution.fault


def _rounded_log(measured: Measurements) -> Finding | None:
    """A log whose numbers were cut, where the cut explains every difference."""
    rounding = measured.log and measured.log.rounding
    if not rounding or rounding.tokens_beyond:
        return None
    proof = " Two columns of one source would be equal as well." if measured.columns_alone else ""
    return Finding(
        "rounded log",
        f"none that shows: the log keeps {rounding.decimals} decimals, and no difference is larger than that "
        f"rounding ({rounding.tolerance:.1g}).{proof}",
        "Nothing is to be done. A log with all digits would tell whether the bits are equal.",
    )


def _stale_cache(measured: Measurements) -> Finding | None:
    if measured.caches is None or not measured.caches.stale_cache:
        return None
    redrawn = (
        "every log-probability is equal"
        if measured.caches.frac_equal_without_caches == 1.0
        else "the sampler gives other bits"
    )
    return Finding(
        "stale cache",
        f"drawn again with its caches dropped, {redrawn}: it had used a stale cache.",
        "Reset the prefix cache whenever the weights change.",
    )


def _changed_settings(measured: Measurements) -> Finding | None:
    """Settings that changed since an earlier audit, where the difference has grown since."""
    since = measured.against
    if not since or not since.grown or not since.changed:
        return None
    # What an engine computes with explains more than a version, which explains more than the machine.
    changed = sorted(since.changed, key=lambda c: c.setting.startswith(("version of", "machine")))
    listed = [f"{c.setting} was {c.before} and is {c.now}" for c in changed[:LISTED]]
    more = f"; {len(changed) - LISTED} more changed" if len(changed) > LISTED else ""
    k3, jump = since.figures["k3"], _jump(measured)
    jumped = f" The error jumps at {jump.op}." if jump else ""
    return Finding(
        "settings",
        f"the difference has grown since {since.audit} (k3 from {k3.before:.2g} to "
        f"{k3.now:.2g} nats), and settings have changed: {'; '.join(listed)}{more}.{jumped}",
        "Set the old value again and audit; an upgrade may have changed a default. Where it is the "
        "cause, pin the setting.",
    )


def _jump(measured: Measurements) -> Jump | None:
    return measured.trace and measured.trace.jump


def _at_fault(measured: Measurements) -> Finding | None:
    jump = _jump(measured)
    if not jump or jump.between_checkpoints:
        return None
    what = f": {jump.explanation}" if jump.explanation else ""
    text = f"{jump.engine} computes {jump.op} otherwise than the checkpoint says{what}."
    if jump.absent:
        text += f" {jump.absent} is in only one of the two."
    if jump.both_engines:
        text += " The other engine does so too."
    if jump.others:
        kinds = ", ".join(jump.other_kinds)
        text += f" {jump.others} further operation{'s' * (jump.others > 1)} of it do so too ({kinds})."
    return Finding("operation", text, measured.trace.remedy)


def _checkpoints(measured: Measurements) -> Finding | None:
    difference = measured.trace and measured.trace.checkpoints
    if not difference or not difference.any:
        return None
    text = f"the two checkpoints differ: {'; '.join(_clauses(difference))}."
    if jump := _jump(measured):
        text += f" The forward feels it first at {jump.op}"
        text += f": {jump.explanation}." if jump.explanation else "."
    return Finding(
        "checkpoints", text, "Find out which of the two is meant; a sync or a conversion made the other one."
    )


def _clauses(difference: CheckpointsDifference) -> list[str]:
    """What two checkpoints differ in, a clause each."""
    clauses = [f"{name} is {a} and {b}" for name, (a, b) in difference.config.items()]
    if difference.tensors_unequal:
        first = difference.unequal[0]
        size = "has other shapes" if first.shapes else f"differs by {first.relative:.2g} of its size"
        clauses.append(
            f"{difference.tensors_unequal} of {difference.tensors} tensors differ ({first.name} {size})"
        )
    for names, side in ((difference.only_first, "first"), (difference.only_second, "second")):
        if names:
            clauses.append(f"only the {side} has {first_few(names, 1)}")
    return clauses


def _absent_operation(measured: Measurements) -> Finding | None:
    """Operations that one engine alone has, where nothing judged whether they are missing."""
    trace = measured.trace
    if trace is None or trace.own_errors is not None or not any(trace.one_sided.values()):
        return None
    if len({name.removesuffix("-eager") for name in (measured.sampler, measured.trainer)}) > 1:
        return None  # traced by modules, of which each library has some of its own
    ops = trace.one_sided["sampler"] or trace.one_sided["trainer"]
    name = measured.sampler if trace.one_sided["sampler"] else measured.trainer
    text = f"only {name} has {first_few(ops, 1)}."
    return Finding("operation", text, "Compare the architectures of the two models.")


def _other_than_it_scores(measured: Measurements) -> Finding | None:
    """A sampler whose logprobs at drawing are far from what it computes for the same tokens."""
    if measured.trace is None:
        return None
    ways = next((x for x in measured.own_invariance.values() if "drawn against scored" in x), {})
    drawn, decoded = ways.get("drawn against scored"), ways.get("decode against prefill")
    if drawn and decoded and decoded.max_abs >= 0.5 * drawn.max_abs:
        return None  # its cache alone makes as much of a difference
    traced = next((d.max_abs for d in measured.trace.operations if d.op == "logprob"), None)
    if drawn is None or traced is None or not drawn.unequal or math.isnan(drawn.max_abs):
        return None
    largest = measured.figures.max_abs
    if not (drawn.max_abs > 0.5 * largest and traced < 0.1 * largest):
        return None
    return Finding(
        "drawing",
        f"{measured.sampler} reports other log-probabilities when it draws than when it scores the same "
        f"tokens (up to {drawn.max_abs:.2g}): it drew with other weights, from a stale cache, or reports "
        "another distribution.",
        "Reset its caches after each update, and check which log-probabilities it is told to report.",
    )


# The largest difference of two sound fp32 forwards, in nats, and the share of tokens that their rounding puts
# into a top-p set or out of it. Of 16 bits it is EDGE: 0.4% were seen of a bf16 trainer at top-p 0.83.
_FP32_DIFFERENCE, _FP32_EDGE = 1e-3, 0.001


def _other_distribution(measured: Measurements) -> Finding | None:
    """A log whose tokens the trainer cuts."""
    figures = measured.figures
    rounds_alone = measured.log and measured.log.hypotheses.is_rounding
    most = EDGE if figures.max_abs > _FP32_DIFFERENCE else _FP32_EDGE
    if measured.trace is not None or figures.outside.share <= most or rounds_alone:
        return None
    return Finding(
        "distribution",
        "the trainer cuts tokens away that the sampler drew: its temperature, top-p or top-k is not the "
        "sampler's.",
        "Write the temperature, top_p and top_k that the sampler drew with into the log.",
    )


def _other_dtypes(measured: Measurements) -> Finding | None:
    dtypes = measured.dtypes
    pairs = ((dtypes.sampler_dtype, dtypes.dtype), (dtypes.sampler_head_dtype, dtypes.head_dtype))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if not different or measured.trace is None or not measured.trace.first_divergence:
        return None
    a, b = different[0]
    return Finding(
        "dtype",
        f"the two compute in different dtypes ({a} and {b}).",
        "Give both the same dtype, or correct for the difference (importance sampling).",
    )


# Half a unit in the last place of a number, as a share of it; and how many of them the outputs of an
# operation may be apart whose inputs are the same, where nothing judged the operation itself.
_HALF_UNITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25}
_MOST_HALF_UNITS = 16.0


def _starts_as_rounding(measured: Measurements) -> bool:
    """Whether the first operation that differs does so by no more than its dtype rounds."""
    unit = _HALF_UNITS[measured.dtypes.dtype]
    return measured.trace.first_divergence.relative <= _MOST_HALF_UNITS * unit


def _rounding(measured: Measurements) -> Finding | None:
    first = measured.trace and measured.trace.first_divergence
    if not first:
        return None
    if measured.trace.own_errors is None and not _starts_as_rounding(measured):
        return Finding("operation", f"{first.op} is the first operation that differs.", measured.trace.remedy)
    return Finding(
        "rounding",
        f"rounding alone. The two engines sum and round in another order, from {first.op} on.",
        "Nothing is broken. Another dtype (--dtype float32, --head_dtype float32) makes the difference "
        "smaller; an exact sampler takes it away; importance sampling corrects for it.",
    )


def _outside_the_forward(measured: Measurements) -> Finding | None:
    if measured.trace is None:
        return None
    outside = measured.trace.traced_outside
    where = f", {measured.sampler}'s outside of its process," if outside else ""
    process = ", or from what only that process computes" if outside else ""
    ways = [
        f"{engine} {way}"
        for engine, all_ways in measured.own_invariance.items()
        for way, figures in all_ways.items()
        if figures.unequal
    ]
    unequal = f" Unequal to itself: {'; '.join(ways)}." if ways else ""
    return Finding(
        "batch or cache",
        f"forwards over one sequence alone{where} agree in every operation: the difference comes from "
        f"batching, from the cache, or from other weights{process}.{unequal}",
        "Look at each engine against itself, and at the weights that drew these tokens.",
    )


def _unknown(measured: Measurements) -> Finding:
    return Finding(
        "unknown",
        "a log alone does not tell. Other weights, another temperature and other tokens all look like this.",
        "Audit the log with the checkpoint that drew it (--weight_version), or let the engine draw here "
        "(--sampler vllm, --sampler hf): then every operation is compared.",
    )


_FINDERS = (
    _equal,
    _rounded_log,
    guilty_trainer,
    fitting,
    _not_drawn,
    _stale_cache,
    _changed_settings,
    _at_fault,
    _checkpoints,
    _absent_operation,
    _other_than_it_scores,
    _other_distribution,
    _other_dtypes,
    _rounding,
    _outside_the_forward,
    none_fits,
    _unknown,
)
