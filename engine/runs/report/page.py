"""What is on the page of runs: its sections, its scripts and its data. pages/page.py has the template.

The scripts show all that comes from runs as text, so a rollout cannot bring markup or code along.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from ....files.inputs import open_input
from ....files.reading import read_json, shown
from ....files.writing import write_whole
from ....pages.page import document, generator
from ..ablations.grid import ABLATION, CELLS
from .payload import Source, labels, page_title, payload
from .rollouts import pack

_SCRIPTS = ("source", "curves", "overview", "factors", "sections", "rollouts", "main")
_SECTIONS = {
    "overview": "Overview",
    "factors": "Factors",
    "learning": "Learning",
    "exactness": "Exactness",
    "speed": "Speed",
    "rollouts": "Rollouts",
    "settings": "Settings",
    "ledger": "Ledger",
}
REPORT, _KIND = "report.html", "report"


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of some runs, or of the cells of an ablation, to the file `out`. Returns the file.

    out: by default report.html in the folder of the run or of the ablation; with several folders, in the
    working directory. Raises ValueError for a folder without a run, for a run that cannot be read, and where
    `out` is a file that is no report of zerokl.
    """
    folders = [Path(path) for path in paths]
    if not folders:
        raise ValueError("report: no run was given; name the folder of a run, or several")
    file = Path(out) if out is not None else (folders[0] if len(folders) == 1 else Path()) / REPORT
    if file.exists() and (file.is_dir() or not _is_report(file)):
        raise ValueError(f"report: {file} is no report of zerokl and is not replaced; choose another --out")
    sources = open_sources(folders)
    if not sources:
        raise ValueError(f"report: no run of {', '.join(map(str, folders))} has begun")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, static_page(sources, page_title(folders)).encode("utf-8"))
    return file


def _is_report(file: Path) -> bool:
    with open_input(file) as handle:
        return generator(_KIND).encode() in handle.read(4096)


def open_sources(folders: Sequence[Path], known: Sequence[Source] = ()) -> list[Source]:
    """The runs in the folders. The folder of an ablation stands for those of its cells that have begun.

    known: runs that were opened before. They come first, and in their order. Raises ValueError for a folder
    that holds neither a run nor an ablation.
    """
    paths: list[tuple[Path, dict[str, str] | None]] = []
    for folder in folders:
        paths += _runs(folder)
    opened = {source.path for source in known}
    new = [(path, settings) for path, settings in paths if path not in opened]
    sources = [*known, *(Source(path, "", settings) for path, settings in new)]
    for source, name in zip(sources, labels([source.path for source in sources]), strict=True):
        source.label = name
    return sources


def _runs(folder: Path) -> list[tuple[Path, dict[str, str] | None]]:
    """The cells of an ablation that have begun, each with the settings of its combination; or the folder."""
    planned = planned_cells(folder)
    if not planned and (folder / "audit.json").exists():
        raise ValueError(f"report: {folder} holds an audit, whose page is {folder / 'audit.html'}")
    begun = [(path, settings) for path, settings in planned if (path / "config.toml").exists()]
    return begun if planned else [(folder, None)]


def planned_cells(folder: Path) -> list[tuple[Path, dict[str, str]]]:
    """All cells of an ablation, those included that have not begun; empty for another folder.

    The paths are below the ablation's folder, so that a folder that was moved can be read. Raises ValueError
    for a list that cannot be read.
    """
    file = next((folder / name for name in (CELLS, ABLATION) if (folder / name).exists()), None)
    if file is None:
        return []
    try:
        listed = read_json(file)
        if file.name == CELLS:
            return [(_inside(folder, c["folder"]), c["settings"]) for c in listed["cells"]]
        runs = [(run["run"], c["settings"]) for c in listed["combinations"] for run in c["runs"]]
        return [(Path(folder, "cells", *Path(run).parts[-2:]), settings) for run, settings in runs]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"report: {file} does not list the cells of an ablation") from None
    except ValueError as error:
        raise ValueError(f"report: {file} {error}") from None


def _inside(folder: Path, cell: str) -> Path:
    """The folder of a cell. Raises ValueError for a name that leads out of the ablation's folder."""
    if Path(cell).is_absolute() or ".." in Path(cell).parts:
        raise ValueError(f"names the cell {shown(cell)}, which is not below the folder")
    return folder / "cells" / cell


def static_page(sources: Sequence[Source], title: str) -> str:
    """The page with all its data."""
    data = [_data("payload", pack(payload(sources, title)))]
    for number, source in enumerate(sources):
        for block_number, block in enumerate(source.log.all_blocks()):
            data.append(_data(f"index-{number}-{block_number}", block.index))
            data.append(_data(f"texts-{number}-{block_number}", block.texts))
    return _page(title, "\n".join(data), connect="'none'")


def live_page(title: str) -> str:
    """The page without data. It asks the server that it comes from (watch.py)."""
    return _page(title, '<script type="text/plain" id="live"></script>', connect="'self'")


def _data(name: str, packed: bytes) -> str:
    """Data that the page unpacks. Base64 has no character that HTML knows."""
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>'


def _page(title: str, data: str, connect: str) -> str:
    folder = Path(__file__).parent / "static"
    scripts = [folder / f"{name}.js" for name in _SCRIPTS]
    return document(title, _KIND, _SECTIONS, "", scripts=scripts, data=data, connect=connect)
