"""audit.html in a real browser: order, keyboard, dark and light, narrow and wide, hostile text."""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from zerokl.cli import main

from tests.browser.conftest import NARROW, WIDE, pixels
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.browser

# What a model may write, by the character whose token it becomes.
HOSTILE = {
    "a": "<script>document.title='owned'</script>",
    "b": "\x1b[31m\x1b]0;owned\x07",
    "c": "\u202e\u2066right to left",
    "d": "</style></title><img src=http://127.0.0.1:9/x onerror=\"document.title='owned'\">",
    "e": "[bold red]markup[/]",
    "f": "\n\r\t\x00\x9b",
    "g": "שלום",
    "h": "&lt;b&gt;\"' onload=alert(1) '",
    "1": "</details></section><iframe src=javascript:alert(1)>",
}
# The contrast of every visible text with what lies behind it: the least of them, and where it is.
CONTRAST = """
  const rgb = c => c.match(/[\\d.]+/g).map((x, i) => c.startsWith('color(') && i < 3 ? 255 * x : +x);
  const over = (a, b) => { const k = a[3] ?? 1; return [0, 1, 2].map(i => a[i] * k + b[i] * (1 - k)); };
  const linear = x => x / 255 <= .03928 ? x / 255 / 12.92 : ((x / 255 + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(linear); return .2126 * r + .7152 * g + .0722 * b; };
  const spoken = e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim());
  let least = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    if (!spoken(e) || !e.getClientRects().length) continue;
    const layers = [];
    for (let p = e; p; p = p.parentElement) layers.unshift(rgb(getComputedStyle(p).backgroundColor));
    const back = layers.reduce((below, c) => over(c, below), [255, 255, 255]);
    const [x, y] = [light(over(rgb(getComputedStyle(e).color), back)), light(back)].sort((p, q) => q - p);
    const ratio = (x + .05) / (y + .05);
    if (ratio < least[0]) least = [ratio, e.outerHTML.slice(0, 200)];
  }
  return least;"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), TWO_LAYERS)


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit whose prompts and completions are hostile, and whose two models differ."""
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(model, folder / "model")
    path = folder / "model" / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = {HOSTILE.get(token, token): i for token, i in vocab.items()}
    path.write_text(json.dumps(raw))
    config = json.loads((folder / "model" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "model" / "config.json").write_text(json.dumps(config))
    prompts = folder / "prompts.txt"
    prompts.write_text("2+3=\n4+5=\n")
    words = ["audit", str(folder / "model"), str(model), "--sampler", "hf", "-n", "12", "--max-tokens", "40"]
    words += ["--top-p", "0.95", "--prompts", str(prompts), "--out", str(folder / "out")]
    assert main(words) == 1
    shown = json.loads((folder / "out" / "audit.json").read_text())["token_texts"]["sequences"]
    texts = {token[0] for sequence in shown for token in sequence["tokens"]}
    assert texts >= set(HOSTILE.values()), "control: the model wrote each of them"
    return folder / "out"


@pytest.fixture
def opened(open_page, report) -> Callable[..., webdriver.Chrome]:
    """opened(size, dark): the driver with the page of the report."""
    return lambda *options: open_page((report / "audit.html").as_uri(), *options)


def one(driver: webdriver.Chrome, selector: str) -> WebElement:
    """The only element that a selector finds."""
    (element,) = driver.find_elements(By.CSS_SELECTOR, selector)
    return element


def press(driver: webdriver.Chrome, key: str) -> WebElement:
    """Press a key where the focus is. Returns the element that has the focus then."""
    driver.switch_to.active_element.send_keys(key)
    return driver.switch_to.active_element


def open_all(driver: webdriver.Chrome) -> None:
    """Open every section."""
    driver.execute_script("document.querySelectorAll('section > details').forEach(x => { x.open = true })")


def test_it_answers_in_order(opened):
    driver = opened()
    assert one(driver, "h1").text == "hf against zerokl"
    assert one(driver, ".answer").text.endswith("Not equal")
    headings = [heading.text for heading in driver.find_elements(By.TAG_NAME, "h2")]
    assert headings == ["Likely cause", "Figures", "Tokens", "Operations", "Settings"]
    assert "rope_theta is 20000" in one(driver, ".cause").text
    assert one(driver, "#cause").text.count("What to do:") == 1
    assert len(driver.find_elements(By.CSS_SELECTOR, ".keys .value")) == 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_answer_is_on_the_first_screen_and_all_else_is_folded(opened, dark):
    """Outcome, cause, what to do, three figures and the whole plot; below, a line for each section."""
    driver = opened(WIDE, dark)
    bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    for part in (".answer", ".cause", ".keys", "#cause canvas"):
        assert driver.execute_script(bottom, part) <= WIDE[1], part
    folded = driver.find_elements(By.CSS_SELECTOR, "section > details")
    assert len(folded) == 4
    assert not any(x.get_property("open") for x in folded)
    assert driver.execute_script("return document.documentElement.scrollHeight") < 2 * WIDE[1]
    red = driver.execute_script("return getComputedStyle(document.querySelector('.verdict')).color")
    assert red == ("rgb(255, 154, 148)" if dark else "rgb(164, 38, 44)")


def test_a_link_opens_its_section(opened):
    driver = opened()
    assert not one(driver, "#figures").is_displayed()
    one(driver, "nav a[href='#figures']").send_keys(Keys.ENTER)
    assert one(driver, "#figures").is_displayed()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_is_readable_in_light_and_dark_narrow_and_wide(opened, size, dark):
    driver = opened(size, dark)
    open_all(driver)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    ratio, where = driver.execute_script(CONTRAST)
    assert ratio >= 4.5, where  # WCAG 2.2, level AA
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 24)" if dark else "rgb(246, 247, 249)")


