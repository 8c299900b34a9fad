"""Stop strings across token borders: text is held back while it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Push text as it comes; what is given back holds no stop string. `found`: the one that ended it, or None."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now. Once a stop string is found, what stood before it; nothing after that."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            text, self._held = self._held[:at], ""
            return text
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def flush(self) -> str:
        """The text that was held back, when nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
