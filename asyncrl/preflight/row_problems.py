"""Mistakes in the rows of a config: unreadable files, missing columns, rows without a usable prompt."""

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.base import Mistake
from asyncrl.config.data_section import EvalSet
from asyncrl.config.named_files import SEEDS, local_files
from asyncrl.config.reward_section import RewardFunctionConfig
from asyncrl.config.rules import lacking_room
from asyncrl.config.schema import Config
from asyncrl.config.wording import did_you_mean
from asyncrl.data.dataset import Rows
from asyncrl.data.images import image_bytes, picture_of
from asyncrl.data.reader import PromptReader
from asyncrl.data.row_files import Row
from asyncrl.data.row_functions import load_parts
from asyncrl.errors import DataError, RewardError
from asyncrl.preflight.definitions import Missing, reward_form
from asyncrl.rewards.forms import EPISODE_COLUMNS

if TYPE_CHECKING:
    from asyncrl.data.prompts import RowRenderer

SHOWN = 3  # rows that a message names


def row_problems(config: Config) -> Iterator[Mistake]:
    """Find files that cannot be read, and rows without a usable prompt or a column that a reward needs."""
    chat, held_out = None, 0
    try:
        if config.model.chat_template and (Path(config.model.path) / "tokenizer.json").is_file():
            from asyncrl.data.prompts import light_renderer  # it imports transformers

            chat = light_renderer(config.data, config.model)
    except DataError as error:
        yield Mistake(("model.chat_template",), str(error))
    for key, task in config.data.tasks.items():
        if not (task.path.startswith(SEEDS) or local_files(task.path)):
            continue
        asked = config.of(task).model_copy(update={"data": config.data.of(task)})
        teacher = None if isinstance(task, EvalSet) else config.teacher_template
        found = dict[tuple[str, ...], list[str]]()
        try:
            (rows,) = load_parts(config.data, [task])
            held_out += min(asked.eval.prompts, len(rows)) * asked.eval.samples * isinstance(task, EvalSet)
            lacking = _lacking(asked, config.functions_of(key), key, rows, teacher)
            for keys, text in (*lacking, *_without_prompt(asked, key, rows, chat, teacher)):
                found.setdefault(keys, []).append(text)
        except DataError as error:
            yield Mistake((key,), str(error))
        # One message per key.
        yield from (Mistake(keys, "; and ".join(texts)) for keys, texts in found.items())
    for source in config.training:
        yield from lacking_room(source, held_out=held_out)


def _lacking(
    config: Config, functions: Mapping[str, RewardFunctionConfig], key: str, rows: Rows, teacher: str | None
) -> Iterator[Mistake]:
    """Find missing columns. If no row has one, the mistake concerns the key that wants it, else the data."""
    prompt_key = "data.prompt_field" if config.data.template is None else "data.template"
    named = {prompt_key: _prompt_columns(config), "algorithm.reference.template": _columns_of(teacher or "")}
    named["data.images_key"] = [config.data.images_key] if config.data.images_key is not None else []
    played = dict.fromkeys(EPISODE_COLUMNS) if config.environment.is_used else {}
    wants = dict[str, Callable[[Row], list[str]]]()
    for name, one in functions.items():
        with suppress(Missing, RewardError):  # reported by `function_problems`
            if (form := reward_form(one)) is not None:
                form = form.with_params({} if one.remote else one.params)
                wants[f"{name}.function"] = partial(lambda form, row: form.lacking(row | played), form)
    for name, columns in named.items():
        wants[name] = partial(lambda columns, row: [one for one in columns if one not in row], columns)
    for name, lacking in wants.items():
        found: dict[str, list[int]] = {}
        for index in rows.checked:
            for column in lacking(rows[index]):
                found.setdefault(column, []).append(index)
        for column, indices in found.items():
            if len(indices) == len(rows.checked):
                hint = did_you_mean(column, rows[0], "add it to the data or name another", cutoff=0.5)
                has = f"{rows.source} lacks; it has {', '.join(rows[0])}"
                yield Mistake((name,), f"wants column `{column}`, which {has}{hint}")
            else:
                text = f"{len(indices)} of {len(rows.checked)} rows lack column `{column}`, which {name}"
                yield Mistake(
                    (key,), f"{text} wants: {places(rows, indices)}; add it there, or remove the rows"
                )


def places(rows: Rows, indices: Sequence[int]) -> str:
    """Return where the first `SHOWN` of some rows are."""
    return ", ".join(map(rows.place, indices[:SHOWN])) + ", ..." * (len(indices) > SHOWN)


def _without_prompt(
    config: Config, key: str, rows: Rows, chat: "RowRenderer | None", teacher: str | None
) -> Iterator[Mistake]:
    """Find rows whose prompt column holds no prompt, or messages that the chat template refuses."""
    reader, columns = PromptReader(config.data, bool(config.model.chat_template)), _prompt_columns(config)
    chat, readers = chat and replace(chat, reader=reader), [reader]
    if teacher is not None:
        readers.append(reader.for_teacher(teacher))
        columns += _columns_of(teacher)
    rendered: set[object] = set()  # roles and keys, by which templates refuse: one row of each is enough
    found: dict[str, None] = {}  # each message once: a mistake in the template recurs in every row
    for index in rows.checked:
        row = rows[index]
        if all(column in row for column in columns):
            try:
                where = rows.place(index)
                value, *_ = (one.read(row, where) for one in readers)
                if (images := config.data.images_key) is not None:
                    for image in image_bytes(row, images, where, rows.directory(index)):
                        picture_of(image, where, whole=False)
                if chat and not isinstance(value, str):
                    shape = tuple((one["role"], not one["content"], *sorted(one)) for one in value)
                    if shape not in rendered:
                        rendered.add(shape)
                        chat.chat(value, where)
            except DataError as error:
                found[str(error)] = None
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        yield Mistake((key,), f"{'; '.join([*found][:SHOWN])}{more}")


def _prompt_columns(config: Config) -> list[str]:
    template = config.data.template
    return [config.data.prompt_field] if template is None else _columns_of(template)


def _columns_of(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:  # the reader reports what is wrong with the template
        return []
    return [name.split(".")[0].split("[")[0] for name in names]
