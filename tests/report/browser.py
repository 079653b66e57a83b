"""A headless Chromium that tests drive over its debugging pipe: any width, both themes, with or
without scripts.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)  # fmt: skip
# The width of the page, elements that reach beyond the window, and the sizes of pictures.
LAYOUT = """(() => {
  const boxes = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, thead, nav, .unseen"));
  const shown = [...document.images].filter(i => i.checkVisibility());
  const images = shown.map(i => [i.complete, i.naturalWidth, Math.round(i.offsetWidth)]);
  return {
    scroll: document.documentElement.scrollWidth, images,
    beyond: boxes.filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200)),
  };
})()"""
# Elements whose text has too little contrast with its background.
CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const read = new Map(); // a page has thousands of texts and a dozen colours
  const channels = color => {
    if (!read.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
      read.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return read.get(color);
  };
  const light = color => {
    const linear = c => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(color).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = e => {
    for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (channels(c)[3]) return c; }
    return "white";
  };
  const found = {};
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !e.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(paper(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found[`${e.tagName}.${e.className}`] = contrast;
  }
  return found;
})()"""


class Browser:
    """One window. `open` a page, then `run` JavaScript in it."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        # Chromium reads from descriptor 3 and writes to 4
        def connect() -> None:
            reading, writing = (os.dup(end) for end in (to_browser, from_browser))
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4, to_browser, from_browser),
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread, self._number, self._session = b"", 0, ""
        # Events, without answers
        self.messages: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(
        self,
        page: Path | str,
        width: int,
        height: int = 800,
        *,
        dark: bool = False,
        scripts: bool = True,
        media: str = "",
        fragment: str = "",
    ) -> None:
        """Show a page (a file or an address), at a fragment, and wait until it has loaded."""
        address = page if isinstance(page, str) else page.as_uri()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media=media, features=[theme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        # The same address would not be loaded again
        for shown in ("about:blank", f"{address}#{fragment}"):
            before = len(self.messages)
            self.call("Page.navigate", url=shown)
            while not any(
                message["method"] == "Page.loadEventFired" for message in self.messages[before:]
            ):
                self._receive()

    def run(self, script: str) -> Any:
        """The awaited value of an expression in the page, even if the page's own scripts are
        off.
        """
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]["exception"][
            "description"
        ]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key on the focused element."""
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text if kind == "keyDown" else "",
            )

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send `mousePressed`, `mouseMoved` or `mouseReleased` at a place in the window."""
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
        )

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._receive()
        while answer.get("id") != self._number:
            answer = self._receive()
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        # A message of the pipe ends with a zero byte
        while b"\0" not in self._unread:
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has exited"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        if "method" in answer:
            self.messages.append(answer)
        return answer
