"""Prompts: from a dataset row to token ids, and back from ids to text.

Special tokens are added once: by the chat template if there is one, otherwise by the tokenizer, unless the
text already begins with a BOS. Prompts are rendered when they are used. Those of `Rows.checked` are rendered
at the start, too, so that one that is too long or empty stops the run before it begins.
"""

import logging
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import jinja2

from asyncrl.config.data_section import DataConfig, DataSource, EvalSet
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig, SamplingConfig
from asyncrl.data.dataset import Rows, fingerprint_of, fingerprints
from asyncrl.data.file_tokenizer import FileTokenizer
from asyncrl.data.image_processor import ImageProcessor
from asyncrl.data.images import image_bytes
from asyncrl.data.reader import PromptReader, taken_answers
from asyncrl.data.row_files import Row
from asyncrl.data.row_functions import load_parts
from asyncrl.data.sample_plan import make_mixture
from asyncrl.errors import DataError, RenderError
from asyncrl.hosting.progress import beat
from asyncrl.session.base import without_stop
from asyncrl.session.chat_messages import Message, text_of
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.types import Prompt

log = logging.getLogger(__name__)
_SHOWN = 5  # rows that a message names


@dataclass(frozen=True, slots=True)
class RowRenderer:
    """Renders rows as prompts."""

    reader: PromptReader
    renderer: TemplateRenderer
    tokenizer: Any
    # Of a model that sees the images of rows.
    processor: ImageProcessor | None = None
    # Renders what a teacher reads in place of the prompt.
    teacher: "RowRenderer | None" = None

    def prompt(self, rows: Rows, index: int) -> Prompt:
        """Return the prompt of a row. Raises DataError that names the row if it has none."""
        given = rows[index], rows.place(index), rows.directory(index)
        prompt = self._prompt(*given)
        taught = self.teacher._prompt(*given).token_ids if self.teacher else ()
        return replace(prompt, teacher_ids=taught)

    def for_teacher(self, template: str) -> "RowRenderer":
        """Return one whose prompts have `teacher_ids` by this template."""
        return replace(self, teacher=replace(self, reader=self.reader.for_teacher(template)))

    def _prompt(self, row: Row, where: str, beside: Path) -> Prompt:
        value = self.reader.read(row, where)
        messages = () if isinstance(value, str) else tuple(value)
        text = value if isinstance(value, str) else self.chat(value, where)
        data = self.reader.data
        given = row[data.prompt_field] if data.template is None else None
        chat = given if isinstance(given, list) else None
        made = partial(Prompt, text=text, row=row, messages=messages, chat=chat)
        if self.processor is not None and (key := data.images_key):
            processor, read = self.processor, partial(image_bytes, row, key, where, beside)
            if images := read():
                seen = processor.ids(text, images, where)
                return made(token_ids=seen, images=lambda: processor.read(text, read(), where))
        bos = self.tokenizer.bos_token
        add_special = not messages and not (bos and text.startswith(bos))
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special)["input_ids"]
        # Some tokenizers append an end token to every text, after which a response would be empty.
        while add_special and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return made(token_ids=tuple(ids))

    def chat(self, messages: Sequence[Message], where: str) -> str:
        """Return what the template writes, with the opening of the answer. Raises DataError."""
        try:
            return self.renderer.render(messages, generation=True)
        except RenderError as error:
            cure = ""
            if messages[0]["role"] == "system":
                system = text_of(messages[0]["content"]) == self.reader.data.system
                given = "data.system and put its text" if system else "the system message and put its text"
                cure = f"; for example, leave out {given} into the first user message"
            raise DataError(f"{where}: {error}{cure}") from error


def light_renderer(data: DataConfig, model: ModelConfig) -> RowRenderer | None:
    """Return what renders rows with the tokenizer.json of the model's directory; torch is not imported.

    Nor is transformers without a chat template. Raises DataError if the config wants one, and the tokenizer
    has no usable one.
    """
    try:
        if model.chat_template:
            from transformers import PreTrainedTokenizerFast

            tokenizer = model.templated(PreTrainedTokenizerFast.from_pretrained(model.path))
        else:
            tokenizer = FileTokenizer(Path(model.path))
    except Exception:  # noqa: BLE001 - loading the model says what is wrong with its files
        return None
    _require_template(model, tokenizer)
    return RowRenderer(PromptReader(data, bool(model.chat_template)), TemplateRenderer(tokenizer), tokenizer)


