"""Protects the page in a real browser: it works, by keys alone too, on a phone, and for everyone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from servers import ROOT, free_ports
from waiting import answers, wait_for

pytest.importorskip("selenium", reason="selenium is missing: make browser")
pytest.importorskip("axe_core_python", reason="axe-core-python is missing: make browser")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="Chromium and chromedriver are missing: make browser"
)
DEMO = ROOT / "examples" / "demo"
ANSWERS = {
    "base": "France is a country in Europe. The capital of France is Paris.",
    "chinese": "法国",
    "japanese": "フランス",
}
COLOURS = """
const map = arguments[0];
const data = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
const found = new Set();
for (let i = 0; i < data.length; i += 4) if (data[i + 3]) found.add(data.slice(i, i + 3).join());
return found.size;
"""
OUTLINED = """
const style = getComputedStyle(arguments[0]);
return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
"""
MAIN = "import sys; from manylora.cli import main; sys.exit(main())"


def serve(folder: Path, *flags: str, root: Path = DEMO / "adapters") -> Iterator[str]:
    (port,) = free_ports(1)
    log = (folder / "serve.log").open("w", encoding="utf-8")
    command = [sys.executable, "-c", MAIN, "serve", str(DEMO / "base"), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--lora-root", str(root), "--port", str(port), *flags], stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}/"
    try:
        wait_for(lambda: process.poll() is not None or answers(url + "health/ready"), 90)
        assert process.poll() is None, (folder / "serve.log").read_text(encoding="utf-8")
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(tmp_path_factory.mktemp("page"))


class Browser(webdriver.Chrome):
    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(BROWSER)
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(options=options, service=webdriver.ChromeService(str(DRIVER)))

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, **features: str) -> None:
        given = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": given})

    def one(self, selector: str) -> WebElement:
        return self.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.execute_script("return arguments[0].textContent", self.one(selector)))

    def texts(self, selector: str) -> list[str]:
        found = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.execute_script(found, selector))

    def open(self, url: str) -> None:
        self.get(url)
        wait_for(lambda: self.text("#status") == "Live")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.switch_to.active_element.send_keys(key)


@pytest.fixture(scope="module")
def session() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


@pytest.fixture
def browser(session: Browser) -> Iterator[Browser]:
    session.size(1280, 900)
    session.media(prefers_color_scheme="light")
    session.get_log("browser")
    yield session
    said = [
        one for one in session.get_log("browser") if one["source"] != "rendering"
    ]  # advice to these tests
    assert said == []  # no error, and nothing that the content policy stopped
    session.get("about:blank")


def test_a_question_gets_three_streamed_answers_and_the_map_shows_who_came(
    browser: Browser, url: str
) -> None:
    browser.open(url)
    assert browser.text("#served") == "base with 2 adapters"
    assert browser.texts("#residents li") == []
    assert browser.text("#count-cold_loads") == "0"
    maps = [browser.one(f"#{level}-map") for level in ("device", "host")]
    assert [browser.execute_script(COLOURS, one) for one in maps] == [1, 1]
    browser.execute_script(
        "window.seen = new Set();"
        "new MutationObserver(() => window.seen.add(document.querySelector('.answer .text').textContent))"
        ".observe(document.querySelector('#answers'), {subtree: true, childList: true});"
    )
    browser.one("#send").click()
    wait_for(lambda: browser.text("#announce") == "All answers are complete")
    told = browser.texts(".answer .text")
    assert len(set(told)) == 3
    for text, expected in zip(told, ANSWERS.values(), strict=True):
        assert text.strip().startswith(expected)
    assert browser.execute_script("return window.seen.size") > 1  # it grew piece by piece
    for meta in browser.texts(".answer .meta"):  # a speed too, where pieces did not come all at once
        assert re.fullmatch(r"first token \d+ ms · \d+ tokens( · \d+ tokens/s)?", meta)
    wait_for(lambda: len(browser.texts("#residents li")) == 2)
    assert sorted(browser.texts("#residents .name")) == ["chinese", "japanese"]
    wait_for(lambda: browser.text("#count-cold_loads") == browser.text("#count-device_loads") == "2")
    wait_for(lambda: [browser.execute_script(COLOURS, one) for one in maps] == [3, 3])
    happened = browser.texts("#events .what")
    assert {"chinese cold load to the host", "chinese copied to the device"} <= set(happened)
    browser.one("#send").click()
    wait_for(lambda: browser.text("#count-hits") == "2")
    wait_for(lambda: "tokens/s" in browser.text("#now-tokens") and browser.text("#now-ttft") != "–")


def test_all_of_it_works_by_keys_alone_and_focus_is_seen(browser: Browser, url: str) -> None:
    browser.open(url)
    visited = []
    for _ in range(40):
        browser.press(Keys.TAB)
        focused = browser.switch_to.active_element
        visited.append(focused.get_attribute("id") or focused.get_attribute("value") or focused.text)
        if focused.get_attribute("id") == "question":
            focused.send_keys(Keys.CONTROL, "a")
            focused.send_keys("What is the capital of Japan?")
        if focused.get_attribute("value") == "japanese":
            focused.send_keys(Keys.SPACE)
            assert not focused.is_selected()
            break
        seen = (
            focused.find_element(By.XPATH, "following-sibling::span")
            if focused.tag_name == "input"
            else focused
        )
        assert browser.execute_script(OUTLINED, seen), f"the focus on {visited[-1]} is not seen"
    assert visited[1:] == ["question", "base", "chinese", "japanese"]
    browser.press(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("id") == "send"  # after all that it sends
    question = browser.one("#question")
    browser.execute_script("arguments[0].focus()", question)
    browser.press(Keys.ENTER)
    wait_for(lambda: browser.text("#announce") == "All answers are complete")
    assert [one.strip() for one in browser.texts(".answer .text")] == ["Tokyo", "东京"]
    wait_for(lambda: browser.texts("#residents li"))
    for _ in range(20):
        browser.press(Keys.TAB)
        if browser.switch_to.active_element.get_attribute("aria-pressed") is not None:
            break
    browser.press(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("aria-pressed") == "true"
    assert browser.text("#pointed").startswith("chinese: device pages ")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_window_has_nothing_to_the_side(browser: Browser, url: str, width: int) -> None:
    browser.size(width, 844)
    browser.open(url)
    browser.one("#send").click()
    wait_for(lambda: browser.text("#announce") == "All answers are complete")
    sizes = "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
    wide, shown = browser.execute_script(sizes)
    assert wide == shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_found_by_axe(browser: Browser, url: str, scheme: str) -> None:
    browser.media(prefers_color_scheme=scheme)
    browser.open(url)
    browser.one("#send").click()
    wait_for(lambda: browser.text("#announce") == "All answers are complete")
    wait_for(lambda: browser.texts("#residents li"))
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 20, 23)") == (scheme == "dark")
    browser.execute_script((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    result = browser.execute_async_script("axe.run(document).then(arguments[0])")
    assert len(result["passes"]) > 20
    found = [f"{one['id']}: {[node['html'] for node in one['nodes']][:3]}" for one in result["violations"]]
    assert found == []


def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab(session: Browser, tmp_path: Path) -> None:
    entry = {"sha256": hashlib.sha256(b"right").hexdigest(), "adapters": ["chinese"]}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [entry]}), encoding="utf-8")
    for url in serve(tmp_path, "--api-keys", str(keys)):
        session.size(1280, 900)
        session.get(url)
        wait_for(lambda: session.one("#key-dialog").get_attribute("open"))
        assert session.switch_to.active_element.get_attribute("id") == "key"
        session.press("wrong", Keys.ENTER)
        wait_for(lambda: session.text("#key-problem") == "The server does not know this key.")
        wait_for(lambda: session.one("#key-dialog").get_attribute("open"))
        session.press("right", Keys.ENTER)
        wait_for(lambda: session.text("#status") == "Live")
        assert session.texts("#choices label") == ["basebase model", "chinese"]
        assert session.execute_script("return Object.values(sessionStorage)") == ["right"]
        assert session.execute_script("return localStorage.length + document.cookie.length") == 0
        session.one("#change-key").click()
        assert session.text("#key-title") == "Another key"
        session.press(Keys.ESCAPE)
        wait_for(lambda: not session.one("#key-dialog").get_attribute("open"))
        assert session.execute_script("return Object.values(sessionStorage)") == ["right"]
        session.get("about:blank")
        session.get_log("browser")  # the refused requests are there
