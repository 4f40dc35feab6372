"""`asyncrl validate`: finds every mistake of a config that shows without a model or running user code."""

import ast
import inspect
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.base import Mistake
from asyncrl.config.data_section import EvalSet
from asyncrl.config.document import Node
from asyncrl.config.environment_section import is_rollout
from asyncrl.config.load import checked, read_draft
from asyncrl.config.named_files import SEEDS, file_problems, is_stage, local_files, too_long
from asyncrl.config.outline import kind_at
from asyncrl.config.reward_section import REMOTE, Judge, RewardFunctionConfig
from asyncrl.config.rules import lacking_room
from asyncrl.config.schema import Config
from asyncrl.config.wording import did_you_mean
from asyncrl.data.data_files import DataFiles
from asyncrl.data.dataset import Rows
from asyncrl.data.images import image_bytes, picture_of
from asyncrl.data.reader import PromptReader
from asyncrl.data.row_files import Row
from asyncrl.data.row_functions import load_parts
from asyncrl.environments.named import TOOLS, is_named
from asyncrl.errors import ConfigError, DataError, RewardError
from asyncrl.hosting.gpus import count_gpus, has_instances, is_elsewhere
from asyncrl.hosting.placement import misplaced
from asyncrl.lora import require_usable
from asyncrl.preflight import definitions
from asyncrl.preflight.architectures import architecture_problems, teacher_problems
from asyncrl.preflight.definitions import Definition, Missing, definition
from asyncrl.preflight.outside import absent_names, outside_problems
from asyncrl.rewards.base import EPISODE_COLUMNS
from asyncrl.rewards.builtin import BUILTINS, obstacle
from asyncrl.rewards.endpoints import columns_of
from asyncrl.rewards.forms import Form, form_of
from asyncrl.rewards.reward_process import reward_sandbox

if TYPE_CHECKING:
    from asyncrl.data.prompts import RowRenderer

SHOWN = 3  # rows that a message names
# Methods of an environment, and what each call passes, besides columns by name.
CALLED = {"reset": ("self",), "step": ("self", "text")}


def validated_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resumes: bool = False,
    generators: bool = True,
    asks_hub: bool = False,
    on_hosts: bool = False,
) -> Config:
    """Return the config after checking its files, functions, rows, sandbox and GPUs on this machine.

    With `resumes`, the config is also compared with the run that it would resume, if there is one. Without
    `generators`, and with `cluster.kind`, these are on other machines. With `asks_hub`, the hub is
    asked for models and datasets, if nothing else is wrong. With `on_hosts`, GPUs and sandbox of this
    machine are checked only if it may be one of the hosts of `cluster.kind`.

    Raises:
        ConfigError: its text lists every mistake with its line.
    """
    if is_stage(path):
        raise ConfigError(f"{path} is the config of a stage; `asyncrl stage {path}` trains it")
    draft = read_draft(Config, path, overrides)
    if draft.config:
        kind = draft.config.cluster.kind
        try:
            here = {"generators": generators, "is_here": not (on_hosts and is_elsewhere(kind))}
            found = _problems(path, draft.config, draft.root, resumes=resumes, **here)
        except OSError as error:
            found = [too_long(error, draft.root)]
        for mistake in found:
            draft.add(mistake)
        asks_hub = asks_hub and kind != "kubernetes" and not draft.problems
        for mistake in absent_names(draft.config) if asks_hub else ():
            draft.add(mistake)
    return checked(draft)


def _problems(
    path: Path, config: Config, root: Node, *, resumes: bool, generators: bool, is_here: bool
) -> list[Mistake]:
    """Return the mistakes of a config on this machine. Raises OSError for a name that is too long."""
    generators = generators and config.cluster.kind is None
    found = [*architecture_problems(config.model, images_key=config.data.images_key)]
    found += [*file_problems(config), *teacher_problems(config), *_model_problems(config)]
    found += [*_function_problems(config, root, generators=generators), *_row_problems(config)]
    found += outside_problems(config, resumes=resumes, generators=generators)
    if config.cluster.kind == "kubernetes":
        from asyncrl.cluster import kubernetes  # it imports what keys are made with

        found += kubernetes.problems(config)
    elif is_here:
        found += misplaced(config, count_gpus(), generators=generators, instances=has_instances())
        functions = [one.function for one in config.reward.functions]
        is_boxed = config.reward.sandbox == "bubblewrap"
        if is_boxed and (problem := reward_sandbox(functions, config.run.root).problem()):
            found.append(Mistake(("reward.sandbox",), problem))
    if config.run.directory.exists() or path.name == "config.yaml":
        reported = {mistake.keys for mistake in found}  # for example a missing file
        others = _resume_problems(path, config, root) if resumes else ()
        found += [one for one in others if one.keys not in reported]
    return found


