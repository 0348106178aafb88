"""A program that tries a tokenizer or a chat template, and ends with 0 unless it is unusable.

    python try_tokenizer.py (tokenizer|template) FILE MEMORY_BYTES PROCESSOR_S

limits.py runs it. It imports what it needs and nothing else, so that it starts in a fifth of a second. An
error of the file is none of the program's: the caller meets it again, and says it.
"""

import contextlib
import resource
import string
import sys
from pathlib import Path

from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

# Every character that a prompt usually has, and a run of each: a regex that looks back doubles its work with
# each character of a run, and the library panics after ten million retries.
TEXT = string.printable + "".join(c * 64 + "\0" for c in string.printable)
# Exit codes, beside those of a process that is killed.
NO_MEMORY, PANIC = 3, 4


class Generation(Extension):
    """The tag {% generation %}, which transformers knows: what it holds is rendered."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        """What stands up to the end of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def try_tokenizer(file: str) -> None:
    """Load, encode and decode."""
    tokenizer = Tokenizer.from_file(file)
    tokenizer.decode(tokenizer.encode(TEXT).ids)


def try_template(file: str) -> None:
    """Render one turn as transformers does: in jinja2's sandbox, with the same extensions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": str}
    template = environment.from_string(Path(file).read_text(encoding="utf-8"))
    template.render(messages=[{"role": "user", "content": TEXT}], add_generation_prompt=True)


def _refuse(message: str) -> None:
    raise ValueError(message)


def main(kind: str, file: str, memory_bytes: str, processor_s: str) -> int:
    """The exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CPU, (int(processor_s), int(processor_s)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with contextlib.suppress(Exception):
            try:
                (try_tokenizer if kind == "tokenizer" else try_template)(file)
            except MemoryError:
                return NO_MEMORY
    except BaseException:  # a panic of the Rust library
        return PANIC
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
