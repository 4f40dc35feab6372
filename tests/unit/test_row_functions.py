"""Functions of the user's file that choose and make rows: exact, counted, isolated, and named with their row."""

import json
import logging
import os

import pytest

from asyncrl.config.data_section import DataConfig
from asyncrl.data import row_functions
from asyncrl.data.row_functions import load_part, load_parts
from asyncrl.errors import DataError
from asyncrl.run.starts import code_of
from tests.support.task_config import config_of


def load_sources(data):
    return load_parts(data, data.train)


CODE = """
import os, sys, threading

def keep(row):
    return row["n"] % 3 == 0

def make(row):
    print("made", row["n"])
    return {"prompt": f"{row['n']}?", "raw": b"\\0", "pair": [row["n"], None]}

def reveal(row):
    return {"secrets": sorted(name for name in os.environ if "TOKEN" in name), "pid": os.getpid()}

def fails(row):
    return {} if row["n"] < 100 else row["absent"]

def wrong(row):
    return None

def counts(row):
    return {"a": {1: 2}}

def half(row):
    return {"a": row["b"]}

def nearly(row):
    import numpy
    return numpy.bool_(True)

def whole(row):
    return row.get("b") == "\\ud800"

def strange(row):
    return {"a": object()}

def exits(row):
    sys.exit(3)

def dies(row):
    os._exit(3)

def hangs(row):
    threading.Event().wait(600)
"""
SIZE = 200


@pytest.fixture
def files(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text(
        "\n".join("" if n == 7 else json.dumps({"n": n}) for n in range(SIZE + 1)) + "\n"
    )
    return str(tmp_path / "own.py"), str(tmp_path / "rows.jsonl")


def test_rows_are_those_that_python_would_filter_and_map(files, caplog, capfd):
    own, path = files
    with caplog.at_level(logging.INFO):
        (rows,) = load_sources(DataConfig(train=path, filter=f"{own}:keep", map=f"{own}:make"))
    kept = [n for n in range(SIZE + 1) if n % 3 == 0]
    assert list(rows) == [{"prompt": f"{n}?", "raw": b"\0", "pair": [n, None]} for n in kept]
    assert rows[5]["prompt"] == "15?" and rows[-1]["prompt"] == "198?" and len(rows) == len(kept)
    # A row keeps its line of the file, and what a function prints is no result of a command.
    assert rows.place(5) == f"{path}:16" and capfd.readouterr().out == ""
    assert f"67 of 200 rows of {path} kept by {own}:keep" in caplog.messages
    filtered = load_part(DataConfig(train="t", filter=f"{own}:keep"), path, "train")
    assert list(filtered) == [{"n": n} for n in kept]
    with caplog.at_level(logging.INFO):
        few = load_part(DataConfig(train="t", filter=f"{own}:keep"), path, "train", 3)
    assert list(few) == [{"n": 0}, {"n": 3}, {"n": 6}]
    assert f"3 of 7 rows of {path} kept by {own}:keep" in caplog.messages, "of those that were looked at"


def test_a_source_has_its_own_functions_in_place_of_those_of_all(files):
    own, path = files
    sources = [{"path": path, "filter": f"{own}:keep", "name": "a"}, {"path": path, "limit": 2, "name": "b"}]
    data = DataConfig(train=sources, map=f"{own}:make", eval=path)
    first, second = load_sources(data)
    assert [len(first), len(second)] == [67, 2] and first[1]["prompt"] == "3?" and second[1]["prompt"] == "1?"
    assert data.functions == {"data.map": f"{own}:make", "data.train.0.filter": f"{own}:keep"}
    # What comes of the functions is in the fingerprint: it must be the same on resume, however it is made.
    assert len({rows.fingerprint for rows in (first, second, *load_sources(DataConfig(train=path)))}) == 3
    assert first.fingerprint == load_sources(data)[0].fingerprint


def test_their_file_is_a_part_of_the_code_of_a_run(files):
    own, path = files
    config = config_of(data={"train": [{"path": path, "filter": f"{own}:keep"}]})
    (before,) = code_of(config)
    with open(own, "a") as file:
        file.write("# changed")
    (after,) = code_of(config)
    assert before != after and before.startswith("own.py ") and after.startswith("own.py ")


def test_they_run_in_a_process_without_secrets(files, monkeypatch):
    own, path = files
    monkeypatch.setenv("HF_TOKEN", "secret")
    row = load_part(DataConfig(train="t", map=f"{own}:reveal"), path, "train")[0]
    assert row["secrets"] == [] and row["pid"] != os.getpid()


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("filter", "absent", r"data.filter: \S+own.py:absent cannot be loaded: .* has no function `absent`"),
        ("map", "fails", r"data.map: `fails` raised KeyError: 'absent' \(\S+own.py:\d+\) at row 100 \(\S+rows.jsonl:101\), `{'n': 100}`"),
        ("filter", "fails", r"data.filter: `fails` returned a dict; allowed are True and False at row 1 "),
        ("filter", "nearly", r"data.filter: `nearly` returned a numpy.bool_?; allowed are True and False at row 1 "),
        ("map", "wrong", r"data.map: `wrong` returned a NoneType; allowed is a mapping from columns .* at row 1 "),
        ("map", "strange", r"`strange` returned a row that cannot be stored .* at row 1 \(\S+rows.jsonl:1\)"),
        ("map", "counts", r"`counts` returned a row that cannot be stored \(int is not allowed for map key .* at row 1 "),
        ("map", "exits", r"`exits` raised SystemExit: 3"),
        ("filter", "dies", r"the process of data.filter and data.map ended at rows 1 to 64 of \S+rows.jsonl"),
        ("filter", "hangs", r"took longer than 2 s for rows 1 to 64 of \S+rows.jsonl, the first at \S+rows.jsonl:1"),
    ],
)  # fmt: skip
def test_a_function_that_fails_is_named_with_the_row(files, monkeypatch, key, name, message):
    own, path = files
    monkeypatch.setattr(row_functions, "LIMIT_S", 2.0 if name == "hangs" else 60.0)
    with pytest.raises(DataError, match=message):
        load_part(DataConfig(train="t", **{key: f"{own}:{name}"}), path, "train")


