"""Files of JSON objects, a line each: their columns, and the split into training and held-out lines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ...files.inputs import read_bytes
from ...files.reading import first_few, parse_json, shown
from ...kernels.philox import Stream, permutation
from .base import check_split

X = TypeVar("X")

# Stands in a template for the prompt of a line.
PLACE = "{prompt}"
_LARGEST_FILE_BYTES = 1 << 30
# Columns of a file that a message names.
_MOST_COLUMNS = 12


class Record(NamedTuple):
    """The chosen columns of a line. where: task, file and line, for messages."""

    where: str
    values: list[Any]


def read_records(task: str, file: str, columns: Mapping[str, str], kind: str) -> list[Record]:
    """The lines of a file that are not empty, with their values in these columns.

    columns: option of the task -> name of the column. kind: what a line is, in the plural.

    Raises ValueError that names file and wrong line.
    """
    if not file:
        raise ValueError(f'task {task}: needs a file; set task.options = {{ file = "{kind}.jsonl" }}')
    records = []
    for number, line in enumerate(_lines(task, file), 1):
        if not line.strip():
            continue
        where = f"task {task}: {file} line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if not isinstance(record, dict):
            *names, last = [f'"{column}"' for column in columns.values()]
            raise ValueError(f"{where} must be an object with {', '.join(names)} and {last}")
        for option, column in columns.items():
            if column not in record:
                article = "an" if option == "answer" else "a"
                raise ValueError(
                    f'{where} must have {article} "{column}"; it has {_names(record)}: name the '
                    f"column in task.options.{option}"
                )
        records.append(Record(where, [record[column] for column in columns.values()]))
    if not records:
        raise ValueError(f"task {task}: {file} holds no {kind}")
    return records


def _lines(task: str, file: str) -> list[str]:
    try:
        content = read_bytes(file, _LARGEST_FILE_BYTES)
        return content.decode().split("\n")  # not splitlines: it also cuts at U+2028, which JSON allows
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"task {task}: {file} line {number} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"task {task}: {file} cannot be read ({error.strerror})") from None


def _names(record: dict[str, Any]) -> str:
    return first_few([*map(shown, record)], _MOST_COLUMNS) or "no column"


def text_of(value: Any, where: str, column: str) -> str:
    """The value. Raises ValueError for one that is no string, or an empty one."""
    if not isinstance(value, str) or not value.strip():
        is_empty = isinstance(value, str)
        raise ValueError(
            f'{where} must have a "{column}": a string that is not empty; this one is '
            f"{'empty' if is_empty else kind_of(value)}"
        )
    return value


def kind_of(value: Any) -> str:
    """What a value of JSON that is no string is, for messages."""
    kinds = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def prompt_template(task: str, template: str, system: str, chat: bool) -> str:
    """The template of a task's prompts; PLACE alone where it has none. Raises ValueError."""
    if template and PLACE not in template:
        raise ValueError(f"task {task}: template ({shown(template)}) must hold {PLACE}")
    if system and not chat:
        raise ValueError(f"task {task}: system needs a chat template; leave out chat = false, or system")
    return template or PLACE


def read_splits(
    task: str, read: Callable[[str], list[X]], file: str, held_out_file: str, held_out: int | float, seed: int
) -> dict[str, list[X]]:
    """The splits "train" and "held_out" of `file`, or of two files. read: the rows of a file.

    held_out, seed: see split_lines. Raises ValueError, also where both held_out and held_out_file are given.
    """
    if held_out and held_out_file:
        raise ValueError(f"task {task}: held_out and held_out_file are two ways to say the same; give one")
    rows = read(file)
    if held_out_file:
        return {"train": rows, "held_out": read(held_out_file)}
    return split_lines(rows, held_out, seed, task)


def split_lines(rows: Sequence[X], held_out: int | float, seed: int, task: str) -> dict[str, list[X]]:
    """The splits "train" and "held_out" of the rows of one file, chosen by `seed`.

    held_out: a number of rows, or a share between 0 and 1, at least one row. Raises ValueError.
    """
    n = len(rows)
    if isinstance(held_out, float):
        if not 0 < held_out < 1:
            raise ValueError(
                f"task {task}: held_out ({held_out}) must be a number of lines, or a share between 0 and 1"
            )
        held_out = max(1, int(held_out * n))
    check_split(n, n - held_out, held_out, task)
    shuffled = [rows[i] for i in permutation(n, seed, Stream.PROBLEMS)]
    return {"train": shuffled[: n - held_out], "held_out": shuffled[n - held_out :]}
