"""Hypotheses with a size: which temperature, filter, penalty or bias would the log's numbers have come from?

    z' = z - penalties(tokens so far) + bias,  z' = cap tanh(z' / cap);  then the temperature and the filters

Each has one number, which is searched: a grid, then smaller grids about the best value. The logits of the
lines are computed once. Penalties are vLLM's (v1/sample/ops/penalties.py): the repetition penalty divides
positive logits of tokens that prompt or completion hold, and multiplies negative ones; presence and
frequency count the completion alone.

Shapes: C completion tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.truncation import scaled_logits
from ..engines.generation_config import generation_defaults
from .evidence import Evidence
from .lines import Line, Scores
from .prediction import Prediction
from .scorer import hidden_rows

# Logits that are held at once, and those that a search reads again and again; of a larger vocabulary fewer
# lines are tried.
_MOST, _SEARCHED = 1 << 26, 1 << 24
# A token counts so many nats at most in a search: an edge of a filter must not decide it.
_CAP = 1.0
_ROUNDS, _POINTS = 4, 5
_TEMPERATURES = np.geomspace(0.1, 4.0, 25)
_TOP_P = 1.0 - np.geomspace(0.003, 0.6, 16)
_MIN_P = np.geomspace(0.002, 0.5, 16)
_TOP_K = np.array([1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 64, 100, 200, 500])
_REPETITION = np.array([0.8, 0.9, 0.95, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0])
_PRESENCE = np.array([-1.0, -0.5, -0.2, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0])
_CAPS = np.geomspace(3.0, 100.0, 16)
_BIAS = np.array([-8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0])
# Widths to which engines pad a vocabulary, as further columns of logit 0.
_PADDED = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_BIASED = 3  # tokens for which a bias is searched

Found = tuple[float, Scores, int]  # the number, what the log would hold, and how many numbers were tried
Transform = Callable[[torch.Tensor, Line, float], torch.Tensor]
Change = Callable[[SamplingParams, float], SamplingParams]


@dataclass(frozen=True)
class Rows:
    """The logits of some lines, by index in Evidence.lines: [C, V] fp32 on the CPU."""

    evidence: Evidence
    logits: dict[int, torch.Tensor]

    @property
    def few(self) -> "Rows":
        """The lines farthest apart, as many as a search reads."""
        lines, chosen, held = self.evidence.lines, set(), 0
        for i in sorted(self.logits, key=lambda i: -_distance(lines[i].logged, lines[i].scored)):
            held += self.logits[i].numel()
            if chosen and held > _SEARCHED:
                break
            chosen.add(i)
        return Rows(self.evidence, {i: z for i, z in self.logits.items() if i in chosen})

    @torch.no_grad()
    def scores(self, transform: Transform | None, change: Change | None, x: float) -> Scores:
        """What the lines would hold with a number x."""
        result = {}
        for i, z in self.logits.items():
            line = self.evidence.lines[i]
            params = line.params or SamplingParams()
            z = transform(z, line, x) if transform else z
            logp = torch.log_softmax(scaled_logits(z, change(params, x) if change else params), -1)
            ids = torch.tensor(line.completion_ids).unsqueeze(1)
            result[i] = logp.gather(1, ids).squeeze(1).numpy()
        return result

    def loss(self, scores: Scores) -> float:
        """How far scores are from the log, in nats."""
        return sum(_distance(self.evidence.lines[i].logged, x) for i, x in scores.items())


def _distance(logged: np.ndarray, scores: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        d = np.minimum(np.abs(logged.astype(np.float64) - scores), _CAP)
    return float(np.nansum(np.where(np.isneginf(scores), _CAP, d)))


@torch.no_grad()
def rows_of(evidence: Evidence) -> Rows:
    """The logits of the lines by the model, of as many as may be held."""
    decoder = evidence.scorer.model()
    lines, held = [], 0
    for i, line in enumerate(evidence.lines):
        held += len(line.completion_ids) * decoder.config.vocab_size
        if lines and held > _MOST:
            break
        lines.append(i)
    lm_head = decoder.logits_weight()
    rows = hidden_rows(decoder, [evidence.lines[i].pair for i in lines])
    logits = [(h.to(lm_head.dtype) @ lm_head.t()).float().cpu() for h in rows]
    return Rows(evidence, dict(zip(lines, logits, strict=True)))


def searched(
    rows: Rows, grid: Sequence[float], transform: Transform | None = None, change: Change | None = None
) -> Found:
    """The number of a hypothesis that comes nearest to the log."""
    few, tried = rows.few, {}

    def loss(x: float) -> float:
        if x not in tried:
            tried[x] = few.loss(few.scores(transform, change, x))
        return tried[x]

    points = [float(x) for x in grid]
    for _ in range(_ROUNDS):
        best = min(points, key=loss)
        known = sorted(tried)
        at = known.index(min(known, key=loss))
        low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        points = [best, *np.linspace(low, high, _POINTS + 2)[1:-1].tolist()]
    best = min(tried, key=tried.get)
    return best, rows.scores(transform, change, best), len(tried)


def one_of(rows: Rows, values: Sequence[float], transform: Transform | None, change: Change | None) -> Found:
    """As `searched`, of given numbers alone."""
    few = rows.few
    best = min(values, key=lambda x: few.loss(few.scores(transform, change, x)))
    return best, rows.scores(transform, change, best), len(values)


# --- the transforms ---


def seen_counts(ids: Sequence[int], V: int) -> torch.Tensor:
    """How often each token was drawn before each place, [C, V] fp32."""
    counts = torch.zeros(len(ids), V)
    counts[torch.arange(1, len(ids)), torch.tensor(ids[:-1], dtype=torch.long)] = 1.0
    return counts.cumsum(0)


def repetition(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The repetition penalty."""
    V = z.shape[1]
    read = torch.bincount(torch.tensor(line.prompt_ids, dtype=torch.long), minlength=V) > 0
    known = (seen_counts(line.completion_ids, V) > 0) | read
    return torch.where(known, torch.where(z > 0, z / x, z * x), z)


