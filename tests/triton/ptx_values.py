"""The value of a register of a PTX text, as an expression of what its thread loaded.

So two kernels can be compared whose instructions stand in another order, or whose threads hold other numbers
of rows: equal expressions are equal bits.
"""

import re

_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);", re.MULTILINE)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
Value = str | tuple


def values(ptx: str) -> tuple[dict[str, list[str]], list[str]]:
    """The operands of every instruction of interest, and the offsets of the butterflies in their order.

    The operands are those of the butterflies ("bfly"), of the conversions that round ("round") and of the
    stores to global memory ("store"). A loaded element is named by its load and its place in it: 3.0 is the
    first of the fourth load. A butterfly of offset 8 is bfly8(operand), a rounded number is round(operand).
    Widening, selections and copies have the value of their first operand.
    """
    known: dict[str, Value] = {}
    operands: dict[str, list[str]] = {}
    offsets, loads = [], 0
    for opcode, text in _LINE.findall(ptx):
        target, *sources = (part.strip() for part in _OPERAND.findall(text))
        if opcode.startswith("ld.global"):
            for i, register in enumerate(_registers(target)):
                known[register] = f"{loads}.{i}"
            loads += 1
            continue
        inputs = [_read(source, known) for source in sources]
        if opcode.startswith("shfl.sync.bfly"):
            offsets.append(sources[1])
            operands.setdefault("bfly", []).append(inputs[0])
            known[target] = f"bfly{sources[1]}({inputs[0]})"
        elif opcode.startswith("st.global"):
            operands.setdefault("store", []).extend(inputs[0] if isinstance(inputs[0], tuple) else inputs[:1])
        elif opcode.startswith("mov.") and target.startswith("{"):
            for i, register in enumerate(_registers(target)):
                known[register] = inputs[0][i] if isinstance(inputs[0], tuple) else f"{inputs[0]}.{i}"
        elif opcode.startswith("cvt.rn.") and not opcode.endswith(".s32"):
            operands.setdefault("round", []).extend(inputs)
            rounded = tuple(f"round({x})" for x in reversed(inputs))  # two in one register: the low one last
            known[target] = rounded if len(rounded) > 1 else rounded[0]
        elif opcode.startswith(("mov.", "selp.", "shfl.sync.idx", "cvt.")):
            known[target] = inputs[0]
        elif ".f32" in opcode and "." in opcode:
            known[target] = _applied(opcode, inputs)
    return operands, offsets


def _registers(text: str) -> list[str]:
    return [register.strip() for register in text.strip("{}").split(",")]


def _read(source: str, known: dict[str, Value]) -> Value:
    if source.startswith("{"):
        return tuple(known.get(register, register) for register in _registers(source))
    return known.get(source, source)


def _applied(opcode: str, inputs: list[Value]) -> Value:
    """opcode(inputs). Sums and products have their operands in one order; packed ones are two."""
    if opcode.endswith("f32x2"):
        single = opcode.removesuffix("x2")
        pairs = [x if isinstance(x, tuple) else (f"{x}.0", f"{x}.1") for x in inputs]
        return tuple(_applied(single, list(halves)) for halves in zip(*pairs, strict=True))
    name = opcode.split(".")[0]
    ordered = sorted(map(str, inputs)) if name in ("add", "mul") else list(map(str, inputs))
    return f"{name}({','.join(ordered)})"


def form(value: str) -> str:
    """`value` with L for everything that was loaded or comes from elsewhere. Constants stay."""
    name, _, rest = value.partition("(")
    if not rest:
        return value if value.startswith("0f") else "L"
    parts = [form(part) for part in _arguments(rest[:-1])]
    return f"{name}({','.join(sorted(parts) if name in ('add', 'mul') else parts)})"


def without_load(load: str, value: str) -> str:
    """A sum of squares whose load `load` gave zeros: its products and their sums are left out."""
    zero = rf"(?:mul|fma)\(({load}\.[\d.]+),\1(?:,0)?\)"
    while value != (shorter := re.sub(zero, "0", value)):
        value = shorter
    while value != (shorter := re.sub(r"add\(0,0\)", "0", value)):
        value = shorter
    return _without_zeros(value)


def _without_zeros(value: str) -> str:
    """`value` with x for add(0,x) and for add(x,0)."""
    name, _, rest = value.partition("(")
    if not rest:
        return value
    parts = [_without_zeros(part) for part in _arguments(rest[:-1])]
    kept = [part for part in parts if part != "0"]
    if name == "add":
        return kept[0] if len(kept) == 1 else f"add({','.join(sorted(kept))})"
    return f"{name}({','.join(parts)})"


def _arguments(text: str) -> list[str]:
    """The arguments of a call, split at the commas outside of parentheses."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
