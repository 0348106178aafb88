"""What was meant by a key that zerokl does not know: a key spelt similarly, or one with another name."""

import difflib
from collections.abc import Sequence

from .run_config import Config
from .section import settings_of

# The options of `zerokl train` that are no settings -> what other frameworks call them. A setting says this
# itself (Facts.also_called). The last word of a name is looked up.
_OPTIONS = {
    "--run_dir": "output_dir save_dir default_local_dir ckpt_path out",
    "--resume": "resume_from_checkpoint resume_from",
}
_NAMES = {key: setting.facts.also_called for key, setting in settings_of(Config).items()} | _OPTIONS
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
# difflib's ratio from which two spellings count as similar.
_SIMILAR = 0.6


def hint(key: str, known: Sequence[str], options: Sequence[str] = ()) -> str:
    """The end of a message about an unknown key: "; did you mean X?", or the keys that there are.

    known: dotted keys. options: the command's options that are no keys, without dashes. X is the key that was
    taken for a section; else the key with the same last word; else what another framework's name stands for;
    else what is spelt most similarly.
    """
    last_word, section = _last_word(key), key.rpartition(".")[0]
    if section in known and not any(k.startswith(f"{section}.") for k in known):
        return f"; {section} is a value, no section; did you mean {section}?"
    by_last_word = {_last_word(k): k for k in reversed(known)}
    meant = by_last_word.get(last_word) or OTHER_NAMES.get(last_word) or _similar(key, known, options)
    if meant is None:
        return f"; keys are {', '.join(k for k in known if '.' not in k)}"
    return f"; did you mean {meant}?"


def _last_word(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _similar(key: str, known: Sequence[str], options: Sequence[str]) -> str | None:
    """What is spelt most similarly to a key or to its last word; the first of several. None: nothing is."""
    last_word = _last_word(key)
    # (what was typed, a spelling, what this spelling stands for)
    candidates = [(key, option, f"--{option}") for option in options]
    candidates += [(key, k, k) for k in known]
    candidates += [(last_word, name, meant) for name, meant in OTHER_NAMES.items()]
    candidates += [(last_word, _last_word(k), k) for k in known]
    matcher = difflib.SequenceMatcher
    ratio, meant = max(
        ((matcher(None, typed, spelling).ratio(), meant) for typed, spelling, meant in candidates),
        key=lambda candidate: candidate[0],
    )
    return meant if ratio >= _SIMILAR else None
