"""Datasets: what is read is what was written, and what cannot be read is named with its line."""

import csv
import errno
import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.data_section import DataConfig
from asyncrl.control.base import Hello
from asyncrl.data import row_files
from asyncrl.data.dataset import Rows, fingerprints, load_rows
from asyncrl.data.row_functions import load_part
from asyncrl.errors import DataError, RowsChanged

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
    # The second name would be a pattern that does not match it.
    for name in ("rows.parquet", "rows[1].parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        assert list(load_rows(str(tmp_path / name))) == rows
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn.parquet: not a parquet file"):
        load_rows(str(tmp_path / "torn.parquet"))


def test_columns_of_several_types_come_back_as_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    call = {"name": "add", "arguments": {"x": 1, "y": None}}
    rows = [
        {"answer": 42, "info": {"x": 0.1}, "prompt": [{"role": "user", "content": "a", "name": "n"}]},
        {"answer": "Paris", "info": {"y": "z"}, "prompt": [{"role": "user", "content": "b"}]},
        {"answer": None, "info": {}, "prompt": [{"role": "assistant", "tool_calls": [call]}]},
    ]
    (tmp_path / "set").mkdir()
    file = write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "a.parquet")
    for source in (file, tmp_path / "set", tmp_path / "a.parquet"):
        assert list(load_rows(str(source))) == rows


def test_a_directory_of_save_to_disk_is_refused_with_what_to_do(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"saved using `save_to_disk`\. Please write it by `to_parquet`"):
        load_rows(str(tmp_path / "saved"))


