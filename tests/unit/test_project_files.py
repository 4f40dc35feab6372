"""What surrounds the package agrees with it: changelog, citation, workflows, hooks of pre-commit."""

import os
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

from asyncrl import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", CHANGELOG, re.MULTILINE)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[str]:
    """Everything that a workflow types."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_the_newest_release_of_the_changelog_is_this_version():
    assert RELEASES[0][0] == __version__
    assert (
        sorted(RELEASES, key=lambda one: [int(part) for part in one[0].split(".")], reverse=True) == RELEASES
    )
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(cited["version"]), str(cited["date-released"])) == RELEASES[0]


def test_the_changelog_keeps_its_form():
    titles = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert titles == ["[Unreleased]", *(f"[{version}] - {date}" for version, date in RELEASES)]
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read_end_in_time_and_call_what_exists(workflow):
    config = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert config["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 240 for job in config["jobs"].values())
    typed = "\n".join(steps(workflow))
    for script in re.findall(r"\bbash (\S+)", typed):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m ((?:tests|reliability)\.[\w.]+)", typed):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_workflow_of_every_change_has_every_check():
    typed = "\n".join(steps(ROOT / ".github" / "workflows" / "ci.yml"))
    for check in (
        "ruff format --check",
        "ruff check",
        "mypy",
        "mkdocs build --strict",
        ".ci/run",
        "pip wheel",
        'asyncrl" quickstart',
    ):
        assert check in typed, check


def test_a_release_is_published_after_the_checks_by_jobs_that_may_do_nothing_else():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    typed = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert [typed.index(step) for step in (".ci/run", "make release-check", "hatchling build")] == sorted(
        typed.index(step) for step in (".ci/run", "make release-check", "hatchling build")
    )
    assert {name: job.get("permissions") for name, job in jobs.items()} == {
        "build": None,
        "pypi": {"id-token": "write"},
        "image": {"contents": "read", "packages": "write"},
    }
    assert jobs["pypi"]["needs"] == jobs["image"]["needs"] == "build"


@pytest.mark.parametrize(
    ("tag", "is_right"), [(f"v{__version__}", True), ("v9.9.9", False), (__version__, False)]
)
def test_a_release_has_the_tag_of_its_version_and_the_addresses_of_its_repository(tag, is_right):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    (check,) = [step["run"] for step in jobs["build"]["steps"] if "the tag is" in step.get("name", "")]
    repository = PROJECT["project"]["urls"]["Repository"]
    server, _, name = repository.partition("github.com/")

    def is_accepted(name: str) -> bool:
        variables = {
            "GITHUB_REF_NAME": tag,
            "GITHUB_SERVER_URL": f"{server}github.com",
            "GITHUB_REPOSITORY": name,
        }
        command = ["bash", "-e", "-c", check]
        return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode == 0

    assert is_accepted(name) == is_right and not is_accepted("another/fork")


def test_hooks_of_pre_commit_call_tools_that_the_project_installs():
    hooks = chain.from_iterable(
        repository["hooks"]
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
            "repos"
        ]
    )
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    installed = {re.split(r"[\[<>=]", text)[0] for text in PROJECT["project"]["optional-dependencies"]["dev"]}
    assert tools and tools <= installed | {"python"}


def test_the_licence_is_the_one_that_is_declared():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (
        "Apache License" in text
        and "Version 2.0, January 2004" in text
        and "END OF TERMS AND CONDITIONS" in text
    )


@pytest.mark.parametrize("directory", ["asyncrl", "bench", "configs", "deploy", "docs", "examples"])
def test_nothing_that_is_shipped_names_a_file_outside_the_repository(directory):
    for path in (ROOT / directory).rglob("*"):
        if path.suffix in {".py", ".yaml", ".yml", ".md", ".sh", ".ipynb"}:
            assert "../shared" not in path.read_text(encoding="utf-8"), path


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert len(set(listed)) == len(listed) and set(pages) <= set(listed)