@pytest.mark.parametrize("width", [420, 360])
def test_on_a_phone_no_link_and_no_plot_is_cut(opened, width):
    driver = opened((width, 900))
    open_all(driver)
    links = driver.find_elements(By.CSS_SELECTOR, "nav a")
    assert len(links) == 5
    assert all(link.is_displayed() and link.rect["x"] + link.rect["width"] <= width for link in links)
    cut = (
        "return [...document.querySelectorAll('.plot')]"
        ".filter(x => x.querySelector('canvas').clientWidth > x.clientWidth).length"
    )
    WebDriverWait(driver, 5).until(lambda d: d.execute_script(cut) == 0)
    assert len(driver.find_elements(By.CSS_SELECTOR, ".plot canvas")) == 3
    driver.execute_script("document.querySelector('.uplot').style.minWidth = '32rem'")
    driver.execute_script("document.querySelector('.u-wrap').style.minWidth = '32rem'")
    assert driver.execute_script(cut) == 1, "control: a chart that is wider than its card is seen"


def test_a_chart_tells_the_values_of_the_place_under_the_pointer(opened):
    driver = opened()
    chart = driver.find_element(By.CSS_SELECTOR, "#cause .u-over")
    ActionChains(driver).move_to_element(chart).perform()
    place, values = one(driver, "#cause .reading").text.split(": ", 1)
    given = json.loads(one(driver, "#cause [data-chart]").get_dom_attribute("data-chart"))
    y = given["series"][0]["y"][given["names"].index(place)]
    assert float(values.removeprefix("between the two ").split(",")[0]) == pytest.approx(y, rel=5e-3)


def test_a_right_click_is_one_on_the_picture_that_the_browser_can_save(opened):
    driver = opened()
    driver.execute_script(
        "document.oncontextmenu = e => { window.clicked = e.target.tagName; e.preventDefault() }"
    )
    ActionChains(driver).context_click(driver.find_element(By.CSS_SELECTOR, "#cause .u-over")).perform()
    assert driver.execute_script("return window.clicked") == "CANVAS"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_chart_is_drawn_in_the_colours_of_the_theme(opened, dark):
    driver = opened(WIDE, dark)
    assert pixels(driver, "#cause", (106, 169, 255) if dark else (31, 111, 209)) > 50
    driver.find_element(By.CSS_SELECTOR, ".bar button").send_keys(Keys.ENTER)
    assert pixels(driver, "#cause", (31, 111, 209) if dark else (106, 169, 255)) > 50


def test_control_a_faint_text_is_seen(opened):
    driver = opened()
    driver.execute_script("document.querySelector('h1').style.color = '#ccc'")
    ratio, where = driver.execute_script(CONTRAST)
    assert ratio < 2
    assert where.startswith("<h1")


