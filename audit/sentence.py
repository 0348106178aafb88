"""A text as the beginning of a sentence."""

import re

# What keeps its case wherever it stands: engines, and words with a digit or a mark of a path inside.
_NAME = re.compile(r"(hf|native|transformers|vllm|zerokl)\b|\S*[/\\_.]\w|[^\W\d]*\d")


def begun(text: str) -> str:
    """The text with a capital at its beginning, unless it begins with a name or a path."""
    return text if _NAME.match(text) else text[:1].upper() + text[1:]