def _model_problems(config: Config) -> Iterator[Mistake]:
    """Find an adapter or layers that cannot be used, and a store without room for the experts of tokens."""
    model = config.model
    if model.lora is None and not model.router_replay:
        return
    try:
        if model.lora is not None:
            require_usable(model.lora, model.path)
        if (Path(model.path) / "config.json").is_file():
            from asyncrl.hosting.machine import read_model  # it imports torch and transformers

            read_model(model)
            if model.router_replay:
                from asyncrl.preflight.frame_size import frame_bytes

                for one in config.training:
                    yield from lacking_room(one, frame_bytes(one))
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        yield Mistake((key,), text)
    except DataError:  # `file_problems` reports it
        return


def _resume_problems(path: Path, config: Config, root: Node) -> list[Mistake]:
    # Heavy libraries, which a first run need not load.
    from asyncrl.run.directory import RunDirectory
    from asyncrl.run.saved import changes, moved, read_saved

    saved = read_saved(RunDirectory(config.run.directory))
    return list(moved(path, config.run, root)) or list(changes(config, saved, DataFiles(config)))


def _function_problems(config: Config, root: Node, *, generators: bool) -> Iterator[Mistake]:
    """Find mistakes in the names of functions: of rewards, rows, hooks and the algorithm.

    With `generators` these are on this machine, which then must have the interpreters of programs, too.
    """
    for key, one in config.reward_functions.items():
        try:
            form = _reward_form(one)
            if generators and (lacking := obstacle(one.function, one.params)):
                raise Missing(lacking)
            if form is not None and one.remote is None and (problem := form.refusal(one.params)):
                raise RewardError(f"`{one.function}` {problem}")
        except Missing as missing:
            yield Mistake((f"{key}.function",), str(missing))
        except RewardError as error:
            yield Mistake((f"{key}.{'params' if one.remote is None else 'params.prompt'}",), str(error))
    yield from _environment_problems(config)
    own_names = [*config.data.functions.items()]
    own_names += [(f"learner.hooks.{index}.name", one.name) for index, one in enumerate(config.learner.hooks)]
    for keys, node in root.walk():
        chosen = node.children.get("name") if kind_at(Config, keys) else None
        if chosen and isinstance(chosen.value, str) and ":" in chosen.value:
            own_names.append((".".join(map(str, (*keys, "name"))), chosen.value))
    for key, name in own_names:
        try:
            definition(name)
        except Missing as missing:
            yield Mistake((key,), str(missing))


def _environment_problems(config: Config) -> Iterator[Mistake]:
    """Find names that the environment's file lacks, and tools for a model that cannot call any."""
    for key, name, environment in config.environment_names:
        if is_named(name):
            yield from _unshown_tools(config, key, name, None)
            continue
        if ":" not in name:
            allowed = f"`path.py:Name`, `module:Name`, `library:NAME`, {', '.join(TOOLS)}"
            yield Mistake((key,), f"found `{name}`; allowed is {allowed}")
            continue
        if environment.python and not name.rpartition(":")[0].endswith(".py"):
            continue  # a module of another Python, which finds it or says what it lacks
        try:
            node = definition(name)
        except Missing as missing:
            # Another Python has another grammar.
            if not (environment.python and isinstance(missing.__cause__, SyntaxError)):
                yield Mistake((key,), str(missing))
            continue
        yield from _unshown_tools(config, key, name, node)
        for one in definitions.plain_methods(node):
            if (called := CALLED.get(one.name)) is None:
                continue
            try:
                call = inspect.Signature(definitions.parameters_of(one.args))
                call.bind(*called) if one.name == "step" else call.bind_partial(*called)
            except (TypeError, ValueError):
                found = f"`{one.name}` of `{name}` takes ({ast.unparse(one.args)}) in line {one.lineno}"
                cure = f"write `def {one.name}({', '.join(called)})`"
                yield Mistake((key,), f"{found}, but is called with ({', '.join(called)}); {cure}")


