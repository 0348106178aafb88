"""Every constant by which a prediction is judged, with its unit, its reason, and what measured it.

They were set on the Llamas and Qwen3s of `benchmarks/audit_cases/run.py` with the seeds 0, 1 and 2, and on
the sound logs of `benchmarks/audit_cases/sound_logs.py`. The Qwen2 of seed 4 was held out:
docs/audit/found.md has the table of both. Commands, below as (cases), (sound) and (columns):

    (cases)    python benchmarks/audit_cases/run.py audit --root R --seed S, of faults and sound logs
    (sound)    python benchmarks/audit_cases/sound_logs.py --root R --logs 200 --with-model 24
    (columns)  pytest tests/audit/hypotheses/test_rounding.py tests/audit/hypotheses/test_chance.py
"""

# --- which tokens and lines count ---

# Nats. A difference of one token counts so much at most: an impossible token alone must not decide. (cases)
MOST = 20.0
# Share of the tokens. Rounding puts a token at the edge of a top-p set out of it now and then; up to this
# share of such tokens, and one in any case, is left out. 0.4% were seen of a bf16 trainer at top-p 0.83.
# (sound)
EDGE = 0.03
# Lines that are tried with a model, and without: those farthest apart, and the lines beside them. Two columns
# cost no forward. (cases)
LINES, COLUMN_LINES = 32, 64
# Tokens. Fewer can be hit by chance: some faults try dozens of values. (columns)
FEWEST_TOKENS = 8

# --- rounding ---

# Share of what the logits move by that a token of probability 1 moves by: the rounding of the log-sum-exp.
# (sound)
LEAST_WEIGHT = 0.02
# Times the measured size up to which a mean difference is rounding: engines round more or less often than our
# decoder does. (sound)
TIMES = 2.2
# Times the mean |x|. The largest of a normal distribution's thousands is 4.5 times it; rounding has a longer
# tail. A tail is rounding up to so many times the longer one of this and the measured one. (sound)
TAIL, TAIL_TIMES = 6.0, 2.5
# The mean as a share of the mean |d|, beyond so many standard errors, that is a sign and no rounding. (sound)
BIAS, BIAS_ERRORS = 0.25, 4.0
# Times the mean |d| of all lines that a line may have, of lines with so many tokens at least; or BIAS_ERRORS
# of its standard errors above that mean, if that is more. (sound)
LINE, LINE_TOKENS = 3.0, 8
# Nats over the weight of a token: the largest size of each dtype, where no model measures it. (sound)
BANDS = {"float32": 2e-4, "float16": 8e-3, "bfloat16": 0.06}
# Nats that two sound fp32 forwards differ by. (sound)
FP32 = 1e-5
# What fp32 rounds, as a share of bf16's rounding: it has 16 bits more, and its engines differ by a few of the
# last ones. (sound)
FP32_OF_BF16 = 2.0**-14
# What 16-bit engines differ by in the sum of a kept set's probabilities, and in a token's probability as a
# share: how far the edge of a declared cut may move. (sound)
EDGE_SUM, EDGE_SHARE = 0.02, 0.1

# --- a fit ---

# Share of the difference that an exact fit leaves at most: our decoder computes what is planted in the same
# dtype to less than that. (cases)
EXACT = 0.1
# Share that a fit leaves at most which needs no other one beside it, where it is no more than rounding.
# (cases)
SETTLED = 0.25
# Slope of the difference on a prediction, from and to: a true cause has 1. Of one that is dimmed, from: an
# 8-bit cache was seen at 0.67, since another engine decides its roundings otherwise (benchmarks/LOG.md).
# (cases)
SLOPE, DIMMED_SLOPE = (0.8, 1.25), 0.5
# Standard errors of the slope from 0, and where the difference alone could be rounding. (cases, sound)
ERRORS, SURE_ERRORS = 10.0, 14.0
# Share that such a fit leaves at most. (cases)
LESS = 0.85
# Share of the difference that the lines of a prediction must have, unless they were searched. (cases)
OF_ALL = 0.5
# Times the mean |e| of the tokens that move, beyond which a token is left out of a slope: a few must not
# decide it. (cases)
SLOPE_MOST = 8.0

# --- where a difference sits ---

# Times the usual difference, that of the least odd quarter of the tokens, from which a token is odd; the
# fewest odd ones, in tokens; and the most, as a share of all. (columns)
ODD, FEWEST_ODD, MOST_ODD = 8.0, 4, 0.75
# The least F1 of the odd tokens and a class; and how many classes wrong numbers are tried at. (cases)
ALIKE, CLASSES = 0.75, 3
# The share of its tokens from which a line is odd; so many lines must be alike in something; and the least F1
# of odd lines and those of a version, of some prompts, or every k-th one. (cases)
ODD_LINE, ODD_LINES, SAME_LINES = 0.5, 3, 0.85
# Share of its difference that a line keeps at most where other numbers come much nearer to it. (cases)
MUCH = 0.2

# --- two causes ---

# Shares of the difference: what a first cause of two leaves at most, both together, and the second one of
# what the first left; by the last one, too, a knob is nearer than a cause that it replaces. So many first
# ones are tried. (cases)
FIRST, BOTH, SECOND, FIRSTS = 0.85, 0.6, 0.7, 3

# --- a screen of a few lines, before all lines are tried ---

# Lines; the share that a fault may leave of them; or a slope so many errors from 0. (cases)
SCREENED, PROMISE, PROMISE_ERRORS = 4, 0.9, 4.0

# --- chance ---

# Shuffled logs that are tried: beside a model each takes forwards. (columns)
SHUFFLES, SHUFFLES_BESIDE_MODEL = 8, 1
# Times the odds of the best of them, explained to left, from which a fit is none of chance. (columns)
ODDS = 2.5
# Nats of evidence, one in a million by chance, for what ids and draws show.
EVIDENCE = 14.0