def test_a_row_with_half_of_a_surrogate_pair_reaches_the_functions_as_it_is(files, tmp_path):
    own, path = files[0], tmp_path / "half.jsonl"
    path.write_text('{"b": "whole"}\n{"b": "\\ud800"}\n')
    assert list(load_part(DataConfig(train="t", filter=f"{own}:whole"), str(path), "train")) == [
        {"b": "\ud800"}
    ]
    with pytest.raises(
        DataError, match=r"`half` returned a row that cannot be stored .* at row 2 \(\S+half.jsonl:2"
    ):
        load_part(DataConfig(train="t", map=f"{own}:half"), str(path), "train")


def test_a_number_beyond_64_bits_reaches_the_functions_and_is_refused_from_a_map(files, tmp_path):
    own, path = files[0], tmp_path / "wide.jsonl"
    path.write_text(f'{{"b": {2**64}}}\n{{"b": "{2**64}"}}\n')
    with open(own, "a") as file:
        file.write("def wide(row): return row['b'] == 2**64\ndef same(row): return row\n")
    assert list(load_part(DataConfig(train="t", filter=f"{own}:wide"), str(path), "train")) == [{"b": 2**64}]
    with pytest.raises(DataError, match=r"`same` returned a row that cannot be .*64 bits.* at row 1 "):
        load_part(DataConfig(train="t", map=f"{own}:same"), str(path), "train")


def test_a_filter_that_keeps_nothing_is_named(files):
    own, path = files
    with open(own, "a") as file:
        file.write("def none(row): return False\n")
    with pytest.raises(DataError, match=r"data.filter: \S+own.py:none keeps none of the 200 rows of \S+rows"):
        load_part(DataConfig(train="t", filter=f"{own}:none"), path, "train")
