"""Names of operations (model/op_names.py)."""


def parts(op: str) -> tuple[str, str]:
    """An operation's name as the prefix of its layer ("" outside the layers) and its kind."""
    layer, _, kind = op.rpartition(".")
    return f"{layer}." if layer else "", kind
