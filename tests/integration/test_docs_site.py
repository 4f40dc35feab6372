"""The documentation as a site: it builds without a warning, every link within it leads somewhere, and it has
the public API."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import asyncrl

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'asyncrl[docs]'"
    ),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # an advertisement
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return directory


class Links(HTMLParser):
    """What a page links to or loads, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.anchors |= {value for name, value in attrs if name == "id" and value}


def test_every_link_within_the_site_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in map(urlsplit, page.links):
            if link.scheme or link.netloc:
                assert link.scheme in ("http", "https", "mailto"), f"{path.name}: {link.geturl()}"
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name}: {link.geturl()}"
            if link.fragment and target in pages and not link.fragment.startswith("__"):
                assert unquote(link.fragment) in pages[target].anchors, f"{path.name}: {link.geturl()}"


def test_pages_are_found_and_our_own_tools_are_not_among_them(site: Path) -> None:
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    pages = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert found >= pages | {"index.html", "configs/quickstart.yaml.html", "deploy/index.html"}
    assert not [path for path in site.rglob("*") if path.suffix == ".py"]
    assert not [
        location
        for location in found
        if re.match(r"(site_hooks|generate|config_reference|pictures)\b", location)
    ]


def test_the_reference_has_every_public_name_with_its_description(site: Path) -> None:
    assert set(re.findall(r"^::: asyncrl\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)) == set(
        asyncrl.__all__
    )
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in asyncrl.__all__:
        described = (getattr(asyncrl, name).__doc__ or "").split("\n")[0].split("`")[0].strip()
        assert f'id="asyncrl.{name}"' in text and described in text, name
