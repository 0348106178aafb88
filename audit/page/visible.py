"""Text of a model as text that prints.

It is hostile: it may hold control characters, escape sequences of terminals, markup, and characters that turn
the direction of writing. Pages escape markup as well.
"""

from ...files.reading import printable


def visible(text: str) -> str:
    """The text with every character that does not print (control, direction, surrogate) as an escape."""
    return printable(text, keep="")
