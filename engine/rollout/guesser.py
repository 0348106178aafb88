"""Guesses of the tokens that a trajectory will draw next, out of texts that were drawn before.

A guesser decides speed only: each guess is compared with the token that is drawn in its place
(speculation.py). So it may be wrong, late or empty, and nothing of it is in a checkpoint.

TextGuesser continues the newest text of the same prompt that has the longest end of the trajectory. These
texts are the prompt itself, completions of an earlier epoch, those of its group, and the trajectory.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ...kernels.philox import Stream
from .types import Request, RngKey

# Tokens of an end that is looked for, longest first.
_ENDS = (8, 4)
# A place is one number: that of its text, and below it the place of a token in the text.
_PLACE_BITS = 32
# Groups whose prompts are remembered.
_GROUPS = 1 << 14


class Guesser(Protocol):
    """Whoever guesses. A trajectory is its request, and the tokens that were drawn for it so far."""

    def propose(self, request: Request, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most k ids that may be drawn next, in their order. They may be none."""
        ...

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        """No more tokens are drawn for this request."""
        ...


class _Group(NamedTuple):
    """The trajectories of one prompt in one step."""

    seed: int
    stream: Stream
    step: int
    prompt: int


class _Passage:
    """Ids of one text. prompt: the hash of the prompt that it belongs to."""

    def __init__(self, number: int, prompt: int, request: Request):
        self.number, self.prompt, self.request = number, prompt, request
        self.ids = array("i")
        self.read = 0  # it has the ids of the request, and the tokens after them, up to here


class TextGuesser:
    """Keeps the newest texts, `tokens` tokens of them at most, and finds them by the hash of an end.

    Its memory is 4 bytes for each of these tokens and 8 for each of `slots`, as far as they are used. A slot
    has the newest end with its hash. What is found is compared id by id.
    """

    def __init__(self, tokens: int = 1 << 21, slots: int = 1 << 22):
        self._limit, self._held, self._next_number = tokens, 0, 1
        self._texts: dict[int, _Passage] = {}  # by number, the oldest first
        self._slots = memoryview(np.zeros(slots, np.int64))  # 0 is no place: no text has the number 0
        self._open: dict[RngKey, _Passage] = {}  # of trajectories that may go on
        self._groups: dict[_Group, int] = {}  # the hash of each one's prompt, the oldest first
        self._prompts: dict[int, _Passage] = {}  # by their hash

    def propose(self, request: Request, tokens: Sequence[int], k: int) -> Sequence[int]:
        text = self._with(request, tokens)
        for n in _ENDS:
            end = text.ids[-n:]
            number, place = divmod(self._slots[self._slot(text.prompt, end)], 1 << _PLACE_BITS)
            known = self._texts.get(number)
            if known is not None and len(end) == n and known.ids[max(0, place - n) : place] == end:
                return _continued(known.ids, place, k, known is text)
        return ()

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        self._with(request, tokens)
        if not request.trajectory_tokens:
            self._open.pop(request.rng_key, None)

    def _with(self, request: Request, tokens: Sequence[int]) -> _Passage:
        """The text of the request's trajectory, with these tokens after the request's ids."""
        text = self._open.get(request.rng_key)
        if text is None or text.request is not request:
            if text is None or not request.drawn or text.read > len(request.ids):
                text = self._begin(request)
            self._add(text, request.ids[text.read :])  # in a later turn what stands between
            text.request = request
        self._add(text, tokens[text.read - len(request.ids) :])
        return text

    def _begin(self, request: Request) -> _Passage:
        """A new text, without the prompt but for its end: the prompt is a text of its own."""
        key = request.rng_key
        group = _Group(key.seed, key.stream, key.step, key.prompt)
        if group not in self._groups:
            if len(self._groups) == _GROUPS:
                del self._groups[next(iter(self._groups))]
            self._groups[group] = prompt = hash(request.ids)
            if prompt not in self._prompts:
                self._prompts[prompt] = self._new(prompt, request)
                self._add(self._prompts[prompt], request.ids)
        text = self._open[key] = self._new(self._groups[group], request)
        text.read = max(0, len(request.ids) - _ENDS[0])
        return text

    def _new(self, prompt: int, request: Request) -> _Passage:
        number = self._next_number
        self._next_number += 1
        text = self._texts[number] = _Passage(number, prompt, request)
        return text

    def _add(self, text: _Passage, new: Sequence[int]) -> None:
        """Append ids. An end is found from the moment on at which an id follows it."""
        ids, slots, slot, number = text.ids, self._slots, self._slot, text.number << _PLACE_BITS
        for place, token in enumerate(new, len(ids)):
            for n in _ENDS:
                if n <= place:
                    slots[slot(text.prompt, ids[place - n :])] = number | place
            ids.append(token)
        text.read += len(new)
        if text.number in self._texts:
            self._held += len(new)
        while self._held > self._limit:
            self._forget(next(iter(self._texts.values())))

    def _forget(self, text: _Passage) -> None:
        """Its places stay in their slots, and lead nowhere."""
        del self._texts[text.number]
        self._held -= len(text.ids)
        for by_key, key in ((self._open, text.request.rng_key), (self._prompts, text.prompt)):
            if by_key.get(key) is text:
                del by_key[key]

    def _slot(self, prompt: int, end: Sequence[int]) -> int:
        return hash((prompt, *end)) % len(self._slots)


def _continued(ids: Sequence[int], place: int, k: int, repeats: bool) -> Sequence[int]:
    """k ids of a text from a place on. A text that `repeats` itself goes on after its last id as before."""
    guess = list(ids[place : place + k])
    period = len(ids) - place
    while repeats and len(guess) < k:
        guess.append(guess[-period])
    return guess
