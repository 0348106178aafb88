"""Headless Chromium, from the system's packages: a page is opened, and its console must stay empty.

Without the extra `browser` (`make test-browser`) these tests are not even collected.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("selenium") else ["test_*.py"]

if find_spec("selenium"):
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

WIDE, NARROW = (1280, 900), (390, 840)


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "chromium is missing: apt-get install chromium chromium-driver"
    assert chromedriver, "chromedriver is missing: apt-get install chromium-driver"
    options = Options()
    options.binary_location = chromium
    # Without a sandbox, since tests may run as root; the pages are our own.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def open_page(driver: webdriver.Chrome) -> Iterator[Callable[..., webdriver.Chrome]]:
    """open_page(address, size, dark): the driver with this page. At the end its console must be empty."""

    def open_it(address: str, size: tuple[int, int] = WIDE, dark: bool = False) -> webdriver.Chrome:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        driver.get(address)
        driver.execute_script("localStorage.clear()")
        return driver

    driver.get_log("browser")
    yield open_it
    assert [entry["message"] for entry in driver.get_log("browser")] == []


@pytest.fixture
def requests(driver: webdriver.Chrome) -> Callable[[float], list[str]]:
    """requests(seconds): the addresses that pages asked for since the test began, and in these seconds."""
    driver.get("about:blank")
    driver.get_log("performance")

    def asked_for(seconds: float) -> list[str]:
        time.sleep(seconds)
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [message["request"]["url"] for message in sent]

    return asked_for


def pixels(driver: webdriver.Chrome, place: str, colour: tuple[int, int, int]) -> int:
    """How many pixels of the first chart of a place have a colour."""
    return driver.execute_script(
        "const c = document.querySelector(arguments[0] + ' canvas'), [r, g, b] = arguments[1];"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) n += d[i] === r && d[i + 1] === g && d[i + 2] === b;"
        "return n",
        place,
        colour,
    )
