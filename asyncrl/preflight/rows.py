"""Checks every row of the data files for the columns that a run needs, before a model or tokenizer is
loaded."""

import difflib
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.named_files import is_local
from asyncrl.config.schema import Config
from asyncrl.data.dataset import FORMATS, Rows, load_rows
from asyncrl.data.reader import PromptReader
from asyncrl.errors import DataError
from asyncrl.preflight.sources import Missing, reward_form
from asyncrl.rewards.forms import Form

SHOWN = 3  # rows that a message names


def row_problems(config: Config) -> Iterator[Mistake]:
    """Rows without a usable prompt or without a column that a reward needs; files that cannot be read."""
    forms = _forms(config)
    for key, source, split in (
        ("data.train", config.data.train, config.data.split),
        ("data.eval", config.data.eval, config.data.eval_split),
    ):
        if source is None or not is_local(source) or not Path(source).is_file():
            continue
        if Path(source).suffix not in FORMATS:
            yield Mistake(
                (key,),
                f"found the suffix `{Path(source).suffix}`; allowed are {', '.join(FORMATS)}; convert the "
                "file",
            )
            continue
        try:
            rows = load_rows(source, split)
        except DataError as error:
            yield Mistake((key,), str(error))
        else:
            found: dict[tuple[str, ...], list[str]] = {}
            for keys, text in (*_lacking(config, key, rows, forms), *_unusable(config, key, rows)):
                found.setdefault(keys, []).append(text)
            # One message per key.
            yield from (Mistake(keys, "; and ".join(texts)) for keys, texts in found.items())


def _forms(config: Config) -> dict[str, Form]:
    """Call forms of the reward functions, by key, as far as they are known without running user code."""
    found = {}
    for index, one in enumerate(config.reward.functions):
        try:
            form = reward_form(one.function)
        except Missing:  # reported by `source_problems`
            continue
        if form is not None:
            found[f"reward.functions.{index}.function"] = form
    return found


def _lacking(config: Config, key: str, rows: Rows, forms: Mapping[str, Form]) -> Iterator[Mistake]:
    """A mistake for each missing column: of the key that wants it if no row has it, otherwise of the data."""
    wants = {name: form.lacking for name, form in forms.items()}
    prompt = _prompt_columns(config)
    prompt_key = "data.prompt_field" if config.data.template is None else "data.template"
    wants[prompt_key] = lambda row: [column for column in prompt if column not in row]
    for name, lacking in wants.items():
        found: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            for column in lacking(row):
                found.setdefault(column, []).append(index)
        for column, indices in found.items():
            if len(indices) == len(rows):
                close = difflib.get_close_matches(column, rows[0], n=1, cutoff=0.5)
                hint = f"did you mean `{close[0]}`?" if close else "add it to the data or name another"
                yield Mistake(
                    (name,),
                    f"wants column `{column}`, which {rows.source} lacks; it has {', '.join(rows[0])}; "
                    f"{hint}",
                )
            else:
                places = ", ".join(rows.place(index) for index in indices[:SHOWN]) + (
                    ", ..." if len(indices) > SHOWN else ""
                )
                text = (
                    f"{len(indices)} of {len(rows)} rows lack column `{column}`, which {name} wants: {places}"
                )
                yield Mistake((key,), f"{text}; add it there, or remove the rows")


def _unusable(config: Config, key: str, rows: Rows) -> Iterator[Mistake]:
    """A mistake for rows whose prompt column holds no prompt."""
    reader, columns = PromptReader(config.data, config.model.chat_template), _prompt_columns(config)
    found: dict[str, None] = {}  # keeps equal messages once: a mistake in the template recurs in every row
    for index, row in enumerate(rows):
        if all(column in row for column in columns):
            try:
                reader.read(row, rows.place(index))
            except DataError as error:
                found[str(error)] = None
    if found:
        more = f" (and {len(found) - SHOWN} more rows of it)" if len(found) > SHOWN else ""
        yield Mistake((key,), f"{'; '.join([*found][:SHOWN])}{more}")


def _prompt_columns(config: Config) -> list[str]:
    if config.data.template is None:
        return [config.data.prompt_field]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(config.data.template) if name]
    except ValueError:  # the reader reports what is wrong with the template
        return []
    return [name.split(".")[0].split("[")[0] for name in names]
