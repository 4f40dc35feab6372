"""The rows of a stage: which columns TRL wants of each kind, checked before anything is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import has_chat_template
from asyncrl.config.outline import kept_values
from asyncrl.config.wording import shown
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.row_files import Row
from asyncrl.errors import DataError
from asyncrl.stages.settings import StageConfig

# Sets of columns, the first that a file should have.
COLUMNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("prompt", "completion"), ("messages",), ("text",)),
    "rm": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "kto": (("prompt", "completion", "label"),),
    "distil": (("prompt",),),
}
# Columns that TRL reads besides, if a file has them, and what a row without them has.
FURTHER: Mapping[str, Any] = {"tools": None, "chat_template_kwargs": {}, "margin": 0.0}


def read_rows(config: StageConfig) -> tuple[Rows, Rows | None]:
    """Return the rows of data.train and data.eval. Raises DataError for the first row that cannot be used."""
    data = config.data
    train = _checked(load_rows(data.train, data.split), config)
    return train, _checked(load_rows(data.eval, data.eval_split), config) if data.eval else None


def fixed_values(config: StageConfig) -> dict[str, Any]:
    """Return what must not change on a resume: settings, and digests of the rows. Raises DataError."""
    train, held_out = read_rows(config)
    rows = {"data.train": train.fingerprint, "data.eval": held_out and held_out.fingerprint}
    return kept_values(config) | rows


def for_trl(rows: Rows, stage: str) -> list[dict[str, Any]]:
    """Return the rows with the columns that TRL reads; others may have values of two types."""
    columns = (*_columns(rows[0], stage), *FURTHER)
    found = [{name: row[name] for name in columns if row.get(name) is not None} for row in rows]
    # `datasets` takes the columns of the first row.
    given = {name: FURTHER.get(name) for row in found for name in row}
    return [given | row for row in found]


def _checked(rows: Rows, config: StageConfig) -> Rows:
    stage, first = config.stage, rows[0]
    columns, labels = _columns(first, stage), set[bool]()
    if not columns:
        allowed = " or ".join(f"{', '.join(one)}" for one in COLUMNS[stage])
        found = f"found the columns {', '.join(sorted(first)) or 'none'}"
        cure = "rename the columns, or choose another stage"
        raise DataError(f"{rows.place(0)}: {found}; stage {stage} needs {allowed}; {cure}")
    # TRL adds the columns of a row up, or asks any one of them whether the row is a conversation.
    is_chat, directory = isinstance(first[columns[0]], list), Path(config.model.path)
    if is_chat and directory.is_dir() and not has_chat_template(directory):
        cure = "add one to the tokenizer, or write the columns as text"
        raise DataError(f"{rows.place(0)}: found chat messages, and {directory} has no chat template; {cure}")
    further = {"distil": ("tools", "chat_template_kwargs"), "rm": ("margin",)}.get(stage, ())
    for index, row in enumerate(rows):
        for name in (*columns, *further):
            if wrong := _wrong(row, name, is_chat=is_chat):
                raise DataError(f"{rows.place(index)}: column `{name}` {wrong}; correct or remove the row")
        if "rejected" in columns and row["chosen"] == row["rejected"]:
            same = "chosen and rejected are the same, from which nothing is learned; remove the row"
            raise DataError(f"{rows.place(index)}: {same}")
        labels.add(row.get("label") is True)
    if stage == "kto" and len(labels) == 1:
        found = f"every label is {str(labels.pop()).lower()}"
        raise DataError(f"{rows.source}: {found}; KTO needs good and bad completions; add rows of the other")
    return rows


def _columns(row: Row, stage: str) -> tuple[str, ...]:
    """Return the first set of columns that the row has whole; empty without one."""
    return next((columns for columns in COLUMNS[stage] if row.keys() >= set(columns)), ())


def _wrong(row: Row, name: str, *, is_chat: bool) -> str:
    """Say what is wrong with a value; empty if it has the form of the first row's first column."""
    value = row.get(name)
    if name == "label":
        is_right, allowed = isinstance(value, bool), "true and false"
    elif name == "margin":
        is_right, allowed = value is None or type(value) in (int, float), "a number, which CSV files lack"
    elif name in FURTHER:
        is_right, allowed = not value, "nothing, because TRL reads it in other stages only"
    elif is_chat:
        messages = value if isinstance(value, list) else []
        is_right = bool(messages) and all(isinstance(one, dict) and "role" in one for one in messages)
        allowed = "a list of messages with `role` and `content`, as in the first column of the first row"
    else:
        is_right = isinstance(value, str) and bool(value)
        allowed = "text, as in the first column of the first row"
    return "" if is_right else f"holds {shown(value)}; allowed is {allowed}"
