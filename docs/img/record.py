"""Makes chat.gif: types a session into a real terminal, and draws what the terminal showed, at its real speed.

    pip install pillow pyte
    python docs/img/record.py docs/img/chat.gif

Linux or macOS, with DejaVu Sans Mono installed. Nothing is cut or sped up, but for the pauses before each typed line.
"""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pyte
from PIL import Image, ImageDraw, ImageFont

COLUMNS, ROWS = 100, 21
SIZE = 14  # pixels of the font
TICK = 0.08  # seconds between looks at the screen
SCRIPT = [  # (what the last line has to look like, what is then typed)
    (r"^\$ $", "./run chat --seed 2 --temperature 0.5 --max-tokens 110"),
    (r"^> $", "Why is the sky blue?"),
    (r"^> $", "Now explain it to a child in one sentence."),
    (r"^> $", "/stats"),
    (r"^> $", "/quit"),
]
COLOURS = {"default": "#d8dee9", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "cyan": "#56b6c2"}
BACKGROUND, DIM = "#1e222a", "#7f8796"
FONTS = Path("/usr/share/fonts/truetype/dejavu")


class Screen(pyte.Screen):
    """pyte knows no dim text: it is kept as italics, which nothing here prints."""

    def select_graphic_rendition(self, *attributes: int, **options: object) -> None:
        super().select_graphic_rendition(*(3 if a == 2 else a for a in attributes))


def record(folder: Path) -> list[tuple[float, list[dict[int, pyte.screens.Char]]]]:
    """Run the script in a shell; returns (seconds, rows of characters) each time the screen has changed."""
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(PS1="$ ", TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS), HISTFILE="/dev/null")
        os.execvp("bash", ["bash", "--norc", "--noprofile"])
    os.set_blocking(fd, False)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    frames: list[tuple[float, list[dict[int, pyte.screens.Char]]]] = []
    steps, typing, ready = list(SCRIPT), "", 0.0
    start = time.monotonic()
    while True:
        select.select([fd], [], [], TICK)
        try:
            while data := os.read(fd, 65536):
                stream.feed(data)
        except BlockingIOError:
            pass
        except OSError:  # the shell has ended
            return frames
        now = time.monotonic() - start
        look = [dict(screen.buffer[row]) for row in range(ROWS)]
        cursor = (screen.cursor.y, screen.cursor.x)
        if not frames or frames[-1][1] != look:
            frames.append((now, look))
        line = screen.display[cursor[0]][: cursor[1]]
        if typing:
            if now >= ready:
                os.write(fd, typing[0].encode())
                typing, ready = typing[1:], now + 0.03
        elif steps and re.search(steps[0][0], line):
            typing, ready = steps.pop(0)[1] + "\r", now + 0.8
        elif not steps and re.search(r"^\$ $", line):
            os.write(fd, b"\x04")


def draw(look: list[dict[int, pyte.screens.Char]], fonts: dict[bool, ImageFont.FreeTypeFont], cell: tuple[int, int]):
    """One frame as an image."""
    image = Image.new("RGB", (COLUMNS * cell[0] + 16, ROWS * cell[1] + 16), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for row, characters in enumerate(look):
        for column, char in characters.items():
            if char.data.strip():
                colour = DIM if char.italics else COLOURS.get(char.fg, COLOURS["default"])
                at = (8 + column * cell[0], 8 + row * cell[1])
                pen.text(at, char.data, fill=colour, font=fonts[bool(char.bold)])
    return image


def main() -> None:
    out = Path(sys.argv[1])
    frames = record(Path.cwd())
    fonts = {bold: ImageFont.truetype(FONTS / f"DejaVuSansMono{'-Bold' * bold}.ttf", SIZE) for bold in (False, True)}
    cell = (round(fonts[False].getlength("M")), SIZE + 4)
    last = draw(frames[-2][1], fonts, cell)
    palette = last.quantize(32)
    images = [draw(look, fonts, cell).quantize(palette=palette, dither=Image.Dither.NONE) for _, look in frames[:-1]]
    times = [moment for moment, _ in frames]
    durations = [max(round(1000 * (after - before)), 20) for before, after in itertools.pairwise(times)]
    durations[-1] = 4000
    images[0].save(out, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)
    print(f"{out}: {len(images)} frames, {times[-1]:.0f} s, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
