"""Headless Chromium for the tests of the page: what it lays out, at a width and in a colour scheme, and how it looks."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
MEASURE = """
<script>
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, width = root.clientWidth;
    for (const fold of page.querySelectorAll("details")) fold.open = true;
    const inside = (node) => node.closest(".scroll") || node.closest(".vh");
    const wide = [...page.body.querySelectorAll("*")].filter((n) => !inside(n) && n.getBoundingClientRect().right > width + 1);
    const style = frame.contentWindow.getComputedStyle(page.body);
    found[frame.title] = {
      width, scroll: root.scrollWidth, height: root.scrollHeight,
      wide: wide.slice(0, 5).map((n) => n.outerHTML.slice(0, 120)),
      filter: !page.querySelector(".filter").hidden,
      page: style.backgroundColor, text: style.color,
    };
  }
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def find_chromium() -> str | None:
    """The browser's command, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def measure(browser: str, folder: Path, pages: dict[tuple[str, int], str], dark: bool) -> dict[str, dict[str, Any]]:
    """Lay out pages in frames of the given widths, with everything unfolded; what each came to, under ``"name width"``."""
    frames = "".join(_frame(f"{name} {width}", width, 800, page) for (name, width), page in pages.items())
    printed = _run(browser, folder, f"{MEASURE}{frames}", dark, "--virtual-time-budget=10000", "--dump-dom")
    match = re.search(r'<pre id="measured">(.*?)</pre>', printed, re.DOTALL)
    assert match is not None, printed[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(html.unescape(match[1]))
    return found


def screenshot(browser: str, folder: Path, page: str, size: tuple[int, int], dark: bool, unfold: bool = False) -> bytes:
    """A PNG of a page in a frame of that width and height."""
    width, height = size
    shown = page.replace("<details", "<details open") if unfold else page
    target = folder / "shot.png"
    options = (f"--screenshot={target}", f"--window-size={max(width, 500)},{height}")
    _run(browser, folder, _frame("page", width, height, shown), dark, *options)
    return target.read_bytes()


def _frame(title: str, width: int, height: int, page: str) -> str:
    style = f"width:{width}px;height:{height}px;border:0;display:block"
    return f'<iframe title="{html.escape(title)}" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def _run(browser: str, folder: Path, body: str, dark: bool, *options: str) -> str:
    harness = folder / "harness.html"
    scheme = "dark" if dark else "light"
    harness.write_text(
        f'<!doctype html><meta charset="utf-8"><style>:root{{color-scheme:{scheme}}}body{{margin:0}}</style>{body}',
        encoding="utf-8",
    )
    profile = folder / f"profile-{len(list(folder.iterdir()))}"
    setting = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *OPTIONS, f"--user-data-dir={profile}", setting, *options, harness.as_uri()]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
