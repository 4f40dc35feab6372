"""The wheel, built from the files that the image copies, unpacked and used from an empty directory."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest

import asyncrl

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None, reason="needs hatchling: pip install 'asyncrl[dev]'"
    ),
]

ROOT = Path(__file__).parents[2]
COPIES = re.findall(
    r"^COPY (.*) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in " ".join(COPIES).split():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)],
        cwd=source, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (path,) = dist.iterdir()
    return path


def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Also the one of a clone: without what git ignores, and with what the tests and the image need."""
    for step, source in (("sdist", ROOT), ("wheel", tmp_path / "source")):
        build = [sys.executable, "-m", "hatchling", "build", "-t", step, "-d", str(tmp_path)]
        built = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=120, check=False)
        assert built.returncode == 0, built.stderr
        if step == "sdist":
            (archive,) = tmp_path.glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(tmp_path, filter="data")
            (tmp_path / archive.name.removesuffix(".tar.gz")).rename(tmp_path / "source")
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        sums = [{item.filename: item.CRC for item in archive.infolist()} for archive in (one, other)]
    assert sums[0] == sums[1]
    for name in ("tests/conftest.py", "deploy/Dockerfile", "deploy/constraints.txt", "docs/api.md"):
        assert (tmp_path / "source" / name).is_file(), name
    assert not (tmp_path / "source" / ".venv").exists()


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is unpacked, as an installer does."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


MAIN = "from asyncrl.cli.main import main; main()"
EXAMPLE = "import runpy; runpy.run_module('asyncrl.examples.one_process', run_name='__main__')"


def typed(
    site: Path, directory: Path, arguments: Sequence[str], main: str = MAIN
) -> subprocess.CompletedProcess[str]:
    """`asyncrl ARGUMENTS` of the wheel in `directory`, without modules of this clone or variables."""
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import asyncrl; assert "
        f"asyncrl.__file__.startswith({str(site)!r}); {main}"
    )
    command = [sys.executable, "-I", "-c", program, *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=150, check=False)


def test_every_file_of_the_package_is_in_it_with_configs_examples_and_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    info = f"asyncrl-{asyncrl.__version__}.dist-info"
    wanted = {f"{info}/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    for directory, place in (
        ("asyncrl", "asyncrl"),
        ("configs", "asyncrl/configs"),
        ("examples", "asyncrl/examples"),
    ):
        files = [
            path
            for path in (ROOT / directory).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
        wanted |= {f"{place}/{path.relative_to(ROOT / directory)}" for path in files}
    assert "asyncrl/py.typed" in wanted
    assert packed == wanted | {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")
    }


def test_its_metadata_say_what_pyproject_says(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Version"], metadata["License-Expression"]) == (asyncrl.__version__, "Apache-2.0")
    assert set(metadata.get_all("Provides-Extra") or ()) == PROJECT["optional-dependencies"].keys()
    assert "../shared" not in metadata.as_string()
    urls = dict(one.split(", ") for one in metadata.get_all("Project-URL") or ())
    assert urls == PROJECT["urls"] and all(url.startswith(urls["Repository"]) for url in urls.values())


def test_its_commands_work_in_an_empty_directory(site: Path, tmp_path: Path) -> None:
    assert asyncrl.__version__ in typed(site, tmp_path, ["--version"]).stdout
    assert "quickstart" in typed(site, tmp_path, ["--help"]).stdout
    assert "KEY=VALUE" in typed(site, tmp_path, ["quickstart", "--help"]).stdout
    (tmp_path / "task.yaml").write_text(
        "extends: [algorithms/dapo.yaml, configs/quickstart.yaml]\nrun: {name: mine}\n"
    )
    for file in ("configs/quickstart.yaml", "task.yaml"):
        found = typed(site, tmp_path, ["validate", file])
        assert found.returncode == 2 and "found no build/quickstart/model" in found.stderr, found.stderr


def test_the_quick_start_takes_its_config_from_it_and_names_a_mistake_before_it_makes_anything(
    site: Path, tmp_path: Path
) -> None:
    found = typed(site, tmp_path, ["quickstart", "learner.stepz=3"])
    assert found.returncode == 2 and "did you mean `steps`" in found.stderr, found.stderr
    assert list(tmp_path.iterdir()) == []


def test_its_example_learns_in_an_empty_directory(site: Path, tmp_path: Path) -> None:
    """As `python -m asyncrl.examples.one_process` does."""
    found = typed(site, tmp_path, [], EXAMPLE)
    assert found.returncode == 0, found.stderr
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", found.stdout)]
    assert len(rewards) == 60 and rewards[-1] > 0.9 > rewards[0], found.stdout
