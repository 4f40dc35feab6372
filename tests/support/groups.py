"""Which tests run when: the lists of tests/groups.toml become marks that `pytest -m` chooses by.

tests/groups.lock has, of each group, the hash of its sources when it last passed as a whole. `.ci/run` runs the
groups whose sources have another hash today, so it needs no base to compare with.
"""

import hashlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS = tomllib.loads((ROOT / "tests" / "groups.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, dict[str, list[str]]] = {name: found for name, found in LISTS.items() if "tests" in found}
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
PASSED = ROOT / "tests" / "groups.lock"
PATTERNS: dict[str, list[str]] = {
    "fast": LISTS["fast"],
    "first": LISTS["first"],
    **{name: group["tests"] for name, group in GROUPS.items()},
}


def matches(pattern: str, test: str) -> bool:
    """Whether a pattern stands for a test: its file, its function or itself; `*` is any text."""
    written = re.escape(pattern.removeprefix("!")).replace(r"\*", ".*")
    return re.fullmatch(rf"{written}(?:[/:\[].*)?", test) is not None


def is_listed(patterns: Iterable[str], test: str) -> bool:
    """The last pattern that stands for the test decides; one with `!` takes it out."""
    found = [pattern for pattern in patterns if matches(pattern, test)]
    return bool(found) and not found[-1].startswith("!")


def marks_of(test: str) -> list[str]:
    """A test of a group has no other mark: it runs with its group only."""
    groups = [name for name in GROUPS if is_listed(PATTERNS[name], test)]
    return [*groups, "group"] if groups else [n for n in ("fast", "first") if is_listed(PATTERNS[n], test)]


def place_of(test: str) -> int:
    """Where the list `first` has a test; what it does not have comes behind all of it."""
    places = (place for place, pattern in enumerate(LISTS["first"]) if matches(pattern, test))
    return next(places, len(LISTS["first"]))


def files_of(name: str) -> list[Path]:
    """The files of which the result of a group depends, its tests among them."""
    own = {pattern.removeprefix("!").partition("::")[0] for pattern in GROUPS[name]["tests"]}
    files: set[Path] = set()
    for pattern in (*sorted(own), *GROUPS[name]["sources"]):
        places = ROOT.glob(pattern.removeprefix("!"))
        found = {path for path in places if path.is_file() and "__pycache__" not in path.parts}
        if not found:
            raise LookupError(f"tests/groups.toml, {name}: {pattern!r} matches no file; correct or delete it")
        files = files - found if pattern.startswith("!") else files | found
    return sorted(files)


@cache
def asked() -> set[str]:
    """The packages whose pins count: what only these bring is chosen anew with every lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = (text for part in project["optional-dependencies"].values() for text in part)
    wanted = [*map(Requirement, (*project["dependencies"], *texts))]
    named = {part for one in wanted for part in (canonicalize_name(one.name), *one.extras)}
    return named - {*LISTS["rim"]}


def hash_of(name: str) -> str:
    """One of the names and contents of all files of a group."""
    found = hashlib.sha256()
    for path in files_of(name):
        content = path.read_bytes()
        if path == CONSTRAINTS:
            pins = content.decode().splitlines(keepends=True)
            content = "".join(pin for pin in pins if pin.partition("==")[0] in asked()).encode()
        found.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def passed() -> dict[str, str]:
    """The hashes with which groups passed."""
    return dict(line.split() for line in PASSED.read_text().splitlines()) if PASSED.exists() else {}


def stale() -> list[str]:
    """The groups that have not passed with their sources of today."""
    recorded = passed()
    return [name for name in GROUPS if recorded.get(name) != hash_of(name)]


def record(name: str, found: str) -> None:
    """A group has passed with these sources."""
    recorded = {key: value for key, value in passed().items() if key in GROUPS} | {name: found}
    PASSED.write_text("".join(f"{key} {value}\n" for key, value in sorted(recorded.items())))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", choices=sorted(GROUPS), help="run a group, and record that it has passed")


def pytest_configure(config: pytest.Config) -> None:
    for name in (*PATTERNS, "group"):
        config.addinivalue_line("markers", f"{name}: listed in tests/groups.toml")
    if name := config.option.group:
        if config.option.keyword or not all((ROOT / arg).is_dir() for arg in config.args):
            raise pytest.UsageError(
                f"--group {name} records a whole group; run some of its tests by -m {name}"
            )
        config.option.markexpr, config.stash[SOURCES] = name, hash_of(name)


SOURCES = pytest.StashKey[str]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where one list is asked for, only its files are imported."""
    asked = PATTERNS.get(config.option.markexpr)
    if asked is None or not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(ROOT).as_posix()
    return not any(matches(pattern.partition("::")[0], file) for pattern in asked) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in marks_of(item.nodeid):
            item.add_marker(name)
    items.sort(key=lambda item: place_of(item.nodeid))
    for name, pattern in _of_directories(config):
        if not any(matches(pattern, item.nodeid) for item in items):
            raise pytest.UsageError(
                f"tests/groups.toml, {name}: {pattern!r} matches no test; correct or delete it"
            )


def _of_directories(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """The patterns for tests below directories that are collected as a whole."""
    whole = tuple(arg.rstrip("/") + "/" for arg in config.args if (ROOT / arg).is_dir())
    for name, patterns in PATTERNS.items():
        if config.option.markexpr not in PATTERNS.keys() - {name}:
            yield from (
                (name, pattern) for pattern in patterns if pattern.removeprefix("!").startswith(whole)
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A group passes as a whole: what is skipped has not passed."""
    if (name := session.config.option.group) and session.exitstatus == 0:
        if skipped := _skipped(session.config):
            print(f"\n{name} has not passed as a whole: {len(skipped)} skipped")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            record(name, session.config.stash[SOURCES])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count what was skipped, with the command that brings what is missing."""
    found = [re.findall(r"apt-get install ([\w.+ -]+)", str(report.longrepr)) for report in _skipped(config)]
    if packages := sorted({name for commands in found for names in commands for name in names.split()}):
        count = sum(map(bool, found))
        said = f"{count} of {len(found)} skipped tests run after: apt-get install {' '.join(packages)}"
        terminalreporter.write_line(said)


def _skipped(config: pytest.Config) -> list[Any]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("skipped", []))


def _told(ran: Iterable[str]) -> Iterator[str]:
    """What `.ci/run` says of each group."""
    ran, due = set(ran), set(stale())
    for name in GROUPS:
        why = "its sources are not those it passed with" if name in due else "it passed with these sources"
        why += ", and no time was left" if name in due - ran else ""
        yield f"group {name:<16} {'ran' if name in ran else 'not run'}: {why} (make test-group GROUP={name})"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stale"]:
            print(*stale())
        case ["told", *ran]:
            print(*_told(ran), sep="\n")