def _unshown_tools(config: Config, key: str, name: str, node: Definition | None) -> Iterator[Mistake]:
    """Find tools that no template shows to the model; decorators of a function may make anything of it."""
    if isinstance(node, ast.ClassDef):
        has_step = node.bases or definitions.count_bound(node, "step")
        found = "" if has_step else f"the public methods of `{name}` are tools"
        cure = "add a method `step`, with which it takes plain text"
    else:
        is_tool = name in TOOLS or (node and not node.decorator_list and not is_rollout(node))
        found = f"`{name}` is a tool" if is_tool else ""
        cure = "name a class with `reset` and `step`, which takes plain text"
    if found and not config.model.chat_template:
        text = f"{found}, but model.chat_template is false; set it to true, or {cure}"
        yield Mistake((key, "model.chat_template"), text)


def _reward_form(function: RewardFunctionConfig) -> Form | None:
    """Return the call form of a reward function, or None if only running it would tell.

    Raises Missing, and RewardError for a judge's template.
    """
    if (remote := function.remote) is not None:
        columns = columns_of(remote) if isinstance(remote, Judge) else frozenset()
        return Form(accepted=columns, required=columns, takes_all=True)
    name = function.function
    if ":" not in name:
        if name not in BUILTINS:
            known = (*BUILTINS, *REMOTE)
            hint = did_you_mean(name, known, "name your own as `path.py:function`")
            raise Missing(f"found no built-in `{name}`; allowed are {', '.join(known)}{hint}")
        if lacking := obstacle(name):
            raise Missing(lacking)
        return form_of(list(inspect.signature(BUILTINS[name]).parameters.values()))
    node = definition(name)
    if isinstance(node, ast.ClassDef):
        found = f"`{node.name}` is a class, and calling it makes an object, not a number"
        raise Missing(f"{found}; name a function, or an object: `{node.name.lower()}_ = {node.name}()`")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    try:
        form = form_of(definitions.parameters_of(node.args))
    except RewardError as error:
        raise Missing(f"`{node.name}` {error}") from error
    if found := definitions.returns_nothing(node):
        raise Missing(f"`{node.name}` {found}")
    return form


def _row_problems(config: Config) -> Iterator[Mistake]:
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
        asked, forms = config.of(task), _forms(config.functions_of(key))
        teacher = None if isinstance(task, EvalSet) else config.teacher_template
        section, found = config.data.of(task), dict[tuple[str, ...], list[str]]()
        try:
            (rows,) = load_parts(config.data, [task])
            held_out += min(asked.eval.prompts, len(rows)) * asked.eval.samples * isinstance(task, EvalSet)
            without = _without_prompt(asked.model_copy(update={"data": section}), key, rows, chat, teacher)
            for keys, text in (*_lacking(asked, key, rows, forms, teacher), *without):
                found.setdefault(keys, []).append(text)
        except DataError as error:
            yield Mistake((key,), str(error))
        # One message per key.
        yield from (Mistake(keys, "; and ".join(texts)) for keys, texts in found.items())
    for source in config.training:
        yield from lacking_room(source, held_out=held_out)


def _forms(functions: Mapping[str, RewardFunctionConfig]) -> dict[str, Form]:
    """Return the call forms of the reward functions by key, if known without running user code."""
    found = {}
    for key, one in functions.items():
        try:
            if (form := _reward_form(one)) is not None:
                found[f"{key}.function"] = form.with_params({} if one.remote else one.params)
        except (Missing, RewardError):  # reported by `_function_problems`
            continue
    return found


def _lacking(
    config: Config, key: str, rows: Rows, forms: Mapping[str, Form], teacher: str | None
) -> Iterator[Mistake]:
    """Find missing columns. If no row has one, the mistake concerns the key that wants it, else the data."""
    played = dict.fromkeys(EPISODE_COLUMNS) if config.environment.is_used else {}
    wants: dict[str, Callable[[Row], list[str]]] = {
        name: partial(lambda form, row: form.lacking({**row, **played}), form) for name, form in forms.items()
    }
    prompt = _prompt_columns(config)
    prompt_key = "data.prompt_field" if config.data.template is None else "data.template"
    wants[prompt_key] = lambda row: [column for column in prompt if column not in row]
    if teacher is not None:
        columns = _columns_of(teacher)
        wants["algorithm.reference.template"] = lambda row: [one for one in columns if one not in row]
    if (images := config.data.images_key) is not None:
        wants["data.images_key"] = lambda row: [] if images in row else [images]
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
                places = ", ".join([*map(rows.place, indices[:SHOWN]), *["..."] * (len(indices) > SHOWN)])
                text = (
                    f"{len(indices)} of {len(rows.checked)} rows lack column `{column}`, which {name} wants"
                )
                yield Mistake((key,), f"{text}: {places}; add it there, or remove the rows")


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
