"""The pages of `zerokl report` and `zerokl watch` in a real browser: what a person sees, hears and types."""

import itertools
import json
import random
import threading
import time
from pathlib import Path

import axe_core_python
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from zerokl.engine.runs.report.page import write_report
from zerokl.engine.runs.report.watch import LiveRuns, Server

from tests.browser.conftest import NARROW, WIDE, pixels
from tests.made_run import HOSTILE, made_run, metrics_line, write_lines, write_rollouts

pytestmark = pytest.mark.browser
AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
SIZES = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])


def text_of(driver: webdriver.Chrome, selector: str) -> str:
    return wait_for(driver, selector).text


def wait_for(driver: webdriver.Chrome, selector: str, seconds: float = 20):
    return WebDriverWait(driver, seconds).until(lambda d: d.find_element(By.CSS_SELECTOR, selector))


def shows(driver: webdriver.Chrome, selector: str, words: str, seconds: float = 20) -> None:
    """Wait until the text of an element has the words."""
    WebDriverWait(driver, seconds).until(lambda d: words in d.find_element(By.CSS_SELECTOR, selector).text)


def axe(driver: webdriver.Chrome, rules: str = "wcag2a,wcag2aa,best-practice") -> list[list[str]]:
    """What axe finds wrong: rule, element and what to do."""
    driver.execute_script(AXE)
    return driver.execute_async_script(
        "const [rules, done] = arguments; axe.run(document, {runOnly: rules.split(',')}).then(r => done("
        "r.violations.map(v => [v.id, v.nodes[0].html, v.nodes[0].failureSummary])))",
        rules,
    )