def test_narrow_floats_of_parquet_have_the_digits_of_their_width(tmp_path):
    """A reward that compares texts would find 0.10000000149011612 in place of the 0.1 that was written."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = [0.1, -2.7182817, 1e-07, 16777216.0, float("inf"), None]
    columns = {
        "single": pyarrow.array(values, pyarrow.float32()),
        "half": pyarrow.array([0.1, 65504.0, None, None, None, -0.5], pyarrow.float16()),
        "double": pyarrow.array([0.1 + 0.2] * 6, pyarrow.float64()),
        "inside": pyarrow.array(
            [{"scores": [0.1, 0.3]}] * 6, pyarrow.struct([("scores", pyarrow.list_(pyarrow.float32()))])
        ),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    rows = [*load_rows(str(tmp_path / "rows.parquet"))]
    assert [row["single"] for row in rows] == values
    assert [row["half"] for row in rows] == [0.1, 65504.0, None, None, None, -0.5]
    assert {row["double"] for row in rows} == {0.1 + 0.2}
    assert rows[0]["inside"] == {"scores": [0.1, 0.3]}


def test_parquet_that_python_has_no_values_for_is_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bad = pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string())
    late = pyarrow.array([0, 2**52]).cast(pyarrow.timestamp("ms"))
    map_type = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    for name, column, message in (
        ("text", bad, r"text.parquet, rows 1 to 2: found what no .*0xff"),
        ("date", late, r"date.parquet, rows 1 to 2: found what no .*date"),
        (
            "map",
            pyarrow.array([[("k", 1)]], map_type),
            r"map.parquet: not a parquet file .*map<string, int64",
        ),
        ("empty", pyarrow.array([], pyarrow.string()), r"empty.parquet holds no rows; write at least one"),
    ):
        parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / f"{name}.parquet")
        with pytest.raises(DataError, match=message):
            list(load_rows(str(tmp_path / f"{name}.parquet")))


def test_more_files_than_a_process_may_open_are_no_fault_of_the_last_one(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)

    def many(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", many)
    with pytest.raises(DataError, match=r"a.jsonl cannot be read: Too many open files; .*ulimit -n 65536"):
        load_rows(path)


def test_a_full_disk_is_not_a_fault_of_the_file(tmp_path, monkeypatch):
    datasets, parquet = pytest.importorskip("datasets"), tmp_path / "a.parquet"
    datasets.Dataset.from_list(ROWS[:1] * 2).to_parquet(parquet)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a\n1\n"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_files.shutil, "copyfileobj", full)
    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write_table", full)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("a.parquet", "a.csv.gz"):
        with pytest.raises(DataError, match=f"{name} cannot be read: No space left on device; free space"):
            load_rows(str(tmp_path / name))


@given(
    columns=st.lists(st.text("ab\u00e9,", min_size=1), min_size=1, max_size=3, unique=True),
    texts=st.lists(st.text('x,"\n\r \u2028'), min_size=3, max_size=12),
)
def test_csv_comes_back_as_written_and_packed_as_unpacked(tmp_path_factory, columns, texts):
    directory, width = tmp_path_factory.mktemp("rows"), len(columns)
    rows = [
        dict(zip(columns, texts[i : i + width], strict=True))
        for i in range(0, len(texts) // width * width, width)
    ]
    with (directory / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, columns, quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    (directory / "rows.csv.gz").write_bytes(gzip.compress((directory / "rows.csv").read_bytes()))
    packed, plain = (load_rows(str(directory / name)) for name in ("rows.csv.gz", "rows.csv"))
    assert list(packed) == list(plain) == rows
    assert plain.fingerprint == load_rows(write_jsonl(directory / "rows.jsonl", rows)).fingerprint


def test_a_value_of_csv_may_be_longer_than_the_librarys_default(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "x" * 200_000)
    assert len(load_rows(str(tmp_path / "a.csv"))[0]["a"]) == 200_000


def test_a_pattern_is_its_files_in_the_order_of_their_names(tmp_path):
    rows = [{"a": str(number)} for number in range(5)]
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "part-2.jsonl", rows[3:])
    (tmp_path / "part-1.csv").write_text("a\n\n0\n1\n2\n")
    (tmp_path / "part-0.jsonl").mkdir()
    found, whole = load_rows(f"{tmp_path}/part-*"), load_rows(write_jsonl(tmp_path / "all.jsonl", rows))
    assert list(found) == rows and found.fingerprint == whole.fingerprint
    assert [found.place(index).removeprefix(f"{tmp_path}/") for index in range(5)] == [
        "part-1.csv:3",
        "part-1.csv:4",
        "part-1.csv:5",
        "part-2.jsonl:1",
        "part-2.jsonl:2",
    ]
    write_jsonl(tmp_path / "sub" / "part-3.jsonl", rows[:1])
    assert load_rows(f"{tmp_path}/**/part-*").directory(5) == tmp_path / "sub"
    few = Rows.joined([found.only(range(2)), found.only([0, 2, 3, 4]), whole])
    assert [few.place(index).rpartition("/")[2] for index in (1, 3, 5, 6)] == [
        "part-1.csv:4",
        "part-1.csv:5",
        "part-2.jsonl:2",
        "all.jsonl:1",
    ]
    assert load_part(DataConfig(train="t"), f"{tmp_path}/part-*", "train", 4).place(3) == found.place(3)
    assert len(load_part(DataConfig(train="t"), f"{tmp_path}/part-*", "train", 9)) == 5
    write_jsonl(tmp_path / "x[1].jsonl", rows[:1])
    assert len(load_rows(f"{tmp_path}/x[1].jsonl")) == 1, "a file of that name is no pattern"
    with pytest.raises(DataError, match=r"none-\*.jsonl does not exist"):
        load_rows(f"{tmp_path}/none-*.jsonl")


def test_blank_lines_are_allowed_and_lines_are_still_counted_right(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\n\n{"a": 3\n')
    with pytest.raises(
        DataError, match=r'rows.jsonl:6: not JSON .*found `{"a": 3`; every line must be one JSON object'
    ):
        _ = load_rows(str(path)).fingerprint
    path.write_text('\n{"a": 1}\r\n\n{"a": 2}')
    assert list(load_rows(str(path))) == [{"a": 1}, {"a": 2}]


def test_a_fingerprint_is_of_the_rows_and_the_same_in_every_process():
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


def test_a_greeting_carries_the_fingerprint_of_any_number_of_sets_and_tells_them_apart():
    identity = {"generator_id": "g0", "incarnation": "a", "release": "1", "config_hash": "b", "version": 0}
    one, found = Rows([{"a": 1}], "x").fingerprint, set()
    for sets in range(40):
        for last in ("", "0", "1"):
            found.add(Hello(**identity, rows=fingerprints(one, [one] * sets + [one + last])).rows)
    assert len(found) == 120 and fingerprints(one, []) == one and fingerprints(one, [one]).endswith(one)


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
        (
            "a.json",
            b' [\n{"a": ["\xc3\xa4, [{}]"]},\n{"b": {"c": 1, "d": 2, "c": 3}}, {"e": 1, "e": 2}]',
            r"a.json, row 2: found the key `c` twice in one object, .*; remove the earlier one",
        ),
        ("a.json", '[{"a": 1, "a": 2}]'.encode("utf-16"), r"a.json, row 1: found the key `a` twice"),
        ("a.json", b'{"a": 1, "a": 2}', r"a.json: found the key `a` twice"),
        ("a.jsonl", b'{}\n{"a": [1], "a": 2}', r"a.jsonl:2: found the key `a` twice"),
        ("a.json", b"", r"a.json: not JSON .*a .json dataset is one array"),
        ("a.tsv", b"a\tb\n", r"a.tsv: found the suffix `.tsv`; allowed are .jsonl, .json, .csv, .parquet"),
        ("a.b.json.gz", b"", r"found the suffix `.json.gz`; allowed are .*.jsonl.gz, .csv.gz; convert"),
        ("a.csv", b"", r"a.csv holds no rows"),
        ("a.csv", b"a,b\n", r"a.csv holds no rows"),
        ("a.csv", b"a,b,a\n1,2,3\n", r"a.csv:1: found the columns `a`, `b`, `a`; the first row names"),
        ("a.csv", b"a,\n1,2\n", r"a.csv:1: found the columns `a`, ``"),
        ("a.csv", b'a,b\n"1\n2",3\n\n4\n', r"a.csv:5: found 1 values for 2 columns \(a, b\)"),
        ("a.csv", b"a,b\n1,2,3\n", r"a.csv:2: found 3 values for 2 columns"),
        ("a.csv", b'a,b\n1,2\n3,"4\n5,6\n', r"a.csv:3: not CSV \(unexpected end of data\); put a value"),
        ("a.csv", b'a,b\n1,"2"3\n', r"a.csv:2: not CSV"),
        ("a.csv", b'a,b\n1,2\n"\n\xff",3\n', r"a.csv:4: found bytes that are not UTF-8"),
        ("a.jsonl.gz", b'{"a": 1}\n', r"a.jsonl.gz:1: not a whole gzip file \(Not a gzipped file"),
        (
            "a.csv.gz",
            gzip.compress(b"a\n1\n", mtime=0)[:-9],
            r"a.csv.gz:\d: not a whole gzip file .*; make the file",
        ),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n{"a"\n', mtime=0), r"a.jsonl.gz:2: not JSON"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        _ = load_rows(str(tmp_path / name)).fingerprint


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


def test_a_hub_dataset_is_loaded_by_name_config_revision_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*names, **options):
        asked.append((*names, *options.values()))
        if options["split"] == "dev":
            raise ValueError("Unknown split dev")
        return datasets.Dataset.from_list([{"a": 1}, {"a": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_rows("openai/gsm8k", "test")
    assert (list(rows), rows.source) == ([{"a": 1}, {"a": 2}], "openai/gsm8k [test]")
    load_rows("openai/gsm8k:main", "train[:10]")
    load_rows("openai/gsm8k@v1.0")
    load_rows("openai/gsm8k:main@v1.0")
    assert asked == [
        ("openai/gsm8k", None, "test", None),
        ("openai/gsm8k", "main", "train[:10]", None),
        ("openai/gsm8k", None, "train", "v1.0"),
        ("openai/gsm8k", "main", "train", "v1.0"),
    ]
    with pytest.raises(DataError, match="split `dev`: Unknown split dev"):
        load_rows("openai/gsm8k", "dev")


@pytest.mark.parametrize("second", ['{"a": 2, "b": 3}', "{broken"])
def test_a_directory_of_files_that_do_not_fit_is_a_mistake_of_the_data(tmp_path, second):
    pytest.importorskip("datasets")
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "2.jsonl").write_text(f"{second}\n")
    with pytest.raises(DataError, match=rf"dataset {tmp_path}, split `train`: .*"):
        load_rows(str(tmp_path))


def test_a_dataset_with_a_loading_script_is_a_mistake_of_the_data(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.py").touch()
    with pytest.raises(DataError, match=r"old, split `train`: .*scripts are no longer supported"):
        load_rows(str(tmp_path / "old"))


def test_rows_of_a_directory_lie_in_it(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    for source in (tmp_path / "set", tmp_path / "set" / "train.jsonl"):
        rows = Rows.joined([load_rows(str(source)).only([1]), load_rows(str(source))])
        assert [rows.directory(index) for index in range(3)] == [tmp_path / "set"] * 3


@pytest.mark.parametrize("name", ["set@1", "12:00"])
def test_a_slice_of_a_local_dataset_is_these_rows(name, tmp_path):
    pytest.importorskip("datasets")
    whole = [{"prompt": str(number), "messages": [{"role": "user"}]} for number in range(20)]
    (tmp_path / name).mkdir()
    write_jsonl(tmp_path / name / "train.jsonl", whole)
    found = {split: list(load_rows(str(tmp_path / name), split)) for split in ("train[5:8]", "train[-10%:]")}
    assert found == {"train[5:8]": whole[5:8], "train[-10%:]": whole[-2:]}
    with pytest.raises(DataError, match=r"split `train\[x\]`"):
        load_rows(str(tmp_path / name), "train[x]")


def test_rows_stay_in_their_file(tmp_path):
    # What is parsed is the row that is used, through every view of it.
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": number} for number in range(3000)])
    with Path(path).open("a") as file:
        file.write("broken\n")
    rows = load_rows(path)
    views = (rows, Rows.joined([rows, rows]), rows.only(range(1, 3001)).only([1998, 2999]))
    assert [view[at] for view, at in zip(views, (1999, 4999 + 1, 0), strict=True)] == [{"n": 1999}] * 3
    for view, at in zip(views, (-1, 3000, 1), strict=True):
        with pytest.raises(DataError, match=r"a.jsonl:3001: not JSON .* found `broken`"):
            view[at]
    assert list(rows.only(range(3000))) == [rows[at] for at in range(3000)]
    with pytest.raises(IndexError):
        rows[3001]
    # A file that changes under a process would give other rows to the same tickets.
    Path(path).write_text("{}\n" * 3001)
    with pytest.raises(RowsChanged, match=r"a.jsonl changed while a process reads rows from it; restore it"):
        rows[0]


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real data in ../shared/data")
@pytest.mark.parametrize(
    ("name", "rows"),
    [("gsm8k/train.jsonl", 7473), ("story_words/test.jsonl", 120), ("svamp/SVAMP.json", 1000)],
)
def test_real_files_are_read_completely(name, rows):
    assert len(load_rows(str(SHARED / name))) == rows
