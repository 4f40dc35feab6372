"""Datasets: what is read is what was written, and what cannot be read is named with its line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.dataset import load_rows
from asyncrl.errors import DataError

ROWS = [
    {"prompt": "12+34=", "answer": "46"},
    {"prompt": "é\u2028\n", "words": ["pen", "crab"], "level": 3, "note": None},
]
SHARED = Path(__file__).parents[2].parent / "shared" / "data"

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@given(rows=st.lists(st.dictionaries(st.text(), values), min_size=1, max_size=5))
def test_jsonl_and_json_come_back_as_written(tmp_path_factory, rows):
    directory = tmp_path_factory.mktemp("rows")
    (directory / "rows.json").write_text(json.dumps(rows))
    jsonl, array = (
        load_rows(write_jsonl(directory / "rows.jsonl", rows)),
        load_rows(str(directory / "rows.json")),
    )
    assert list(jsonl) == list(array) == rows
    assert len(jsonl) == len(rows)
    assert jsonl.fingerprint == array.fingerprint and jsonl.fingerprint.startswith(
        f"{len(rows)} rows with digest "
    )


def test_parquet_comes_back_as_written(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "a", "words": ["x", "y"]}, {"prompt": "b", "words": []}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(load_rows(str(tmp_path / "rows.parquet"))) == rows
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn.parquet: not a parquet file"):
        load_rows(str(tmp_path / "torn.parquet"))


def test_blank_lines_are_allowed_and_lines_are_still_counted_right(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\n\n{"a": 3\n')
    with pytest.raises(
        DataError, match=r'rows.jsonl:6: not JSON .*found `{"a": 3`; every line must be one JSON object'
    ):
        load_rows(str(path))
    path.write_text('\n{"a": 1}\r\n\n{"a": 2}')
    assert list(load_rows(str(path))) == [{"a": 1}, {"a": 2}]


def test_a_fingerprint_is_of_the_rows_and_the_same_in_every_process():
    from asyncrl.data.dataset import Rows

    rows = [{"a": 1, "b": "\ud83d"}, {"a": 2, "b": object()}]
    assert Rows(rows, "x").fingerprint == Rows([rows[0], {"a": 2, "b": object()}], "y").fingerprint
    assert Rows([{"a": 1}], "x").fingerprint == "1 rows with digest c4cb53ce0f4efd04", (
        "it is stored, so it may never change"
    )
    changed = [
        [*rows, rows[0]],
        rows[::-1],
        rows[:1],
        [rows[0], {**rows[1], "a": 3}],
        [{"a": 1, "c": "\ud83d"}, rows[1]],
    ]
    assert len({Rows(each, "x").fingerprint for each in [rows, *changed]}) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"[1, 2]\n", r"a.jsonl:1: found a JSON list, `\[1, 2\]`; a row is an object"),
        ("a.jsonl", b'{"a": 1}\n"text"\n', r"a.jsonl:2: found a JSON str"),
        (
            "a.jsonl",
            b'{"a": "\xff"}\n',
            r"a.jsonl:1: found bytes that are not UTF-8; save the file as UTF-8",
        ),
        ("a.json", b'{"a": "\xff"}\n', r"a.json: found bytes that are not UTF-8"),
        ("a.jsonl", b"{}\n" + b"[" * 99999 + b"\n", r"a.jsonl:2: not JSON \(maximum recursion depth"),
        ("a.jsonl", b"\n\n", r"a.jsonl holds no rows"),
        ("a.json", b'{"a": 1}', r"a.json: found a JSON dict; a .json dataset is one array"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"a.json: not JSON .*a .jsonl dataset has one object per line"),
        ("a.json", b"[]", r"a.json holds no rows"),
        ("a.json", b'[{"a": 1}, 7]', r"a.json, row 2: found a JSON int"),
        ("a.csv", b"a,b\n", r"suffix `.csv`; supported are .jsonl, .json, .parquet"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / name))


def test_seeds_are_rows_without_a_file():
    rows = load_rows("seeds:3")
    assert list(rows) == [{"seed": 0}, {"seed": 1}, {"seed": 2}] and rows.place(2) == "seeds:3, row 3"
    assert rows.fingerprint != load_rows("seeds:4").fingerprint
    assert len(load_rows("seeds:1000000")) == 1_000_000


@pytest.mark.parametrize("number", ["", "0", "-1", "01", "1.5", "x", "1000001", "9" * 5000, "\u0663", " 3"])
def test_a_number_of_seeds_that_is_none_is_refused(number):
    with pytest.raises(DataError, match=r"allowed is seeds:N with N from 1 to 1,000,000"):
        load_rows(f"seeds:{number}")


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "/nowhere/else", "nowhere.parquet"])
def test_a_missing_file_is_not_looked_for_on_the_hub(source):
    with pytest.raises(DataError, match="does not exist"):
        load_rows(source)


def test_a_hub_dataset_needs_the_package_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError,
        match=r"openai/gsm8k is not .* needs the package `datasets`; run: pip install 'asyncrl\[data\]'",
    ):
        load_rows("openai/gsm8k")


def test_a_hub_dataset_is_loaded_by_name_and_split(monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")

    def load_dataset(source, part, split):
        if split != "test":
            raise ValueError(f"Unknown split {split}")
        table = pyarrow.Table.from_pylist([{"a": source, "part": part}])
        return SimpleNamespace(with_format=lambda kind: table)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = load_rows("openai/gsm8k", "test")
    assert (list(rows), rows.source) == ([{"a": "openai/gsm8k", "part": None}], "openai/gsm8k [test]")
    assert list(load_rows("openai/gsm8k:main", "test")) == [{"a": "openai/gsm8k", "part": "main"}]
    with pytest.raises(DataError, match="split `dev`: Unknown split dev"):
        load_rows("openai/gsm8k", "dev")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real data in ../shared/data")
@pytest.mark.parametrize(
    ("name", "rows"),
    [("gsm8k/train.jsonl", 7473), ("story_words/test.jsonl", 120), ("svamp/SVAMP.json", 1000)],
)
def test_real_files_are_read_completely(name, rows):
    assert len(load_rows(str(SHARED / name))) == rows
