"""The terminal: colour only where it shows, progress with time left, and a `main` that ends without tracebacks.

Results go to stdout, everything about them (progress, notes, errors) to stderr. Nothing here needs a package.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
EXTRAS = {"tokenizers": "chat", "jinja2": "chat", "huggingface_hub": "chat", "wgpudawn": "dawn", "matplotlib": "bench"}
PIPE_CLOSED, INTERRUPTED, USER_ERROR = 141, 130, 2  # exit codes; the first two are what a shell reports for the signals


def check_outputs(**paths: str | None) -> None:
    """Files that options name: whether they can be written, said before the work. Raises ValueError."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        place = os.path.realpath(path)
        folder = os.path.dirname(place)
        reason = ""
        if not path:
            reason = "this is no file name"
        elif os.path.isdir(place):
            reason = "this is a folder; give a file in it"
        elif os.path.exists(path) and not os.path.isfile(path):
            continue  # /dev/stdout
        elif not os.path.isdir(folder):
            reason = f"there is no folder {folder}; make it first"
        elif len(os.path.basename(place).encode("utf-8", "surrogateescape")) > 255:
            reason = "this file name is too long"
        elif os.path.exists(place):
            if not os.access(place, os.W_OK):
                reason = "this file may not be written; give another one"
        elif not _takes_files(folder):
            reason = f"the folder {folder} may not be written to; give another one"
        elif place in seen:
            reason = f"--{seen[place]} writes the same file; give another one"
        if reason:
            raise ValueError(f"--{option} {path or repr(path)}: {reason}")
        seen[place] = option


def _takes_files(folder: str) -> bool:
    """Whether a file can be made there; permissions do not say it for root, /proc and read-only file systems."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is looking at `stream`."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def style(text: str, *names: str, stream: TextIO | None = None) -> str:
    """`text` in these STYLES if `stream` (default: stdout) is a terminal that shows them, else unchanged."""
    stream = stream if stream is not None else sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(stream)
    if plain or (sys.platform == "win32" and not os.environ.get("WT_SESSION")):  # older consoles print the codes
        return text
    return f"\x1b[{';'.join(STYLES[name] for name in names)}m{text}\x1b[0m"


def note(text: str) -> None:
    """A dim line on stderr."""
    print(style(text, "dim", stream=sys.stderr), file=sys.stderr)


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Rows as aligned columns, two spaces apart. Columns whose numbers are in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    lines = [
        "  ".join(
            f"{cell:>{widths[i]}}" if i in right else f"{cell:<{widths[i]}}" for i, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]
    if header:
        lines[0] = style(lines[0], "bold")
    return "\n".join(lines)


def size_text(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"


def time_text(seconds: float) -> str:
    """A duration for people: 0:07, 12:30, 1:02:03."""
    whole = round(max(seconds, 0.0))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Bar:
    """A progress line on stderr with the time left: `with Bar("smollm2") as bar: work(progress=bar.update)`.

    On a terminal it redraws itself at most ten times a second and goes away at the end. Elsewhere it prints a plain
    line every ten seconds. `unit` "B" counts bytes, any other word counts things.
    """

    def __init__(
        self,
        label: str,
        *,
        unit: str = "B",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.unit, self.clock = label, unit, clock
        self.stream = stream if stream is not None else sys.stderr
        self.live = is_terminal(self.stream) and os.environ.get("TERM") != "dumb"
        self.start = self.shown_at = clock()
        self.first: int | None = None  # where the first update stood: what was there before took no time
        self.shown = ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._write("\r" + " " * len(self.shown) + "\r")
            self.shown = ""

    def update(self, done: int, total: int = 0) -> None:
        """Show that `done` of `total` are done (total 0: not known)."""
        now = self.clock()
        if self.first is None:
            self.first, self.start = done, now
        if not self.live:
            if now - self.shown_at >= 10.0:
                self.shown_at = now
                self._write(self.text(done, total, now) + "\n")
            return
        if now - self.shown_at < 0.1 and self.shown and done != total:
            return
        self.shown_at = now
        line = self.text(done, total, now, shutil.get_terminal_size().columns - 1)
        self._write("\r" + line + " " * (len(self.shown) - len(line)))
        self.shown = line

    def text(self, done: int, total: int, now: float, width: int = 0) -> str:
        """The line; with a bar in it where `width` columns leave room for one."""
        counted = size_text if self.unit == "B" else str
        passed, gained = now - self.start, done - (self.first or 0)
        words = f"{counted(done)} of {counted(total)}" if total else counted(done)
        if self.unit != "B":
            words += f" {self.unit}"
        if passed > 0.5 and gained > 0:
            if self.unit == "B":
                words += f", {size_text(gained / passed)}/s"
            if total > done:
                words += f", {time_text((total - done) * passed / gained)} left"
        percent = f" {100 * done // total:3d}%" if total else ""
        room = min(30, width - len(self.label) - len(percent) - len(words) - 6)
        if not total or room < 5:
            text = f"{self.label}{percent} {words}"
            return text[:width] if width else text
        full, empty = ("━", " ") if _encodes(self.stream, "━") else ("#", ".")
        filled = room * done // total
        return f"{self.label} [{full * filled}{empty * (room - filled)}]{percent} {words}"

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # nobody looks any more: the work goes on
            self.live = False


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@contextlib.contextmanager
def tidied() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block, so that it stops its child processes and removes what is half done."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        before = {n: signal.signal(n, leave) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_main(command: Callable[[], int | None]) -> int:
    """Runs `command` and gives the exit code of the process.

    Errors that tell a person what to do (GpuError, ValueError, OSError, a missing extra) are one line on stderr and
    code 2, Ctrl-C is 130, a closed pipe or terminal is a quiet 141. Anything else is a bug and keeps its traceback, as
    does everything with ANYGPU_TRACEBACK=1. Characters that the terminal cannot show are replaced.
    """
    if sys.stdout is None:  # closed by the caller, or a Windows program without a console
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        if is_terminal(sys.stderr):
            print(file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and error.filename is None:
            _forget_stdout()
            return PIPE_CLOSED
        if not _report(error):
            raise
    except Exception as error:
        if not _report(error):
            raise
    return USER_ERROR


def _report(error: Exception) -> bool:
    """Prints an error that is meant for people; False if it is not, or if the traceback is wanted."""
    if os.environ.get("ANYGPU_TRACEBACK") == "1":
        return False
    gpu_errors = sys.modules.get("gpu.errors")  # not imported for this: it would start the graphics library
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        message = f"needs {error.name}: pip install 'anygpu[{EXTRAS[error.name]}]'"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        message = "the output could not be written: no space left on its device"
    elif isinstance(error, (ValueError, OSError)) or (gpu_errors and isinstance(error, gpu_errors.GpuError)):
        message = str(error) or type(error).__name__
    else:
        return False
    try:
        print(style("anygpu: ", "red", stream=sys.stderr) + message, file=sys.stderr)
    except OSError:
        _forget_stdout()
    return True


def _forget_stdout() -> None:
    """Sends what is still buffered to nowhere, so that the interpreter's last flush does not fail in its turn."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not is_terminal(stream):
                os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):
            continue
    os.close(nowhere)