@dataclass(slots=True)
class _Part:
    """The rows of one source, or of one set of data.eval, with their prompts."""

    rows: Rows
    render: RowRenderer
    limit: int
    task: int
    origin: DataSource | EvalSet
    # Whether prompts of one text may be different tasks: those of an environment, or with images.
    by_row: bool
    # Index -> number of tokens of the prompts that were rendered at the start.
    lengths: dict[int, int] = field(default_factory=dict)

    def look(self, *, every: bool) -> Iterator[tuple[int, str]]:
        """Render the checked rows, or all until enough are short; yield index and task. Raises DataError."""
        left = self.origin.limit or -1
        for index in range(len(self.rows)) if every else self.rows.checked:
            beat()
            prompt = self.render.prompt(self.rows, index)
            self.lengths[index] = _longer(prompt)
            yield index, f"{prompt.text}{sorted(prompt.row.items())}" if self.by_row else prompt.text
            if not (left := left - (self.lengths[index] <= self.limit)):
                return

    @property
    def long(self) -> list[int]:
        """The rows of those that were looked at whose prompts are above the limit."""
        return [index for index, length in self.lengths.items() if length > self.limit]

    @property
    def complaint(self) -> str:
        """Names the first prompts above the limit; empty if there are none."""
        named = [f"{self.rows.place(index)}: {self.lengths[index]} tokens" for index in self.long]
        shown = [*named[:_SHOWN], "..."] if len(named) > _SHOWN else named
        found = f"{len(named)} of {len(self.lengths)} of {self.rows.source}"
        return f"{found} ({', '.join(shown)})" if named else ""

    def prompt(self, index: int) -> Prompt:
        """Return a prompt, of which at most the last `limit` tokens are left. Raises DataError."""
        beat()
        prompt = self.render.prompt(self.rows, index)
        if _longer(prompt) > self.limit and self.render.reader.data.long_prompts != "truncate":
            by = "" if len(prompt.token_ids) > self.limit else " by algorithm.reference.template"
            found = f"{self.rows.place(index)}: the prompt{by} has {_longer(prompt)} tokens"
            cure = f"allows {self.limit}; raise it, remove the row, or set data.long_prompts"
            raise DataError(f"{found}; sampling.max_prompt_tokens {cure}")
        held_out = index if isinstance(self.origin, EvalSet) else None
        ids, taught = prompt.token_ids[-self.limit :], prompt.teacher_ids[-self.limit :]
        return replace(prompt, token_ids=ids, teacher_ids=taught, task=self.task, held_out=held_out)


def _longer(prompt: Prompt) -> int:
    """Return the number of tokens that policy or teacher reads, whichever is larger."""
    return max(len(prompt.token_ids), len(prompt.teacher_ids))


