"""Text of a report as Markdown."""


def escaped(text: str) -> str:
    """The text as Markdown that shows it and does nothing else, in a table too."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(character, entity)
    return text