def test_hostile_text_is_text(opened, report, requests):
    """open_page sees to it that nothing was written to the console."""
    driver = opened()
    assert requests(0.3) == [(report / "audit.html").as_uri()], "nothing else is loaded"
    assert driver.title == "hf against zerokl · zerokl audit"  # a dialog would raise an exception here
    assert driver.find_elements(By.CSS_SELECTOR, "img, iframe, [onload], [onerror]") == []
    script = one(driver, "script").get_property("textContent")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = one(driver, "meta[http-equiv]").get_dom_attribute("content")
    assert f"script-src 'sha256-{digest}'; style-src 'sha256-" in policy, "no other script runs"
    assert "unsafe" not in policy
    strips = "".join(e.get_property("textContent") for e in driver.find_elements(By.CSS_SELECTOR, ".texts"))
    visible = [HOSTILE[character] for character in "adh1g"]
    for text in (*visible, "\\x1b[31m", "\\u202e"):
        assert text in strips
    assert {"\x1b", "\u202e", "\x07"}.isdisjoint(driver.page_source)
    sections = driver.find_elements(By.CSS_SELECTOR, "main > section")
    assert len(sections) == 5, "no text closed an element"


def test_control_requests_are_seen(open_page, report, tmp_path, requests):
    """Of a page that loads a picture: the page and the picture."""
    page = tmp_path / "page.html"
    page.write_text("<title>x</title><img src='data:,' alt=''><img src='picture.png' alt=''>")
    (tmp_path / "picture.png").write_bytes(b"")
    open_page(page.as_uri())
    assert (tmp_path / "picture.png").as_uri() in requests(0.3)


def test_hostile_text_is_text_in_the_terminal(report, model, tmp_path, capsys):
    """The same tables as a terminal shows them: no escape sequence of the model's is sent."""
    words = ["audit", str(report.parent / "model"), str(model), "-n", "12", "--max-tokens", "40"]
    words += ["--prompts", str(report.parent / "prompts.txt"), "--out", str(tmp_path / "out")]
    capsys.readouterr()
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "tokens farthest apart" in out
    assert {"\x1b", "\x07", "\u202e", "\x9b"}.isdisjoint(out)


def test_it_is_used_by_keyboard(opened):
    driver = opened()
    assert press(driver, Keys.TAB).get_attribute("class") == "skip"
    assert press(driver, Keys.ENTER).get_attribute("id") == "cause"
    one(driver, "nav a[href='#tokens']").send_keys(Keys.ENTER)
    first = driver.find_element(By.CSS_SELECTOR, "#tokens a")
    for _ in range(40):
        if press(driver, Keys.TAB) == first:
            break
    target = first.get_dom_attribute("href").removeprefix("#")
    token = press(driver, Keys.ENTER)
    assert token.get_attribute("id") == target
    assert token.is_displayed()
    y = driver.execute_script("return arguments[0].getBoundingClientRect().y", token)
    assert 40 <= y < WIDE[1], "it lies below the bar at the top"


def test_figures_of_tokens_open_by_keyboard(opened):
    driver = opened()
    open_all(driver)
    summary = driver.find_element(By.CSS_SELECTOR, "#tokens details[open] details > summary")
    driver.execute_script("arguments[0].focus()", summary)
    row = summary.find_element(By.XPATH, "..").find_element(By.CSS_SELECTOR, "tbody tr")
    assert not row.is_displayed()
    press(driver, Keys.ENTER)
    assert row.is_displayed()
    assert row.find_element(By.TAG_NAME, "td").text == "0"


def test_every_link_leads_somewhere(opened):
    driver = opened()
    targets = [link.get_dom_attribute("href") for link in driver.find_elements(By.TAG_NAME, "a")]
    assert len(targets) > 6
    for target in targets:
        assert one(driver, f"[id='{target.removeprefix('#')}']")


def test_an_equal_pair_is_said_to_be_equal(open_page, model, tmp_path):
    assert main(["audit", str(model), "-n", "2", "--max-tokens", "4", "--out", str(tmp_path / "out")]) == 0
    driver = open_page((tmp_path / "out" / "audit.html").as_uri())
    assert one(driver, ".answer").text.endswith("Equal to the bit")
    open_all(driver)
    assert "Every token is equal to the bit." in one(driver, "#tokens").text
