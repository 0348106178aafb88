"""The audit in words: equal or not, where bits part, where the error jumps, the cause, what to do."""

import math
from collections.abc import Mapping
from typing import Any

from ....verify.bitwise import ulp_words
from .hypotheses.words import finding, fitting, log_notes, none_fits
from .operations import parts
from .settings import kept_set

Report = Mapping[str, Any]

# Standard errors below 0 from which k1 is no chance. Of sound pairs, one in 160 lies there.
_BEYOND = 2.5
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


def verdict(report: Report) -> str:
    """The audit in a few lines, for a terminal."""
    sentences = [headline(report), parting(report), jump(report), *notes(report)]
    found = cause(report)
    if found["kind"] != "equal":
        sentences += [f"Likely cause: {found['text']}", f"What to do: {found['remedy']}"]
    return "\n".join(filter(None, sentences))


def equal(report: Report) -> bool:
    """Whether every log-probability has the same bits on both sides."""
    return report["frac_equal"] == 1.0


def headline(report: Report) -> str:
    """Equal or not, and how far apart."""
    sampler, trainer = report["sampler"], report["trainer"]
    if equal(report):
        return (
            f"All {report['tokens']:,} tokens have the same log-probability, bit for bit, "
            f"in {sampler} and in {trainer}."
        )
    share = math.floor(1e4 * report["frac_equal"]) / 1e4  # never 100% where a token differs
    text = f"{sampler} and {trainer} agree to the bit on {share:.2%} of {report['tokens']:,} tokens"
    if not _known(report):
        return f"{text}; no token has a finite ratio."
    known = _known(report)
    scope = f" Over the {known:,} with a finite ratio," if known < report["tokens"] else ""
    return (
        f"{text}{'.' if scope else ';'}{scope} the largest difference of a log-probability is "
        f"{report['max_abs']:.3g}, and KL(sampler || trainer) is about {report['k3']['value']:.2g} nats a "
        "token."
    )


def _known(report: Report) -> int:
    """Tokens whose ratio is neither 0 nor infinite: the estimators are over them."""
    return report["tokens"] - sum(report.get(name, {}).get("tokens", 0) for name in ("outside", "infinite"))


def parting(report: Report) -> str:
    """Where bits first part; empty where nothing was traced, and where all is equal."""
    first = report.get("first_divergence")
    if not first:
        return ""
    distance = ulp_words(first["max_ulp"])
    size = f", by up to {distance}" if distance else f", by {first['relative']:.2g} of their size"
    share = f"{first['unequal']:,} of its {first['elements']:,} outputs"
    return f"Bits first part at {first['op']}: {share} differ{size}."


def jump(report: Report) -> str:
    """Where the error jumps; empty where nothing was judged."""
    if "own_errors" not in report:
        return ""
    found = report["jump"]
    if found is None:
        return "The error jumps nowhere: every operation does what the checkpoint says, and rounds."
    factor = "infinitely many" if _infinite(found["factor"]) else f"{found['factor']:,.0f}"
    own = "" if _infinite(found["relative"]) else f" is {found['relative']:.2g} of their size,"
    return (
        f"The error jumps at {found['op']} of {found['engine']}: from the same inputs, the error of its "
        "outputs"
        f"{own} {factor} times what {found['dtype']} rounds."
    )


def _infinite(x: float | None) -> bool:
    return x is None or math.isinf(x)


def notes(report: Report) -> list[str]:
    """What the figures alone would not tell."""
    texts = (
        _outside(report),
        _infinite_ratios(report),
        _negative(report),
        *_cut_off(report),
        _batch_invariance(report),
        *log_notes(report),
    )
    return [text for text in texts if text]


def _batch_invariance(report: Report) -> str:
    """What `--own` found, in a sentence; empty where it was not asked for."""
    found = report.get("batch_invariance")
    if not found:
        return ""
    name = report["sampler"]
    if not found["unequal_from"]:
        return f"{name} draws the same bits alone and with up to {found['requests']} requests at once."
    row = next(row for row in found["rows"] if row["at_once"] == found["unequal_from"] and row["unequal"])
    request, position = row["first"]["request"], row["first"]["position"]
    from_what = (
        f"from {row['at_once']} requests at once on" if row["at_once"] > 1 else "even of a request alone"
    )
    return (
        f"{name} does not repeat its own bits, {from_what}: drawn {row['way']}, {row['unequal']} of "
        f"{row['compared']} requests differ from themselves alone, request {request} at position {position}."
    )


