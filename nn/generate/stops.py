"""Stop strings across token borders: text is held back while it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Push text as it comes; what is given back holds no stop string. `found`: the one that ended it, or None.

    The stop string that is complete first ends the text, before its own beginning; of two that are complete at the same
    character, the longer one. So the text does not depend on how it was cut into pushes.
    """

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
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            text, self._held = self._held[:at], ""
            return text
        certain = len(self._held) - max(self._overlap(stop) for stop in self._stops)
        text, self._held = self._held[:certain], self._held[certain:]
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