class PromptSource:
    """The prompt of every ticket, and the held-out prompts."""

    def __init__(
        self,
        data: DataConfig,
        model: ModelConfig,
        sampling: SamplingConfig,
        *,
        seed: int,
        tokenizer: Any = None,
        teacher: str | None = None,
        plays: bool = False,
    ) -> None:
        """Open the rows and look at prompts. Raises DataError that names the unusable rows.

        `tokenizer` takes the place of the policy's, which takes seconds to import, if nothing is decoded.
        `teacher` is the template of what a teacher reads in place of the prompts of data.train. `plays` says
        whether there is an environment.
        """
        self.tokenizer = tokenizer or load_tokenizer(model)
        _require_template(model, self.tokenizer)
        self.renderer = TemplateRenderer(self.tokenizer, () if tokenizer else stop_ids(model))
        processor = ImageProcessor(model) if data.images_key is not None else None
        reader = PromptReader(data, bool(model.chat_template))
        render = RowRenderer(reader, self.renderer, self.tokenizer, processor)
        tasks, sources = [*data.tasks.values()], len(data.train)
        readers = [replace(render, reader=replace(reader, data=data.of(one))) for one in tasks]
        if teacher is not None:
            readers[:sources] = [one.for_teacher(teacher) for one in readers[:sources]]
        loaded = enumerate(zip(load_parts(data, tasks), readers, strict=True))
        limit, self._data = sampling.max_prompt_tokens, data
        by_row = plays or processor is not None
        parts = [_Part(rows, one, limit, task, tasks[task], by_row) for task, (rows, one) in loaded]
        # The parts of data.train, and those of data.eval by the name of the set.
        self._train, self._sets = parts[:sources], dict(zip(data.sets, parts[sources:], strict=True))
        _look(self._train, self._sets, data.long_prompts)
        self._firsts = [*accumulate((len(part.rows) for part in self._train), initial=0)]
        self._plan = make_mixture(data, [len(part.rows) for part in self._train], seed=seed)
        # Lets epochs skip rows, as `UpdateOrder.skipped` of the newest order says.
        self.skip = self._plan.skip

    @classmethod
    def of(cls, config: Config) -> Self:
        """The prompts of a run: learner and generators drop the same rows. Raises DataError."""
        teacher, seed, plays = config.teacher_template, config.run.seed, config.plays
        return cls(config.data, config.model, config.sampling, seed=seed, teacher=teacher, plays=plays)

    @property
    def rows(self) -> list[Rows]:
        """The rows of each source."""
        return [part.rows for part in self._train]

    @property
    def held_out(self) -> list[Rows]:
        """The rows of each set of data.eval."""
        return [part.rows for part in self._sets.values()]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of data.train, as it is used, of those that were looked at."""
        return max(min(length, part.limit) for part in self._train for length in part.lengths.values())

    @cached_property
    def fingerprint(self) -> str:
        """Learner and generators must have read the same data; they compare this."""
        held_out = [rows.fingerprint for rows in self.held_out]
        return fingerprints(fingerprint_of(self._data, self.rows), held_out)

    def __len__(self) -> int:
        """Return the number of rows of data.train."""
        return self._firsts[-1]

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompt of each row of data.train. Raises DataError."""
        return (part.prompt(index) for part in self._train for index in range(len(part.rows)))

    def prompt(self, ticket_id: int) -> Prompt:
        """Return the prompt of training ticket `ticket_id` (from 1). Raises DataError."""
        row = self._plan.row(ticket_id)
        part = bisect_right(self._firsts, row) - 1
        return self._train[part].prompt(row - self._firsts[part])

    def of_task(self, task: int, count: int) -> list[Prompt]:
        """Return the prompts of at most the first `count` rows of a task. Raises DataError."""
        part = [*self._train, *self._sets.values()][task]
        return [part.prompt(index) for index in range(min(count, len(part.rows)))]

    def eval_prompts(self, count: int, name: str = "") -> list[Prompt]:
        """Return the first `count` prompts, or all, of a set of `DataConfig.sets`. Raises DataError."""
        return self.of_task(part.task, count) if (part := self._sets.get(name)) else []

    def decode(self, token_ids: Sequence[int], *, raw: bool = False) -> str:
        """Return the text of response tokens, exactly as sampled, without special tokens, or `raw` with them.

        The stop token at the end is in neither.
        """
        if raw:
            return self.renderer.decode(without_stop(self.renderer, token_ids))
        decode = self.tokenizer.decode
        return str(decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the policy's `transformers` tokenizer. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        return model.templated(AutoTokenizer.from_pretrained(model.path, **model.hub_options))
    except Exception as error:  # tokenizers raises nothing more special
        found = f"model.path {model.path}: no tokenizer could be loaded ({error})"
        raise DataError(f"{found}; give a Hugging Face directory or name") from error


def _require_template(model: ModelConfig, tokenizer: Any) -> None:
    """Raise DataError unless the tokenizer has the chat template that the config asks for."""
    if not model.chat_template:
        return
    found, tool = tokenizer.chat_template, f"the tokenizer in {model.path}"
    if not found:
        raise DataError(f"model.chat_template is true, but {tool} has none; set it to false")
    if isinstance(found, dict) and "default" not in found:
        text = f"{tool} has the chat templates {', '.join(sorted(found))}, of which none is called `default`"
        raise DataError(f"{text}; set model.chat_template to the file of the one to use")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        where = "" if isinstance(model.chat_template, str) else f" true, but that of {tool} is"
        found = f"{str(error.message).rstrip('.')} in its line {error.lineno}"
        raise DataError(f"model.chat_template is{where} not a template: {found}; correct it") from error
    except Exception as error:  # noqa: BLE001 - a template may refuse this message, and rows have others
        log.debug("the chat template refuses a message of the user: %s", error)


def stop_ids(model: ModelConfig) -> list[int]:
    """Return the tokens that end a response by the model's generation config, or by its config, as vLLM."""
    from transformers import GenerationConfig

    read, options = GenerationConfig(), {"revision": model.revision}
    with suppress(DataError):  # loading the model says what is wrong with its config
        read = GenerationConfig.from_model_config(model.architecture())
    with suppress(OSError):  # a model without one
        read = GenerationConfig.from_pretrained(model.path, **options)
    found = read.eos_token_id
    return [found] if isinstance(found, int) else list(found or ())


def vocabulary_size(model: ModelConfig) -> int:
    """Return the number of tokens for which the policy has an embedding. Raises DataError."""
    return int(model.architecture().get_text_config().vocab_size)


def other_tokens(config: Config) -> str | None:
    """Say how the teacher of algorithm.reference reads ids otherwise than the policy; None if it does not.

    Raises DataError if either tokenizer cannot be loaded.
    """
    if config.algorithm.reference is None:
        return None
    theirs, mine = (load_tokenizer(one).get_vocab() for one in (config.reference, config.model))
    cure = "give a teacher of the same tokenizer and vocabulary"
    if unlike := theirs.items() ^ mine.items():
        token, _ = min(unlike, key=lambda item: item[1])
        found = f"the tokenizer of {config.reference.path} has {token!r} as {theirs.get(token)}"
        return f"{found}, and that of {config.model.path} (model.path) as {mine.get(token)}; {cure}"
    if (rows := vocabulary_size(config.reference)) < (allowed := vocabulary_size(config.model)):
        found = f"config.json of {config.reference.path} has vocab_size {rows}"
        return f"{found}, less than {allowed} of {config.model.path} (model.path); {cure}"
    return None


def _look(train: Sequence[_Part], held_out: Mapping[str, _Part], how: str) -> None:
    """Render prompts, and deal with long ones as `data.long_prompts` says. Raises DataError.

    To drop rows, all are rendered: the sample plan needs the number of those that are left.
    """
    every = how == "drop"
    tasks = {hash(task) for part in train for _, task in part.look(every=every)}
    shared = {
        name: [index for index, task in part.look(every=every) if hash(task) in tasks]
        for name, part in held_out.items()
    }
    parts = [*train, *held_out.values()]
    for part in parts:
        if said := taken_answers(part.rows.taken, len(part.lengths)):
            log.info("%s: %s", part.rows.source, said)
    named = "; ".join(filter(None, (part.complaint for part in parts)))
    above = f"are longer than sampling.max_prompt_tokens ({parts[0].limit})"
    if named and how == "refuse":
        longest = max(length for part in parts for length in part.lengths.values())
        cure = f"raise it to {longest}, remove the rows, or set data.long_prompts to drop"
        raise DataError(f"prompts {above}: {named}; {cure}")
    if named:
        done = "their rows are left out" if how == "drop" else "their first tokens are cut off"
        log.warning("prompts %s, so %s: %s", above, done, named)
    for name, indices in shared.items():
        where, rows = f"set {name} of data.eval" if name else "data.eval", held_out[name].rows
        text = "%d of %d prompts in %s also occur in data.train, first %s: the evaluation is not held out"
        if indices:
            log.warning(text, len(indices), len(held_out[name].lengths), where, rows.place(indices[0]))
    for part in parts if how == "drop" else ():
        kept = [index for index, length in part.lengths.items() if length <= part.limit]
        if not kept:
            raise DataError(f"all prompts of {part.rows.source} {above}, so no row is left; raise it")
        part.rows = part.rows.only(kept)
        part.lengths = {at: part.lengths[index] for at, index in enumerate(kept)}


def draw_probe(seed: int, lengths: Sequence[int], vocabulary: int) -> list[tuple[int, ...]]:
    """Draw token sequences of these lengths: random, so that every weight takes part, and always the same."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths]
