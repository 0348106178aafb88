"""A distance in representable numbers, in words."""

# A larger distance in representable numbers says nothing: between 1e-30 and 1 lie almost as many of them as
# between 1 and 1e30.
_TELLING = 1 << 20


def ulp_words(distance: int | None) -> str:
    """A distance in representable numbers, in words; empty where it is unknown or too large to tell."""
    if distance is None or distance > _TELLING:
        return ""
    return f"{distance:,} representable number{'' if distance == 1 else 's'}"
