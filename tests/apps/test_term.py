"""Terminal helpers, and how a command ends: pipes, Ctrl-C, errors, terminals without UTF-8."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apps import term

ROOT = Path(term.__file__).parents[1]


class FakeTerminal(io.TextIOWrapper):
    """A stream that says it is a terminal and remembers what was written."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)


def python(code: str, **options) -> subprocess.Popen:
    """A process that runs `code` inside run_main, as `body`."""
    lines = "\n    ".join(code.splitlines())
    program = f"import sys\nfrom apps import term\ndef body():\n    {lines}\nsys.exit(term.run_main(body))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ANYGPU_TRACEBACK": "", **options.pop("environment", {})}
    first = options.pop("preexec_fn", lambda: None)

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # these tests may run as a background job, which ignores it
        first()

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, preexec_fn=in_child, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode(), (error or b"").decode()


def test_style_only_on_a_terminal(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert term.style("x", "bold", "red", stream=FakeTerminal()) == "\x1b[1;31mx\x1b[0m"
    assert term.style("x", "bold", stream=io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert term.style("x", "bold", stream=FakeTerminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert term.style("x", "bold", stream=FakeTerminal()) == "x"
    closed = io.StringIO()
    closed.close()
    assert not term.is_terminal(closed) and not term.is_terminal(None)


def test_table():
    got = term.table([("smollm2", 98, "x"), ("b", 1234, "")], header=("name", "size", "note"), right=(1,))
    assert got == "name     size  note\nsmollm2    98  x\nb        1234"
    assert term.table([]) == ""


@pytest.mark.parametrize(
    ("nbytes", "want"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_499, "999 kB"),
        (999_600, "1.0 MB"),
        (98_362_432, "98.4 MB"),
        (99_960_000, "100 MB"),
        (4_294_967_296, "4.3 GB"),
        (5e12, "5000 GB"),
    ],
)
def test_size_text(nbytes, want):
    assert term.size_text(nbytes) == want


@pytest.mark.parametrize(
    ("seconds", "want"), [(-1, "0:00"), (6.6, "0:07"), (59.6, "1:00"), (750, "12:30"), (3723, "1:02:03")]
)
def test_time_text(seconds, want):
    assert term.time_text(seconds) == want


def bar_at(times, updates, stream, **options) -> str:
    clock = iter(times)
    with term.Bar("model", stream=stream, clock=lambda: next(clock), **options) as bar:
        for update in updates:
            bar.update(*update)
    return stream.text() if isinstance(stream, FakeTerminal) else stream.getvalue()


def test_bar_shows_rate_and_time_left(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    shown = bar_at(
        [0.0, 1.0, 1.05, 3.0],
        [(10_000_000, 90_000_000), (11_000_000, 90_000_000), (30_000_000, 90_000_000)],
        FakeTerminal(),
    )
    lines = shown.split("\r")
    # 20 MB came within 2 s: 10 MB/s, and 60 MB are left; the first 10 MB were there before
    assert lines[2].rstrip() == "model [" + "━" * 10 + " " * 20 + "]  33% 30.0 MB of 90.0 MB, 10.0 MB/s, 0:06 left"
    assert (
        len(lines) == 5 and not lines[3].strip() and lines[4] == ""
    )  # the update after 0.05 s was skipped; then wiped


def test_bar_fits_narrow_and_ascii_terminals(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    for columns, encoding in ((20, "utf-8"), (90, "ascii"), (90, "latin-1")):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = bar_at([0.0, 1.0, 3.0], [(0, 90_000_000), (30_000_000, 90_000_000)], FakeTerminal(encoding))
        assert all(len(line) < columns for line in shown.split("\r"))
        assert ("#" in shown) == (columns == 90)


def test_bar_elsewhere_is_a_plain_line_now_and_then():
    times = [0.0, 1.0, 5.0, 11.0, 12.0]
    shown = bar_at(times, [(0, 40), (10, 40), (20, 40), (40, 40)], io.StringIO(), unit="checks")
    assert shown == "model  50% 20 of 40 checks, 0:10 left\n"
    assert bar_at([0.0, 1.0, 12.0], [(0, 0), (7, 0)], io.StringIO(), unit="checks") == "model 7 checks\n"


def test_bar_outlives_its_terminal():
    class Gone(FakeTerminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    with term.Bar("model", stream=Gone()) as bar:
        bar.update(1, 2)
        bar.update(2, 2)
    assert not bar.live


def test_closed_pipe_is_quiet():
    process = python("for i in range(100_000): print('line', i)")
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    process.stdout = None
    assert finish(process) == (141, "", "")


def test_closed_pipe_at_the_last_flush_is_quiet():
    process = python("sys.stdin.readline(); print('short')", stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate(b"go on\n", timeout=60)
    assert (process.returncode, error) == (141, b"")


def test_ctrl_c_is_130_without_traceback():
    process = python("import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")


WORK = """
import time
with term.tidied():
    try:
        print('ready', flush=True)
        time.sleep(60)
    finally:
        print('tidied')
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_killed_program_tidies_up(number):
    process = python(WORK)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert finish(process) == (128 + number, "tidied\n", "")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise ValueError('temperature must be >= 0, got -1')", "temperature must be >= 0, got -1"),
        ("open('/nowhere/x.gguf')", "/nowhere/x.gguf: No such file or directory"),
        ("from gpu.errors import OutOfMemory\nraise OutOfMemory('needs 2 GB')", "needs 2 GB"),
        ("sys.modules['jinja2'] = None\nimport jinja2", "needs jinja2: pip install 'anygpu[chat]'"),
    ],
)
def test_errors_for_people_are_one_line(code, line):
    assert finish(python(code)) == (2, "", f"anygpu: {line}\n")


def test_bugs_and_asked_for_tracebacks_are_kept():
    code, _, error = finish(python("{}['missing']"))
    assert code == 1 and "KeyError: 'missing'" in error and "Traceback" in error
    code, _, error = finish(python("raise ValueError('bad')", environment={"ANYGPU_TRACEBACK": "1"}))
    assert code == 1 and error.rstrip().endswith("ValueError: bad") and "Traceback" in error


def test_terminal_without_utf8():
    environment = {"PYTHONIOENCODING": "", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    process = python("print('caf\\u00e9 \\u2603', sys.stdout.encoding)", environment=environment)
    assert finish(process) == (0, "caf? ? ascii\n", "")


def test_input_that_is_not_utf8():
    process = python("print(ascii(sys.stdin.read()))", stdin=subprocess.PIPE, environment={"PYTHONUTF8": "1"})
    out, error = process.communicate(b"a\xffb", timeout=60)
    assert (process.returncode, out, error) == (0, b"'a\\ufffdb'\n", b"")


def test_stdout_that_is_closed_from_the_start():
    for code in ("print('lost')", "sys.stdout.write('lost' + str(sys.stdout.encoding))"):
        process = python(code, stdout=None, preexec_fn=lambda: os.close(1))
        assert finish(process) == (0, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_said():
    with open("/dev/full", "wb") as full:
        process = python("print('lost')", stdout=full)
        assert finish(process) == (2, "", "anygpu: the output could not be written: no space left on its device\n")


def test_outputs_are_looked_at_beforehand(tmp_path):
    def refused(**paths):
        with pytest.raises(ValueError) as error:
            term.check_outputs(**paths)
        return str(error.value)

    good = str(tmp_path / "a.json")
    term.check_outputs(json=good, out=None, plot="/dev/null" if os.path.exists("/dev/null") else None)
    assert not list(tmp_path.iterdir())
    assert refused(json="") == "--json '': this is no file name"
    assert refused(json=str(tmp_path)).endswith("this is a folder; give a file in it")
    assert refused(json=str(tmp_path / "b" / "c")).endswith(f"there is no folder {tmp_path / 'b'}; make it first")
    assert refused(out=good, html=good) == f"--html {good}: --out writes the same file; give another one"
    assert refused(out=str(tmp_path / ("x" * 300))).endswith("this file name is too long")
    if os.path.isdir("/proc"):
        assert refused(out="/proc/x").endswith("the folder /proc may not be written to; give another one")
