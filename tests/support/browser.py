"""A headless Chromium that takes pictures of pages.

python tests/support/browser.py page.html picture.png [search term]
"""

import contextlib
import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

LIMIT = 60  # seconds for a page to load, or to show an awaited result


def missing():
    """Returns what the browser lacks, or None."""
    if not _chromium():
        return "no Chromium on PATH"
    return None if shutil.which("chromedriver") else "no chromedriver on PATH"


def _chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def chromium(width=1400, height=1000):
    options = webdriver.ChromeOptions()
    options.binary_location = _chromium()
    for argument in (
        "--headless",
        "--no-sandbox",  # root has no sandbox
        "--disable-dev-shm-usage",  # too small in containers
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    driver.set_page_load_timeout(LIMIT)
    driver.set_script_timeout(LIMIT)
    try:
        yield driver
    finally:
        driver.quit()


def search(driver, term):
    """Types ``term`` into the search box and returns the page's count of hits."""
    all_of_it = Keys.CONTROL + "a" + Keys.NULL
    driver.find_element(By.ID, "term").send_keys(all_of_it, Keys.DELETE, term)
    expected = term.strip().lower()
    WebDriverWait(driver, LIMIT).until(
        lambda _: driver.execute_script("return searched") == expected
    )
    return driver.find_element(By.ID, "count").text


def main(page, picture, term=""):
    with chromium() as driver:
        driver.get(Path(page).resolve().as_uri())
        search(driver, term)
        height = "return document.documentElement.scrollHeight + outerHeight - innerHeight"
        driver.set_window_size(1400, driver.execute_script(height))
        driver.save_screenshot(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
