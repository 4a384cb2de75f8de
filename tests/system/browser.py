"""Debian's Chromium, driven by its chromedriver: screens of several kinds, colour schemes, JavaScript on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
WIDE, PHONE = 1600, 390
TIMEOUT_S = 60.0

# Returns every text whose contrast with its background is below a limit: [contrast, text].
_LOW_CONTRAST = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => channels(colour).slice(0, 3).map((value) => value / 255)
  .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
  .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if ((channels(colour)[3] ?? 1) === 1) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
for (const element of document.body.querySelectorAll("*")) {
  const nodes = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
  const text = nodes.map((node) => node.data).join("").trim();
  if (!text || !element.checkVisibility() || element.namespaceURI.endsWith("svg")) continue;
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < arguments[0]) found.push([(a + 0.05) / (b + 0.05), text]);
}
return found;
"""

Found = TypeVar("Found")


class Browser:
    """One window. Conditions are polled until they hold; a page may replace its elements at any time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, url: str, *, width: int = WIDE, dark: bool = False, scripts: bool = True) -> None:
        """Open a page on a screen of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.get("about:blank")
        self.errors()  # drops those of the page before
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        self._driver.get(url)

    def until(self, condition: Callable[[], Found], what: str) -> Found:
        """Wait until a condition holds, and return its value."""
        ignored = (NoSuchElementException, StaleElementReferenceException)
        wait = WebDriverWait(self._driver, TIMEOUT_S, poll_frequency=0.1, ignored_exceptions=ignored)
        return wait.until(lambda _: condition(), f"not within {TIMEOUT_S:g} s: {what}")

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return self._driver.find_element("css selector", selector).text

    def classes(self, selector: str) -> set[str]:
        """Return the classes of an element."""
        return set((self._driver.find_element("css selector", selector).get_attribute("class") or "").split())

    def colour(self, selector: str, name: str = "background-color") -> tuple[int, int, int]:
        """Return red, green and blue of an element."""
        value = self._driver.find_element("css selector", selector).value_of_css_property(name)
        red, green, blue = (int(float(part)) for part in value.split("(")[1].strip(")").split(",")[:3])
        return red, green, blue

    def count(self, selector: str) -> int:
        """Return how many elements match."""
        return len(self._driver.find_elements("css selector", selector))

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the screen."""
        element = "document.documentElement"
        return int(self._driver.execute_script(f"return {element}.scrollWidth - {element}.clientWidth"))

    def low_contrasts(self, least: float = 4.5) -> list[tuple[float, str]]:
        """Return the texts whose contrast is below what WCAG asks for."""
        return [(ratio, text) for ratio, text in self._driver.execute_script(_LOW_CONTRAST, least)]

    def errors(self) -> list[str]:
        """Return what the console of the browser has, such as violations of the page's policy."""
        return [entry["message"] for entry in self._driver.get_log("browser")]  # type: ignore[no-untyped-call]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser without a window. A missing package is an error, as for all system tests."""
    for program in (CHROMIUM, DRIVER):
        assert program.exists(), f"{program} is missing; run tests/system/install.sh"
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):  # root has no sandbox
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
