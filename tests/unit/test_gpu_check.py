"""The check of a GPU machine, with rows of a test: verdicts, limits, what stays on disk, the exit status."""

import json
import math

import psutil
import pytest

from asyncrl.errors import ConfigError
from bench.gpu import kit
from bench.gpu.__main__ import main
from bench.gpu.figures import Place, judged
from bench.gpu.kit import Row, check, open_place
from tests.support.check_rows import dies, fine, hangs, late, misses, reader


def row(function, limit_s=60.0, reads=()):
    return Row(function.__name__, f"tests.support.check_rows:{function.__name__}", limit_s, reads)


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path, "cpu", str(tmp_path / "model"))
    place.write()
    return place


@pytest.mark.parametrize(
    ("value", "limits", "verdict"),
    [
        (0.97, {"at_least": 0.97}, "ok"),
        (0.96, {"at_least": 0.97}, "failed"),
        (1.0, {"at_most": 1.0}, "ok"),
        (1.1, {"at_most": 1.0}, "failed"),
        (math.nan, {"at_most": 1.0}, "failed"),
        (math.nan, {"at_least": 0.0}, "failed"),
    ],
)
def test_a_verdict_follows_from_the_limit(tmp_path, value, limits, verdict):
    assert judged("x", value, **limits).verdict == verdict
    assert Place(tmp_path, "cuda", "m").speed("x", value, **limits).verdict == verdict
    assert Place(tmp_path, "cpu", "m").speed("x", value, **limits).verdict == "rehearsed"


def test_a_row_that_hangs_or_dies_costs_only_itself(place):
    # On a loaded machine it takes seconds until a row begins.
    rows = [row(fine), row(hangs, 12.0), row(dies), row(misses), row(fine)]
    first, hung, dead, missed, last = check(place, rows)
    assert (first.verdict, last.verdict) == ("ok", "ok")
    assert [figure.verdict for figure in first.figures] == ["noted", "ok", "rehearsed", "absent"]
    assert hung.verdict == "failed" and "cut off after 12 s" in hung.problem
    assert [figure.name for figure in hung.figures] == ["before"]
    child = int((place.directory / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert dead.verdict == "failed" and [figure.name for figure in dead.figures] == ["before"]
    assert "killed by SIGKILL" in dead.problem and "last words" in dead.problem
    assert missed.verdict == "failed" and not missed.problem
    values = json.loads((place.directory / "result.json").read_text())
    assert [each["verdict"] for each in values["rows"]] == ["ok", "failed", "failed", "failed", "ok"]
    assert values["rows"][0]["figures"][2]["at_least"] == 0.97


def test_a_row_begins_after_those_that_it_reads(place):
    *_, found = check(place, [row(fine), row(late), row(reader, reads=("late",))])
    assert [figure.value for figure in found.figures] == [0.0]


@pytest.mark.parametrize(("function", "status"), [(fine, 0), (misses, 1)])
def test_the_exit_status_follows_from_the_verdicts(tmp_path, monkeypatch, capsys, function, status):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kit.check, "__defaults__", ((row(function),),))
    assert main(["--device", "cpu"]) == status
    said = capsys.readouterr().out
    assert function.__name__ in said and "result.json" in said


def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"found no NVIDIA GPU .* --device cpu"):
        open_place("cuda", None)
    with pytest.raises(ConfigError, match=r"has no config.json; give --model the directory"):
        open_place("cpu", tmp_path)
    assert not list(tmp_path.iterdir())
