"""The likely cause of a difference, and what to do: the first of these rules that knows an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..figures.measure import equal
from ..operations.operations import parts
from ..settings import distributions
from .faults import columns_alone
from .log_findings import finding, fitting, none_fits
from .notes import LISTED
from .outcome import Kind, Outcome

Report = Mapping[str, Any]

# The kind of the cause where the two columns of a log are equal.
EQUAL_COLUMNS = "equal columns"
# What to look at, by the kind of the operation at fault.
_REMEDIES = {
    "embed": "Compare the embedding in the engine's memory with the checkpoint's.",
    "norm": "Compare the norm's weight and its epsilon with the checkpoint's.",
    "rope": "Compare rope_theta, rope_scaling and the positions that both engines use.",
    "proj": "Compare this weight in the engine's memory with the checkpoint's: a sync, a merge of an "
    "adapter, a "
    "quantisation or a sharding changed it.",
    "attention": "Compare the mask, the scale, the dtype of the cache and the attention backend.",
    "silu_mul": "Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
    "residual": "Compare how the engine adds to the residual stream, and in which dtype.",
    "logits": "Compare lm_head, the tying of the embeddings, and the dtype of the logits.",
    "logprob": "Compare temperature, top-k, top-p and the kind of log-probability that the engine reports.",
}


def cause(report: Report, outcome: Outcome, found_faults: Sequence[dict[str, str]]) -> dict[str, str]:
    """The likely cause: its kind, the cause in words, and what to do about it.

    Where the outcome is a fault, this is the first of found_faults.
    """
    if outcome.kind is Kind.FAULT:
        return found_faults[0]
    for find in _FINDERS:
        if found := find(report):
            return found
    raise AssertionError("the last finder always answers")


def _equal(report: Report) -> dict[str, str] | None:
    if not equal(report) or _whole_differs(report):
        return None
    if not columns_alone(report):
        return finding("equal", "nothing differs.", "Nothing is to be done.")
    how = distributions(report)
    return finding(
        EQUAL_COLUMNS,
        "nothing differs between the two columns. That is no proof that the tokens were drawn from this "
        f"distribution: {how}, and two columns of the raw logits would be equal as well.",
        "Name the model that drew the log with --model. It scores the tokens in the distribution that the "
        "log declares, or that --temperature, --top_p and --top_k say.",
    )


def _whole_differs(report: Report) -> bool:
    """Whether the whole distributions were compared, and differ."""
    return "whole" in report and report["whole"]["frac_values_equal"] < 1.0


def _not_drawn(report: Report) -> dict[str, str] | None:
    """What the numbers of a log say against a column, whatever the other one is."""
    return report.get("distribution", {}).get("found")


def _rounded_log(report: Report) -> dict[str, str] | None:
    """A log whose numbers were cut, where the cut explains every difference."""
    found = report.get("rounding")
    if not found or found["tokens_beyond"]:
        return None
    proof = " Two columns of one source would be equal as well." if columns_alone(report) else ""
    return finding(
        "rounded log",
        f"none that shows: the log keeps {found['decimals']} decimals, and no difference is larger than that "
        f"rounding ({found['tolerance']:.1g}).{proof}",
        "Nothing is to be done. A log with all digits would tell whether the bits are equal.",
    )


def _stale_cache(report: Report) -> dict[str, str] | None:
    if not report.get("stale_cache"):
        return None
    redrawn = (
        "every log-probability is equal"
        if report["frac_equal_without_caches"] == 1.0
        else "the sampler gives other bits"
    )
    return finding(
        "stale cache",
        f"drawn again with its caches dropped, {redrawn}: it had used a stale cache.",
        "Reset the prefix cache whenever the weights change.",
    )


def _changed_settings(report: Report) -> dict[str, str] | None:
    """Settings that changed since an earlier audit, where the difference has grown since."""
    found = report.get("against")
    if not found or not found["grown"] or not found["changed"]:
        return None
    # What an engine computes with explains more than a version, which explains more than the machine.
    changed = sorted(found["changed"], key=lambda c: c["setting"].startswith(("version of", "machine")))
    listed = [f"{c['setting']} was {c['before']} and is {c['now']}" for c in changed[:LISTED]]
    more = f"; {len(changed) - LISTED} more changed" if len(changed) > LISTED else ""
    k3 = found["figures"]["k3"]
    jumped = f" The error jumps at {report['jump']['op']}." if report.get("jump") else ""
    return finding(
        "settings",
        f"the difference has grown since {found['audit']} (k3 from {k3['before']:.2g} to "
        f"{k3['now']:.2g} nats), and settings have changed: {'; '.join(listed)}{more}.{jumped}",
        "Set the old value again and audit; an upgrade may have changed a default. Where it is the "
        "cause, pin the setting.",
    )


def _at_fault(report: Report) -> dict[str, str] | None:
    found = report.get("jump")
    if not found or found.get("between_checkpoints"):
        return None
    what = f": {found['explanation']}" if found["explanation"] else ""
    text = f"{found['engine']} computes {found['op']} otherwise than the checkpoint says{what}."
    if found["absent"]:
        text += f" {found['absent']} is in only one of the two."
    if found["both_engines"]:
        text += " The other engine does so too."
    if found["others"]:
        kinds = ", ".join(found["other_kinds"])
        text += (
            f" {found['others']} further operation{'s' * (found['others'] > 1)} of it do so too ({kinds})."
        )
    return finding("operation", text, _remedy(found["op"]))


def _remedy(op: str) -> str:
    kind = parts(op)[1]
    return next(text for name, text in _REMEDIES.items() if kind.endswith(name))


def _checkpoints(report: Report) -> dict[str, str] | None:
    found = report.get("checkpoints")
    if not found or not (
        found["config"] or found["tensors_unequal"] or found["only_first"] or found["only_second"]
    ):
        return None
    clauses = [f"{name} is {a} and {b}" for name, (a, b) in found["config"].items()]
    if found["tensors_unequal"]:
        first = found["unequal"][0]
        size = "has other shapes" if "shapes" in first else f"differs by {first['relative']:.2g} of its size"
        clauses.append(
            f"{found['tensors_unequal']} of {found['tensors']} tensors differ ({first['name']} {size})"
        )
    for names, side in ((found["only_first"], "first"), (found["only_second"], "second")):
        if names:
            clauses.append(
                f"only the {side} has {names[0]}" + (f" and {len(names) - 1} more" * (len(names) > 1))
            )
    text = f"the two checkpoints differ: {'; '.join(clauses)}."
    if jump := report.get("jump"):
        text += f" The forward feels it first at {jump['op']}"
        text += f": {jump['explanation']}." if jump["explanation"] else "."
    return finding(
        "checkpoints", text, "Find out which of the two is meant; a sync or a conversion made the other one."
    )


def _absent_operation(report: Report) -> dict[str, str] | None:
    """Operations that one engine alone has, where nothing judged whether they are missing."""
    sides = report.get("one_sided", {})
    if "own_errors" in report or not any(sides.values()):
        return None
    side = "sampler" if sides["sampler"] else "trainer"
    ops = sides[side]
    more = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
    return finding(
        "operation",
        f"only {report[side]} has {ops[0]}{more}.",
        "Compare the architectures of the two models.",
    )


def _other_than_it_scores(report: Report) -> dict[str, str] | None:
    """A sampler whose logprobs at drawing are far from what it computes for the same tokens."""
    drawn = next(
        (
            ways["drawn against scored"]
            for ways in report["own_invariance"].values()
            if "drawn against scored" in ways
        ),
        None,
    )
    traced = next((d["max_abs"] for d in report.get("operations", []) if d["op"] == "logprob"), None)
    if drawn is None or traced is None or not drawn["unequal"] or drawn["max_abs"] is None:
        return None
    if not (drawn["max_abs"] > 0.5 * report["max_abs"] and traced < 0.1 * report["max_abs"]):
        return None
    return finding(
        "drawing",
        f"{report['sampler']} reports other log-probabilities when it draws than when it scores the same "
        "tokens "
        f"(up to {drawn['max_abs']:.2g}): it drew with other weights, from a stale cache, or reports another "
        "distribution.",
        "Reset its caches after each update, and check which log-probabilities it is told to report.",
    )


def _other_distribution(report: Report) -> dict[str, str] | None:
    """A log whose tokens the trainer cuts."""
    if "operations" in report:
        return None
    if report["outside"]["share"] > 0.001:
        return finding(
            "distribution",
            "the trainer cuts tokens away that the sampler drew: its temperature, top-p or top-k is not the "
            "sampler's.",
            "Write the temperature, top_p and top_k that the sampler drew with into the log.",
        )
    return None


def _other_dtypes(report: Report) -> dict[str, str] | None:
    pairs = ((report.get(f"sampler_{name}"), report.get(name)) for name in ("dtype", "head_dtype"))
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if not different or not report.get("first_divergence"):
        return None
    a, b = different[0]
    return finding(
        "dtype",
        f"the two compute in different dtypes ({a} and {b}).",
        "Give both the same dtype, or correct for the difference (importance sampling).",
    )


def _rounding(report: Report) -> dict[str, str] | None:
    first = report.get("first_divergence")
    if not first:
        return None
    if "own_errors" not in report:
        return finding(
            "operation", f"{first['op']} is the first operation that differs.", _remedy(first["op"])
        )
    return finding(
        "rounding",
        f"rounding alone. The two engines sum and round in another order, from {first['op']} on.",
        "Nothing is broken. Another dtype (--dtype float32, --head_dtype float32) makes the difference "
        "smaller; "
        "an exact sampler takes it away; importance sampling corrects for it.",
    )


def _outside_the_forward(report: Report) -> dict[str, str] | None:
    if "operations" not in report:
        return None
    where = f", {report['sampler']}'s outside of its process," if report["traced_outside"] else ""
    process = ", or from what only that process computes" if report["traced_outside"] else ""
    ways = [
        f"{engine} {way}"
        for engine, all_ways in report["own_invariance"].items()
        for way, figures in all_ways.items()
        if figures["unequal"]
    ]
    seen = f" Unequal to itself: {'; '.join(ways)}." if ways else ""
    return finding(
        "batch or cache",
        f"forwards over one sequence alone{where} agree in every operation: the difference comes from "
        "batching, "
        f"from the cache, or from other weights{process}.{seen}",
        "Look at each engine against itself, and at the weights that drew these tokens.",
    )


def _unknown(report: Report) -> dict[str, str]:
    return finding(
        "unknown",
        "a log alone does not tell. Other weights, another temperature and other tokens all look like this.",
        "Audit the log with the checkpoint that drew it (--weight_version), or let the engine draw here "
        "(--sampler vllm, --sampler hf): then every operation is compared.",
    )


_FINDERS = (
    _equal,
    _rounded_log,
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
