"""The report of a run, parsed."""

import json
from html.parser import HTMLParser
from pathlib import Path

from asyncrl.results.archive import Archive, read_archive
from asyncrl.run.directory import RunDirectory
from tests.support.synthetic_run import SyntheticRun


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text_of: dict[str, list[str]] = {}
        self._open = [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.text_of.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open[-1] != tag:  # <meta> has no end
            self._open.pop()
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open[-1]:
            self.text_of[self._open[-1]][-1] += data

    def curves(self, title: str) -> dict[str, list[tuple[float, float]]]:
        """Of the chart with this title, by name."""
        figure = json.loads(self.text_of["script"][0])[self.text_of["figcaption"].index(title)]
        return {curve["name"]: list(zip(curve["x"], curve["y"], strict=True)) for curve in figure["data"]}


def run_in(
    directory: Path, *, steps: int = 30, config: str = "run: {name: quickstart}\nlearner: {steps: 400}\n"
) -> SyntheticRun:
    run = SyntheticRun(directory / "quickstart", generators=2)
    (run.directory / "config.yaml").write_text(config)
    for _ in range(steps):
        run.advance()
    return run


def archive_of(run: SyntheticRun) -> Archive:
    return read_archive(RunDirectory(run.directory))