def presence(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The presence penalty."""
    return z - x * (seen_counts(line.completion_ids, z.shape[1]) > 0)


def frequency(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The frequency penalty."""
    return z - x * seen_counts(line.completion_ids, z.shape[1])


def _softcap(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    return x * torch.tanh(z / x)


def _padded(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    return torch.cat([z, z.new_zeros(len(z), int(x))], 1)


def _biased(token: int) -> Transform:
    def bias(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
        z = z.clone()
        z[:, token] += x
        return z

    return bias


# --- the hypotheses ---


def another_temperature(evidence: Evidence) -> Iterator[Prediction]:
    """Another temperature than the log says."""
    t, scores, tried = searched(
        rows_of(evidence), _TEMPERATURES, None, lambda p, t: p._replace(temperature=t)
    )
    yield Prediction(f"the sampler's temperature was {_shown(t)}", scores, tried, params={"temperature": t})


def another_cut(evidence: Evidence) -> Iterator[Prediction]:
    """Another top-p, top-k or min-p than the log says."""
    rows = rows_of(evidence)
    p, scores, tried = searched(rows, _TOP_P, None, lambda s, p: s._replace(top_p=min(p, 1.0)))
    yield Prediction(f"the sampler drew with top-p {_shown(p)}", scores, tried, params={"top_p": p})
    m, scores, tried = searched(rows, _MIN_P, None, lambda s, m: s._replace(min_p=m))
    yield Prediction(f"the sampler drew with min-p {_shown(m)}", scores, tried, params={"min_p": m})
    k, scores, tried = one_of(rows, _TOP_K, None, lambda s, k: s._replace(top_k=int(k)))
    yield Prediction(f"the sampler drew with top-k {k}", scores, tried, params={"top_k": int(k)})


def penalties(evidence: Evidence) -> Iterator[Prediction]:
    """A repetition, presence or frequency penalty that only one side applies."""
    rows = rows_of(evidence)
    for words, transform, grid in (
        ("repetition penalty", repetition, _REPETITION),
        ("presence penalty", presence, _PRESENCE),
        ("frequency penalty", frequency, _PRESENCE),
    ):
        x, scores, tried = searched(rows, grid, transform)
        yield Prediction(f"the sampler applies a {words} of {_shown(x)}", scores, tried)


def logit_bias(evidence: Evidence) -> Iterator[Prediction]:
    """A bias of one token that only one side adds, or that the log declares and one side leaves out."""
    rows = rows_of(evidence)
    if any(p.logit_bias for p in evidence.params()):
        scores = rows.scores(None, lambda p, _: p._replace(logit_bias=()), 0.0)
        yield Prediction("the sampler leaves out the logit bias that the log declares", scores)
    for token in _suspects(rows):
        x, scores, tried = searched(rows, _BIAS, _biased(token))
        shown = evidence.scorer.tokenizer.pieces([token])[0]
        yield Prediction(
            f"the sampler adds {_shown(x)} to the logit of token {token} ({shown!r})", scores, tried
        )


def _suspects(rows: Rows) -> list[int]:
    """The tokens whose probability goes with the difference, and whose draws differ most."""
    together = drawn = squares = 0.0
    for i, z in rows.logits.items():
        line = rows.evidence.lines[i]
        p = torch.log_softmax(scaled_logits(z, line.params or SamplingParams()), -1).exp()
        d = np.nan_to_num(line.logged.astype(np.float64) - line.scored, neginf=0.0, posinf=0.0)
        d = torch.from_numpy(np.clip(d, -_CAP, _CAP)).float()
        ids = torch.nn.functional.one_hot(torch.tensor(line.completion_ids), z.shape[1])
        together = together + (ids - p).t() @ d
        squares = squares + (ids - p).square().sum(0)
    gain = (together.square() / (squares + 1.0)).numpy() + drawn
    return np.argsort(gain)[::-1][:_BIASED].tolist()


def capped_logits(evidence: Evidence) -> Iterator[Prediction]:
    """Logits that one side soft-caps."""
    x, scores, tried = searched(rows_of(evidence), _CAPS, _softcap)
    yield Prediction(f"the sampler's logits are soft-capped at {_shown(x)}", scores, tried)


def padded_vocabulary(evidence: Evidence) -> Iterator[Prediction]:
    """Columns of a padded vocabulary in the log-sum-exp."""
    n, scores, tried = one_of(rows_of(evidence), _PADDED, _padded, None)
    yield Prediction(f"the sampler's log-sum-exp runs over {n} columns of a padded vocabulary", scores, tried)


def generation_config(evidence: Evidence) -> Iterator[Prediction]:
    """The defaults of the checkpoint's generation_config.json, which vLLM and transformers obey.

    What a request says replaces its default, so each part of the defaults is tried, the whole first.
    """
    given = generation_defaults(evidence.scorer.folder)
    rows = rows_of(evidence) if given else None
    for size in range(len(given), 0, -1):
        for names in combinations(given, size):
            part = {name: given[name] for name in names}
            said = ", ".join(f"{name} {value:g}" for name, value in part.items())
            penalty = float(part.pop("repetition_penalty", 1.0))
            if penalty == 1.0 and all(p == p._replace(**part) for p in evidence.params()):
                continue
            transform = repetition if penalty != 1.0 else None
            scores = rows.scores(transform, lambda p, _, part=part: p._replace(**part), penalty)
            what = f"the sampler took {said} from the checkpoint's generation_config.json"
            yield Prediction(what, scores, params=part)


def _shown(x: float) -> str:
    return f"{x:.3g}"
