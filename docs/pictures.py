"""Makes the pictures of docs/img from two runs: `python docs/pictures.py RUN OTHER_RUN [NAME...]`, all or
those named.

The dashboard is most telling while RUN goes on, the others when it is over.

Needs a Chromium (`chromium` or `google-chrome` on PATH, or its path in CHROMIUM) and Pillow, which both are
no dependencies.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console

from asyncrl.results.archive import read_archive
from asyncrl.results.compare import compare_page, gaps, labelled
from asyncrl.results.run_page import report_page
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.dashboard import render
from asyncrl.telemetry.state import read_state

PICTURES = Path(__file__).parent / "img"
COLOURS = 96
"""Enough for text and curves; a palette makes a picture a third as large."""
COLUMNS, LINES = 120, 40
WAIT_MS = 20_000
"""Of the page's own clock, for the charts."""


def main() -> None:
    """Write those that were asked for."""
    run, other = map(Path, sys.argv[1:3])
    archives = [read_archive(RunDirectory(path)) for path in (run, other)]
    both = labelled(archives)
    pages = {
        "dashboard": (lambda: dashboard(run), 1240, 980),
        "report": (lambda: report_page(archives[0]), 1240, 1720),
        "compare": (lambda: compare_page(both, gaps(both)), 1240, 1500),
    }
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[3:] or pages:
        page, width, height = pages[name]
        path = PICTURES / f"{name}.png"
        photograph(page(), path, width, height)
        print(f"{path} {path.stat().st_size / 1024:.0f} KiB")  # noqa: T201 - the script's output


def dashboard(run: Path) -> str:
    """As a terminal of that size shows it, on a page of its own."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(render(read_state(run), COLUMNS, LINES))
    svg = console.export_svg(title=f"asyncrl status --watch {run.name}")
    return f"<!doctype html><meta charset='utf-8'><body style='margin:0'>{svg}"


def photograph(page: str, to: Path, width: int, height: int) -> None:
    """The top of a page, as a Chromium without network draws it; empty margin below is cut off."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium found; install one or name it in CHROMIUM")
    with tempfile.TemporaryDirectory() as directory:
        source, raw = Path(directory) / "page.html", Path(directory) / "raw.png"
        source.write_text(page, encoding="utf-8")
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={directory}/profile",
        ]
        options += [
            f"--window-size={width},{height}",
            f"--virtual-time-budget={WAIT_MS}",
            f"--screenshot={raw}",
        ]
        command = [browser, *options, "--host-resolver-rules=MAP * ~NOTFOUND", source.as_uri()]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
        picture = Image.open(raw).convert("RGB")
        background = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
        _, _, _, bottom = ImageChops.difference(picture, background).getbbox() or (0, 0, 0, height)
        picture.crop((0, 0, width, bottom)).quantize(COLOURS, dither=Image.Dither.NONE).save(
            to, optimize=True
        )


if __name__ == "__main__":
    main()
