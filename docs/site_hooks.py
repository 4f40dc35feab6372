"""What mkdocs is told beyond mkdocs.yml: pages of the site that lie outside docs/, and the links to them.

README.md is the start page. Every file of the repository that some page links to is on the site, Markdown as
a page, source as a page that shows it: the same links work in the repository and on the site.
"""

import json
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")
"""To a file of the repository, with or without an anchor."""
LINKING = (".md", ".ipynb")
"""Files whose links count; a listing shows them as they are."""
START, DOCS = "README.md", "docs"
SHOWN = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "bash",
    ".md": "markdown",
    "": "text",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the start page, and what pages link to, and what those link to."""
    waiting = [
        PurePosixPath(START),
        *(PurePosixPath(DOCS, file.src_uri) for file in files.documentation_pages()),
    ]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not _is_built(source):
            files.append(_page(source, config))
        linked = (
            {_target(source, match[2]) for match in LINK.finditer(_text(source))}
            if source.suffix in LINKING
            else set()
        )
        new = {target for target in linked - seen if not _is_built(target) and (ROOT / target).is_file()}
        waiting += sorted(new)
        seen |= new
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let every link to a file of the repository lead to its place on the site."""
    here = _source(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
        return f"{match[1]}{up}{_place(target)}{match[3] or ''}" if (ROOT / target).is_file() else match[0]

    return LINK.sub(moved, markdown) if here.suffix in LINKING else markdown


def _page(source: PurePosixPath, config: MkDocsConfig) -> File:
    content = {".md": _text, ".ipynb": _notebook}.get(source.suffix, _listing)(source)
    return File.generated(config, _place(source), content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def _listing(source: PurePosixPath) -> str:
    return f"# {source}\n\n``````{SHOWN.get(source.suffix, 'text')}\n{_text(source)}\n``````\n"


def _notebook(source: PurePosixPath) -> str:
    """Its cells and what they printed."""
    parts = []
    for cell in json.loads(_text(source))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += ["```text\n" + "".join(output["text"]) + "```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _text(source: PurePosixPath) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


def _target(source: PurePosixPath, link: str) -> PurePosixPath:
    """The file of the repository that a link of `source` means."""
    parts: list[str] = []
    for part in (*source.parent.parts, *PurePosixPath(link).parts):
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def _is_built(source: PurePosixPath) -> bool:
    """Whether mkdocs takes it by itself: what is in docs/ and not excluded."""
    return source.parts[0] == DOCS and source.suffix != ".py"


def _place(source: PurePosixPath) -> str:
    """Where a file of the repository is on the site, as mkdocs names its source."""
    if _is_built(source):
        return str(PurePosixPath(*source.parts[1:]))
    if str(source) == START:
        return "index.md"
    return str(source) if source.suffix == ".md" else f"{source}.md"


def _source(place: str) -> PurePosixPath:
    """The reverse of `_place`."""
    if place == "index.md":
        return PurePosixPath(START)
    within = PurePosixPath(DOCS, place)
    if (ROOT / within).is_file():
        return within
    return PurePosixPath(place) if (ROOT / place).is_file() else PurePosixPath(place.removesuffix(".md"))