def _cut_off(report: Report) -> list[str]:
    """Engines that cut outputs off where others round to the nearest number."""
    texts = []
    for engine, errors in report.get("own_errors", {}).items():
        if ops := [e["op"] for e in errors if e["cut_off"]]:
            more = f" and {len(ops) - 1} further operations" if len(ops) > 1 else ""
            texts.append(
                f"{engine} cuts the outputs of {ops[0]}{more} off towards 0 and does not round them to the "
                "nearest number."
            )
    return texts


def _outside(report: Report) -> str:
    found = report.get("outside", {"tokens": 0})
    if not found["tokens"]:
        return ""
    kept = kept_set(report.get("assumed", {}).get("distributions", []))
    where = f"outside the trainer's {kept} set" if kept else "where the trainer's probability is 0"
    lie = "lies" if found["tokens"] == 1 else "lie"
    return (
        f"{found['tokens']:,} of {report['tokens']:,} tokens {lie} {where}; the sampler gave them a "
        f"probability of {found['mean_probability']:.2g} on average, and has about {found['share']:.2%} of "
        "its mass there. KL(sampler || trainer) is infinite; its estimates are over the other tokens."
    )


def _infinite_ratios(report: Report) -> str:
    found = report.get("infinite", {"tokens": 0})
    if not found["tokens"]:
        return ""
    return (
        f"{found['tokens']:,} of {report['tokens']:,} tokens have an infinite ratio: the sampler reported "
        "(almost) no probability for a token that it drew. They are left out of the estimates."
    )


def negative_k1(report: Report) -> bool:
    """Whether k1 lies below 0 by more than its error allows."""
    k1 = report["k1"]
    known = k1["value"] is not None and k1["standard_error"] is not None
    return known and k1["value"] < -_BEYOND * k1["standard_error"]


def _negative(report: Report) -> str:
    if "k1" not in report or not negative_k1(report):
        return ""
    k1 = report["k1"]
    return (
        f"k1 is {k1['value']:.2g} ± {k1['standard_error']:.2g}: a KL cannot be negative, so these "
        "log-probabilities are not of the distribution the tokens were drawn from."
    )


def cause(report: Report) -> dict[str, str]:
    """The likely cause: its kind, the cause in words, and what to do about it."""
    for find in _FINDERS:
        if found := find(report):
            return found
    raise AssertionError("the last finder always answers")


def _not_batch_invariant(report: Report) -> dict[str, str] | None:
    """A sampler that has the trainer's bits here, but not in any company."""
    if not equal(report) or not report.get("batch_invariance", {}).get("unequal_from"):
        return None
    return finding(
        "batch invariance",
        f"{report['sampler']} is not batch-invariant: its bits depend on the requests beside a request.",
        "Let the sampler use kernels whose sums have a fixed order (vLLM: VLLM_BATCH_INVARIANT=1), and audit "
        "it again with --own.",
    )


def _equal(report: Report) -> dict[str, str] | None:
    if not equal(report):
        return None
    return finding("equal", "nothing differs.", "Nothing is to be done.")


def _rounded_log(report: Report) -> dict[str, str] | None:
    """A log whose numbers were cut, where the cut explains every difference."""
    found = report.get("rounding")
    if not found or found["tokens_beyond"]:
        return None
    return finding(
        "rounded log",
        f"none that shows: the log keeps {found['decimals']} decimals, and no difference is larger than that "
        f"rounding ({found['tolerance']:.1g}).",
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
    """A log whose logprobs cannot be those of the drawn tokens, or whose tokens the trainer cuts."""
    if "operations" in report:
        return None
    if negative_k1(report):
        return finding(
            "distribution",
            "the sampler reported log-probabilities of another distribution than the one it drew from: most "
            "often from before the temperature, top-k or top-p.",
            "Let the sampler report processed log-probabilities (vLLM: "
            "logprobs_mode='processed_logprobs'), and "
            "write the temperature, top_p and top_k that it drew with into the log.",
        )
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
    _not_batch_invariant,
    _equal,
    _rounded_log,
    fitting,
    _stale_cache,
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
