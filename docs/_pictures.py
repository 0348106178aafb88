"""The pictures of README and documentation, made from runs by zerokl's own commands: `make pictures`.

    python docs/_pictures.py RUN

RUN: the folder of the demo's run. Needs Chromium and the extra `browser`. An audit and an ablation are made
below build/pictures, where they are not there yet.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PICTURES = Path(__file__).parent / "_static"
MADE = Path("build/pictures")
_WIDTH = 1100
# What a live display writes over: all up to its last state.
_LIVE = re.compile(r"\x1b\[\?25l.*\x1b\[1A\x1b\[2K", re.S)
_FONT = re.compile(r"@font-face \{.*?\}", re.S)
_COLUMNS = 80


def main(run: Path) -> None:
    """Make every picture anew."""
    audit, ablation = MADE / "audit", MADE / "curves"
    if not audit.exists():
        # 1 is the exit code of an audit whose bits differ.
        _zerokl("audit", str(run / "base"), "--sampler", "hf", "--out", str(audit), codes=(1,))
    if not ablation.exists():
        _zerokl("ablate", "docs/examples/curves.toml", "--out", str(ablation))
    with _browser() as browser:
        _page(browser, run / "report.html", "report.png", 900)
        _page(browser, run / "report.html", "report-rollouts.png", 620, "#rollouts")
        _page(browser, audit / "audit.html", "audit.png", 820)
        _page(browser, ablation / "report.html", "ablation.png", 900, "#factors")
    _terminal("terminal.svg", MADE / "run", run / "base")


def _zerokl(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    process = subprocess.run([Path(sys.executable).with_name("zerokl"), *words], check=False)
    if process.returncode not in codes:
        raise SystemExit(f"pictures: zerokl {' '.join(words)} ended with code {process.returncode}")


@contextmanager
def _browser() -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def _page(browser: webdriver.Chrome, page: Path, name: str, height: int, place: str = "") -> None:
    """A picture of a page, `height` pixels from its top, or from the element that `place` selects."""
    metrics = {"width": _WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.resolve().as_uri())
    if place:
        browser.execute_script(f"document.querySelector('{place}').scrollIntoView({{behavior: 'instant'}})")
    browser.execute_async_script("setTimeout(arguments[0], 1500)")  # charts are drawn when they are seen
    picture = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    # 128 colours are enough for text and lines, and make a third of the size.
    picture.quantize(128).save(PICTURES / name, optimize=True)


def _terminal(name: str, run: Path, model: Path) -> None:
    """What a terminal of 80 columns shows of a short run, as SVG."""
    shutil.rmtree(run, ignore_errors=True)
    words = f"zerokl train --preset demo --model {model} --steps 6 --run_dir {run}"
    shell = f"stty cols {_COLUMNS} rows 40; {Path(sys.executable).parent}/{words}"
    shown = subprocess.run(["script", "-qec", shell, "/dev/null"], capture_output=True, text=True, check=True)
    console = Console(record=True, width=_COLUMNS, file=StringIO())
    console.print(f"$ {words}", highlight=False)
    # Of paths, what is below this checkout.
    text = shown.stdout.replace(f"{Path.cwd()}/", "").replace("\r\n", "\n")
    console.print(Text.from_ansi(_LIVE.sub("", text)))
    # A picture loads nothing: no font of a server.
    (PICTURES / name).write_text(_FONT.sub("", console.export_svg(title="zerokl")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
