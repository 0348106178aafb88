"""The constants of GELU in its tanh form, for each implementation of gelu_mul.py."""

import math

A = math.sqrt(8.0 / math.pi)
B = 0.044715 * A
LARGEST_SQUARE = 1024.0
# In 1 - s = e s, e = exp(-z) counts at most this, as it may overflow where s is 0. There gelu is 0 as well.
LARGEST_E = 1e30
