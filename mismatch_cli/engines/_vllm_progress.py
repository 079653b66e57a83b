"""How many responses vLLM has finished, from the bar that it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def after(count: int, on_finished: Callable[[int], None]) -> Callable[[int], None]:
    """Leave out the first `count` that finish: they have been counted."""

    def told(finished: int) -> None:
        nonlocal count
        skipped = min(count, finished)
        count -= skipped
        if finished > skipped:
            on_finished(finished - skipped)

    return told


def progress_bar(on_finished: Callable[[int], None]) -> Callable[..., Any]:
    """vLLM drives a tqdm bar: hand it one that draws nothing and passes the count on."""
    from tqdm import tqdm

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = "Processed" in kwargs.get("desc", "")  # not the bar for adding requests
            super().__init__(*args, **kwargs)

        def display(self, *_: Any, **__: Any) -> None:
            pass

        def close(self) -> None:
            self.disable = True  # nothing to wipe from the terminal

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                on_finished(int(n))
            return super().update(n)

    return CountingBar
