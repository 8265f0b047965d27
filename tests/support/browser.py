"""A headless Chromium that drives pages, where there is one: by pointer, or by keys alone.

``SHARDFOLD_BROWSER`` names the program, if it is none of the usual names; ``SHARDFOLD_AXE`` the ``axe.min.js`` of npm's
``axe-core``, which looks for what people with other senses cannot use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Visitor", "browser", "visitor"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WAIT = 60_000  # milliseconds, on a loaded machine
MOST_TABS = 400


@contextmanager
def browser() -> Iterator[Any]:
    """Skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = os.environ.get("SHARDFOLD_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium")
    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=options)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def visitor(opened: Any, *, width: int = 1280, scheme: str = "light", keys: bool = False) -> Iterator[Visitor]:
    """Somebody with a window of their own.

    Args:
        opened: a browser.
        width: of the window, in pixels.
        scheme: of colours, ``"light"`` or ``"dark"``.
        keys: whether they have no pointer.
    """
    context = opened.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    context.set_default_timeout(WAIT)
    try:
        yield Visitor(context.new_page(), keys)
    finally:
        context.close()


class Visitor:
    """What somebody does to a page, and what went wrong meanwhile.

    Attributes:
        page: playwright's.
        faults: errors that scripts raised, and what the console was told of: also what the page's policy refused.
    """

    def __init__(self, page: Any, keys: bool) -> None:
        self.page, self.keys = page, keys
        self.faults: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(f"{error}\n{error.stack}"))
        page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))

    def press(self, role: str, name: str, **which: Any) -> None:
        """A button, a link or a box."""
        self.act(self.page.get_by_role(role, name=name, **{"exact": True, **which}).first, is_box=role == "checkbox")

    def act(self, found: Any, *, is_box: bool = False) -> None:
        if not self.keys:
            found.click()
            return
        self.reach(found)
        self.page.keyboard.press("Space" if is_box else "Enter")

    def write(self, label: str, text: str) -> None:
        """Into a field, in place of what is there."""
        found = self.page.get_by_label(label, exact=True).first
        if not self.keys:
            found.fill(text)
            return
        self.reach(found)
        self.page.keyboard.press("Control+A")
        self.page.keyboard.press("Delete")
        self.page.keyboard.type(text)

    def choose(self, label: str, text: str) -> None:
        """One of a list."""
        found = self.page.get_by_role("combobox", name=label, exact=True).first
        if not self.keys:
            found.select_option(label=text)
            return
        self.reach(found)
        self.page.keyboard.type(text)
        assert found.evaluate("(each) => each.selectedOptions[0].textContent") == text

    def reach(self, found: Any) -> None:
        """Go there by the tabulator, which has to come everywhere and to be seen."""
        found.wait_for()
        for _ in range(MOST_TABS):
            if found.evaluate("(each) => each === document.activeElement"):
                style = found.evaluate("(each) => getComputedStyle(each).outlineStyle")
                assert style != "none", f"nobody sees that {found} has the focus"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the tabulator does not come to {found}")

    def expect_accessible(self) -> None:
        """Nothing that axe calls serious or critical, and nothing that is wider than the window."""
        over = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"{self.page.url} is {over} pixels wider than the window"
        path = os.environ.get("SHARDFOLD_AXE")
        if not path:
            return
        self.page.evaluate(Path(path).read_text(encoding="utf-8"))
        found = [
            f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes']]}"
            for each in self.page.evaluate("axe.run()")["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert not found, f"{self.page.url}:\n" + "\n".join(found)

    def expect_no_faults(self) -> None:
        assert not self.faults, "\n".join(self.faults)