def rollouts(driver: webdriver.Chrome, seconds: float = 20) -> list[str]:
    """The shown rollouts, once they have been read."""
    driver.execute_script("document.getElementById('rollouts').scrollIntoView()")
    status = wait_for(driver, "#rollouts [role=status]")
    WebDriverWait(driver, seconds).until(lambda _: "of" in status.text)
    rows = "#rollouts ol.rows > li.row"
    # The number is said before the rows are drawn.
    if not status.text.startswith("0 "):
        WebDriverWait(driver, seconds).until(lambda d: d.find_elements(By.CSS_SELECTOR, rows))
    return [row.text for row in driver.find_elements(By.CSS_SELECTOR, rows)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([made_run(tmp_path_factory.mktemp("made") / "good")]).as_uri()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("made")
    a = made_run(folder / "a", steps=6)
    b = made_run(folder / "b", steps=6, fork=3, k3=0.01, settings={"exact": False, "optimizer.lr": 3e-3})
    return write_report([a, b], folder / "two.html").as_uri()


@SIZES
def test_the_first_screen_says_what_a_person_wants_to_know(open_page, page, size):
    driver = open_page(page, size)
    overview = text_of(driver, "#overview")
    first = ("0.200", "0.550", "0.0", "all 128 tokens equal to the bit", "4 steps, 1.50 s each")
    for words in (*first, "0.250", "before the first step", "answer 0", "The same prompts", "zerokl train"):
        assert words in overview, words
    if size == WIDE:
        last = driver.find_element(By.CSS_SELECTOR, "#overview .grid > :last-child")
        assert last.rect["y"] + last.rect["height"] <= size[1], "all of it is above the fold"


@SIZES
@pytest.mark.parametrize("which", ["page", "comparison"])
def test_nothing_is_wider_than_the_window(open_page, request, which, size):
    driver = open_page(request.getfixturevalue(which), size)
    rollouts(driver)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_the_bar_of_a_steps_time_fills_its_card_also_where_a_step_is_short(open_page, tmp_path):
    run = made_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    short = [{k: v / 10 if k.startswith("time/") else v for k, v in row.items()} for row in rows]
    assert 0 < sum(v for k, v in short[0].items() if k.startswith("time/")) < 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    driver = open_page(write_report([run]).as_uri())
    wait_for(driver, ".share")
    widths = (
        "const bar = document.querySelector('.share'), end = bar.lastChild.getBoundingClientRect().right;"
        "return [bar.clientWidth, end - bar.firstChild.getBoundingClientRect().left]"
    )
    whole, filled = driver.execute_script(widths)
    assert abs(whole - filled) <= 1


def test_charts_are_drawn_and_described(open_page, page):
    driver = open_page(page)
    wait_for(driver, ".chart canvas")
    charts = driver.find_elements(By.CSS_SELECTOR, ".plot[role=img]")
    assert len(charts) > 10
    labels = [chart.get_attribute("aria-label") for chart in charts]
    assert any("Entropy by step. good: from 0.500 to 0.100" in label for label in labels), labels
    assert pixels(driver, "#learning", (31, 111, 209)) > 50, "something is drawn in the line's colour"


@SIZES
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("which", ["page", "comparison"])
def test_accessible_by_the_rules_of_axe(open_page, request, which, dark, size):
    """Contrast, names of controls, order of headings, roles: WCAG 2 A and AA."""
    driver = open_page(request.getfixturevalue(which), size, dark)
    driver.refresh()  # the theme is chosen when the page opens, after the storage was cleared
    rollouts(driver)
    driver.find_element(By.CSS_SELECTOR, "#rollouts li.row button").click()
    wait_for(driver, ".detail table")
    theme = driver.execute_script("return document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")
    assert axe(driver) == []


def test_control_axe_sees_a_faint_text(open_page, page):
    driver = open_page(page)
    wait_for(driver, "h1")
    driver.execute_script("document.querySelector('h1').style.color = '#ccc'")
    assert [fault[0] for fault in axe(driver, "wcag2aa")] == ["color-contrast"]


def test_every_control_is_reached_by_the_keyboard_and_shows_its_focus(open_page, page):
    driver = open_page(page)
    rollouts(driver)
    driver.execute_script("window.scrollTo(0, 0); document.activeElement.blur()")
    controls = driver.execute_script(
        "return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
        ".filter(e => !e.disabled && e.getClientRects().length).length"
    )
    reached = set()
    for _ in range(controls + 5):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        focused = driver.switch_to.active_element
        if focused.tag_name == "body":
            break
        outline = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", focused)
        assert outline != "none", focused.get_attribute("outerHTML")[:200]
        reached.add(focused.id)
    assert len(reached) == controls


def test_rollouts_worst_first_filtered_paged_and_opened_by_keyboard(open_page, page):
    driver = open_page(page)
    rows = rollouts(driver)
    assert len(rows) == 25
    assert rows[0].startswith("step 3")
    assert "\n0.0\n" in rows[0]
    driver.find_element(By.CSS_SELECTOR, "#rollouts [data-name=next]").send_keys(Keys.ENTER)
    shows(driver, ".pager", "page 2 of 2")
    assert len(rollouts(driver)) == 32 - 25
    driver.find_element(By.CSS_SELECTOR, "#rollouts input[type=search]").send_keys("answer 17")
    shows(driver, "#rollouts [role=status]", "1 rollout of 32")
    more = driver.find_element(By.CSS_SELECTOR, "#rollouts li.row button")
    more.send_keys(Keys.SPACE)
    detail = wait_for(driver, "#rollouts .detail")
    assert "The other completions of its group" in detail.text
    assert len(detail.find_elements(By.CSS_SELECTOR, "li.row")) == 3
    assert more.get_attribute("aria-expanded") == "true"


def test_tokens_take_the_colour_that_is_chosen(open_page, comparison):
    driver = open_page(comparison)
    rollouts(driver)

    def tints() -> set[str]:
        marks = driver.find_elements(By.CSS_SELECTOR, "#rollouts li.row mark")
        return {mark.value_of_css_property("background-color") for mark in marks}

    def choose(label: str, value: str) -> None:
        for field in driver.find_elements(By.CSS_SELECTOR, "#rollouts .filters > label"):
            if field.text.startswith(label):
                Select(field.find_element(By.TAG_NAME, "select")).select_by_visible_text(value)
                time.sleep(0.5)

    choose("colour", "mismatch |Δlogp|")
    assert tints() == {"rgba(0, 0, 0, 0)"}, "the exact run has none"
    choose("run", "b")
    rollouts(driver)
    assert len(tints()) == 1
    assert tints() != {"rgba(0, 0, 0, 0)"}
    choose("colour", "advantage")
    assert tints() == {"rgba(214, 69, 40, 0.106)"}, "the worst have advantage -0.5"


# "12*3=", then the model draws 1*2 and a stop token, a tool says 2>, and the model draws =2 without an end.
TRAJECTORY = {
    "completion_ids": [4, 41, 5, 1, 5, 48, 43, 5],
    "logprobs": [-0.1, -0.2, -0.3, -0.4, None, None, -0.5, -0.6],
    "mask": [1, 1, 1, 1, 0, 0, 1, 1],
    "prompt_ids": [4, 5, 41, 6, 43],
    "prompt_text": "12*3=",
    "turn_starts": [5, 11],
    "turn_rewards": [0.25, 0.0],
    "finish": "tokens",
}


@SIZES
def test_a_trajectory_is_shown_turn_by_turn_with_what_was_drawn(open_page, tmp_path, size):
    run = made_run(tmp_path / "run", steps=1)
    row = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0]) | TRAJECTORY
    (run / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    driver = open_page(write_report([run]).as_uri(), size)
    rollouts(driver)
    strip = driver.find_element(By.CSS_SELECTOR, "#rollouts .strip")
    assert [e.text for e in strip.find_elements(By.CSS_SELECTOR, ".between")] == ["2", ">"]
    assert [e.text for e in strip.find_elements(By.TAG_NAME, "mark")] == ["1", "*", "2", "<eos>", "=", "2"]
    driver.find_element(By.CSS_SELECTOR, "#rollouts li.row button").send_keys(Keys.SPACE)
    wait_for(driver, ".turns")
    turns = driver.find_elements(By.CSS_SELECTOR, ".turns tbody tr")
    cells = [[cell.text for cell in turn.find_elements(By.TAG_NAME, "td")] for turn in turns]
    assert cells == [["1", "12*3=", "1*2<eos>", "0.250", "4"], ["2", "2>", "=2", "0", "2"]]
    not_drawn = driver.find_elements(By.CSS_SELECTOR, ".detail tr.between")
    assert [row.find_element(By.TAG_NAME, "td").text for row in not_drawn] == ["4", "5"]
    assert "The end: tokens (its last turn was cut before a stop token" in text_of(driver, ".detail")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert axe(driver) == []


def test_two_runs_are_compared(open_page, comparison):
    driver = open_page(comparison)
    overview = text_of(driver, "#overview")
    assert "the runs differ" in overview
    assert "optimizer.lr" in overview
    assert "configuration optimizer.lr: None and 0.003; then step 3: tokens" in text_of(driver, "#ledger")

    def order() -> list[str]:
        rows = driver.find_elements(By.CSS_SELECTOR, "#overview article:last-child tbody tr")
        return [row.text.split()[0] for row in rows]

    headings = driver.find_elements(By.CSS_SELECTOR, "#overview th button")
    heading = next(button for button in headings if button.text == "mismatch k3")
    heading.send_keys(Keys.ENTER)
    assert order() == ["b", "a"]
    heading.send_keys(Keys.ENTER)
    assert order() == ["a", "b"]


def test_hostile_text_stays_text(open_page, tmp_path):
    run = made_run(
        tmp_path / "<img src=x onerror=hacked=1>",
        text=lambda i: HOSTILE,
        token="<img src=x onerror=hacked=1>",
        settings={"task.name": HOSTILE.replace("\x00", "").replace("\x1b", ""), "optimizer.lr": 1e-3},
    )
    driver = open_page(write_report([run], tmp_path / "out.html").as_uri())
    rows = rollouts(driver)
    assert "<img src=x onerror=hacked=1>" in rows[0]
    driver.find_element(By.CSS_SELECTOR, "#rollouts li.row button").click()
    wait_for(driver, ".detail table")
    assert "‹U+202E›␀␛[31m" in text_of(driver, "#overview")
    assert driver.execute_script("return window.hacked") is None
    assert driver.find_elements(By.CSS_SELECTOR, "img, svg, iframe") == []


def test_a_hundred_thousand_rollouts_open_without_freezing(open_page, tmp_path):
    """A log of more than 50 MB. No task of the page may take longer than a person notices as a freeze."""
    run = made_run(tmp_path / "large", steps=100, P=50, G=20, tokens=24)
    assert (run / "rollouts.jsonl").stat().st_size > 50e6
    file = write_report([run])
    assert file.stat().st_size < 20e6
    began_s = time.monotonic()
    driver = open_page(file.as_uri())
    assert "finished" in text_of(driver, ".masthead")
    opened_s = time.monotonic() - began_s
    driver.execute_script(
        "window.longest = 0; new PerformanceObserver(l => { for (const e of l.getEntries())"
        " window.longest = Math.max(window.longest, e.duration); }).observe({type: 'longtask'})"
    )
    assert len(rollouts(driver, 60)) == 25
    assert "100,000 rollouts of 100,000" in text_of(driver, "#rollouts [role=status]")
    driver.find_element(By.CSS_SELECTOR, "#rollouts input[type=search]").send_keys("answer 99999")
    shows(driver, "#rollouts [role=status]", "1 rollout of", 120)
    longest_ms = driver.execute_script("return window.longest")
    size_mb = file.stat().st_size / 1e6
    print(f"opened in {opened_s:.1f} s, longest task {longest_ms:.0f} ms, page {size_mb:.1f} MB")
    assert opened_s < 15
    assert longest_ms < 1000


def test_the_live_page_follows_a_run(open_page, tmp_path):
    run = made_run(tmp_path / "live", steps=3, planned=10)
    server = Server(LiveRuns([run]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        driver = open_page(server.address)
        assert "3 of 10 steps" in text_of(driver, ".masthead")
        assert len(rollouts(driver)) == 24
        write_lines(run / "metrics.jsonl", [metrics_line(3, 4, 8)])
        write_rollouts(run, range(3, 4), 2, 4)
        shows(driver, ".masthead", "4 of 10 steps", 30)
        shows(driver, "#rollouts .controls", "show 8 new rollouts")
        driver.find_element(By.CSS_SELECTOR, "#rollouts .controls button").click()
        shows(driver, "#rollouts [role=status]", "32 rollouts of 32")
    finally:
        driver.get("about:blank")
        server.shutdown()
        server.close()


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of an ablation of two factors and three seeds, in which one factor changes the mismatch."""
    folder, combinations = tmp_path_factory.mktemp("ablation"), []
    for lr, loss in ((1, "pg"), (1, "gspo"), (2, "pg"), (2, "gspo")):
        cells = folder / "cells" / f"lr={lr},loss={loss}"
        runs = [made_run(cells / f"seed-{s}", k3=0.1 * lr, settings={"exact": False}) for s in (0, 1, 2)]
        combinations.append(
            {"settings": {"lr": str(lr), "loss": loss}, "runs": [{"run": str(run)} for run in runs]}
        )
    (folder / "ablation.json").write_text(json.dumps({"combinations": combinations}))
    return write_report([folder]).as_uri()


@SIZES
def test_an_ablation_has_a_chart_for_each_place_and_says_what_exceeds_the_seeds(open_page, ablation, size):
    driver = open_page(ablation, size)
    shows(driver, "#factors tbody tr", "exceeds the seeds' spread")
    panels = [h.text for h in driver.find_elements(By.CSS_SELECTOR, "#factors .grid h3")]
    assert panels == ["loss pg", "loss gspo"]
    Select(driver.find_element(By.CSS_SELECTOR, "#factors select")).select_by_visible_text("loss")
    panels = [h.text for h in driver.find_elements(By.CSS_SELECTOR, "#factors .grid h3")]
    assert panels == ["lr 1", "lr 2"]
    chart = driver.find_element(By.CSS_SELECTOR, "#factors .half .plot")
    assert "lr 2, loss gspo: sampler's policy 0.550, trainer's –" in chart.get_attribute("aria-label")
    head = driver.find_element(By.XPATH, "//section[@id='factors']//th[button='difference']")
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert head.get_attribute("aria-sort") == "ascending"
    assert axe(driver) == []


def grid_page(folder: Path, axes: list[dict[str, str]]) -> str:
    """The page of an ablation with one run for each of the settings; their rewards rise from 0.01 to 0.9."""
    combinations = []
    for i, settings in enumerate(axes):
        run = made_run(folder / "cells" / str(i) / "seed-0", steps=1, settings={"exact": False})
        line = json.loads((run / "metrics.jsonl").read_text())
        line |= {"reward/mean": 0.01 + i / 100, "mismatch/k3_sequence": i / 10}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        combinations.append({"settings": settings, "runs": [{"run": str(run)}]})
    (folder / "ablation.json").write_text(json.dumps({"combinations": combinations}))
    return write_report([folder]).as_uri()


def test_a_field_of_the_map_is_its_combination(open_page, tmp_path):
    names = ("advantage", "lr", "sampler")
    labels = [*itertools.product(("batch", "group"), ("low", "mid", "high"), ("exact", "late"))]
    random.Random(0).shuffle(labels)
    lost = labels.pop()
    driver = open_page(grid_page(tmp_path, [dict(zip(names, label, strict=True)) for label in labels]))
    shows(driver, "#factors", "Map of rewards")
    fields = {}
    for panel in driver.find_elements(By.CSS_SELECTOR, "table.map"):
        title = panel.find_element(By.TAG_NAME, "caption").text
        columns = [th.text for th in panel.find_elements(By.CSS_SELECTOR, "thead th")][1:]
        for row in panel.find_elements(By.CSS_SELECTOR, "tbody tr"):
            name = row.find_element(By.TAG_NAME, "th").text
            cells = [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
            fields |= {(title, name, column): cell for column, cell in zip(columns, cells, strict=True)}
    expected = {label: f"{0.01 + i / 100:.2f}\n{i / 10:#.2g} nats" for i, label in enumerate(labels)}
    assert fields == expected | {labels[0]: "0.01", lost: ""}
    assert axe(driver) == []


@pytest.mark.parametrize(("panels", "shown"), [(12, 12), (13, 0)])
def test_of_more_panels_than_a_person_reads_there_is_no_map(open_page, tmp_path, panels, shown):
    axes = [{"a": str(i), "lr": "low", "sampler": "exact"} for i in range(panels)]
    driver = open_page(grid_page(tmp_path, axes))
    shows(driver, "#factors", "Rewards at the end")
    assert len(driver.find_elements(By.CSS_SELECTOR, "table.map")) == shown


def test_the_live_page_takes_up_the_cells_of_an_ablation(open_page, tmp_path):
    cells = [{"folder": f"{lr}/seed-{s}", "settings": {"lr": str(lr)}} for lr in (1, 2) for s in (0, 1)]
    (tmp_path / "cells.json").write_text(json.dumps({"cells": cells}))
    made_run(tmp_path / "cells" / "1" / "seed-0", steps=3, planned=10)
    server = Server(LiveRuns([tmp_path]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        driver = open_page(server.address)
        shows(driver, "#pulse", "live: 1 of 4 runs have begun", 30)
        assert driver.find_elements(By.ID, "factors") == []
        made_run(tmp_path / "cells" / "2" / "seed-0", steps=3, planned=10)
        shows(driver, "#pulse", "live: 2 of 4 runs have begun", 30)
        shows(driver, ".masthead", "2 runs", 30)
        assert driver.find_elements(By.ID, "factors") != []
        choices = driver.find_elements(By.CSS_SELECTOR, "#rollouts select option")
        assert {"lr 1 · 1/seed-0", "lr 2 · 2/seed-0"} <= {option.text for option in choices}
    finally:
        driver.get("about:blank")
        server.shutdown()
        server.close()
