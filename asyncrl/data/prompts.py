"""Prompts: from a dataset row to token ids, and back from ids to text.

Special tokens are added once: by the chat template if there is one, otherwise by the tokenizer, unless the
text already begins with a BOS. All prompts are tokenised at the start, so that one that is too long or empty
stops the run before it begins.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.data_section import DataConfig
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig, SamplingConfig
from asyncrl.data.curriculum import Curricula
from asyncrl.data.dataset import Rows, fingerprint_of, fingerprints, load_rows, load_train
from asyncrl.data.image_processor import ImageProcessor
from asyncrl.data.images import image_bytes
from asyncrl.data.mixture import make_mixture
from asyncrl.data.reader import PromptReader
from asyncrl.data.row_files import Row
from asyncrl.errors import DataError, RenderError
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

    def prompts(self, rows: Rows) -> list[Prompt]:
        """Return the prompt of each row. Raises DataError that names the first row without one."""
        return [self._prompt(row, rows.place(index), rows.directory(index)) for index, row in enumerate(rows)]

    def _prompt(self, row: Row, where: str, beside: Path) -> Prompt:
        value = self.reader.read(row, where)
        messages = () if isinstance(value, str) else tuple(value)
        text = value if isinstance(value, str) else self.chat(value, where)
        if self.processor is not None and (key := self.reader.data.images_key):
            processor, read = self.processor, partial(image_bytes, row, key, where, beside)
            if images := read():
                return Prompt(
                    token_ids=processor.ids(text, images, where),
                    text=text,
                    row=row,
                    messages=messages,
                    images=lambda: processor.read(text, read(), where),
                )
        bos = self.tokenizer.bos_token
        add_special = not messages and not (bos and text.startswith(bos))
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special)["input_ids"]
        # Some tokenizers append an end token to every text, after which a response would be empty.
        while add_special and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return Prompt(token_ids=tuple(ids), text=text, row=row, messages=messages)

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

    Raises DataError if the config wants a chat template, and the tokenizer has no usable one.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model.path)
    except Exception:  # noqa: BLE001 - loading the model says what is wrong with its files
        return None
    require_template(model, tokenizer)
    return RowRenderer(PromptReader(data, model.chat_template), TemplateRenderer(tokenizer), tokenizer)


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
    ) -> None:
        """Load and tokenise all prompts. Raises DataError that names the unusable rows.

        `tokenizer` takes the place of the policy's, which takes seconds to import, if nothing is decoded.
        """
        self.tokenizer = tokenizer or load_tokenizer(model)
        require_template(model, self.tokenizer)
        self.renderer = TemplateRenderer(self.tokenizer, () if tokenizer else stop_ids(model))
        processor = ImageProcessor(model) if data.images_key is not None else None
        reader = PromptReader(data, model.chat_template)
        render = RowRenderer(reader, self.renderer, self.tokenizer, processor)
        readers = [replace(render, reader=replace(reader, data=data.of(one))) for one in data.train]
        parts = [(rows, one.prompts(rows)) for rows, one in zip(load_train(data), readers, strict=True)]
        if data.eval is not None:
            held_out = load_rows(data.eval, data.eval_split)
            parts.append((held_out, render.prompts(held_out)))
        parts = _fitting(parts, data.long_prompts, sampling.max_prompt_tokens)
        # The rows of each source, and the held-out ones.
        self.rows = [rows for rows, _ in parts[: len(readers)]]
        self.held_out = parts[-1][0] if data.eval is not None else None
        self.train = [prompt for _, prompts in parts[: len(readers)] for prompt in prompts]
        held_out_prompts = parts[-1][1] if self.held_out else []
        self._eval = [replace(prompt, held_out=index) for index, prompt in enumerate(held_out_prompts)]
        if self.held_out:
            _warn_of_overlap(self.train, self._eval, self.held_out)
        # Learner and generators must have read the same data; they compare this.
        self.fingerprint = fingerprints(
            fingerprint_of(data, self.rows), self.held_out.fingerprint if self.held_out else None
        )
        self._plan = make_mixture(data, [len(rows) for rows in self.rows], seed=seed)
        # Lets epochs skip rows, as `UpdateOrder.skipped` of the newest order says.
        self.skip = self._plan.skip

    def prompt(self, ticket_id: int) -> Prompt:
        """Return the prompt of training ticket `ticket_id` (from 1)."""
        return self.train[self._plan.row(ticket_id)]

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Return the first `count` held-out prompts, or all if there are fewer."""
        return self._eval[:count]

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

    options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(model.path, **options)
    except (OSError, ValueError) as error:
        found = f"model.path {model.path}: no tokenizer could be loaded ({error})"
        raise DataError(f"{found}; give a Hugging Face directory or name") from error


def require_template(model: ModelConfig, tokenizer: Any) -> None:
    """Raise DataError unless the tokenizer has the chat template that the config asks for."""
    found = tokenizer.chat_template
    if model.chat_template and not found:
        text = f"model.chat_template is true, but the tokenizer of {model.path} has none"
        raise DataError(f"{text}; set it to false")
    if model.chat_template and isinstance(found, dict) and "default" not in found:
        text = f"the tokenizer of {model.path} has the chat templates {', '.join(sorted(found))}"
        cure = "write the one to use to chat_template.jinja in the model's directory"
        raise DataError(f"{text}, of which none is called `default`; {cure}")


def stop_ids(model: ModelConfig) -> list[int]:
    """Return the tokens that end a response by the model's generation config, which vLLM reads too."""
    from transformers import GenerationConfig

    options: dict[str, Any] = {"revision": model.revision}
    try:
        found = GenerationConfig.from_pretrained(model.path, **options).eos_token_id
    except OSError:  # a model without one
        return []
    return [found] if isinstance(found, int) else list(found or ())


def vocabulary_size(model: ModelConfig) -> int:
    """Return the number of tokens for which the policy has an embedding."""
    from transformers import AutoConfig

    options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = AutoConfig.from_pretrained(model.path, **options)
    return int(config.get_text_config().vocab_size)


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


def _fitting(
    parts: Sequence[tuple[Rows, list[Prompt]]], how: str, limit: int
) -> list[tuple[Rows, list[Prompt]]]:
    """Return rows and prompts as `data.long_prompts` says. Raises DataError, also if no row is left."""
    found, fitting = [*map(partial(_too_long, limit=limit), *zip(*parts, strict=True))], []
    named, above = "; ".join(filter(None, found)), f"are longer than sampling.max_prompt_tokens ({limit})"
    if named and how == "refuse":
        longest = max(len(prompt.token_ids) for _, prompts in parts for prompt in prompts)
        cure = f"raise it to {longest}, remove the rows, or set data.long_prompts to drop"
        raise DataError(f"prompts {above}: {named}; {cure}")
    if named:
        done = "their rows are left out" if how == "drop" else "their first tokens are cut off"
        log.warning("prompts %s, so %s: %s", above, done, named)
    for rows, prompts in parts:
        if how == "drop":
            kept = [index for index, prompt in enumerate(prompts) if len(prompt.token_ids) <= limit]
            if not kept:
                raise DataError(f"all prompts of {rows.source} {above}, so no row is left; raise it")
            fitting.append((rows.only(kept), [prompts[index] for index in kept]))
        else:
            cut = [replace(prompt, token_ids=prompt.token_ids[-limit:]) for prompt in prompts]
            fitting.append((rows, cut))
    return fitting


def _too_long(rows: Rows, prompts: Sequence[Prompt], *, limit: int) -> str:
    """Name the first prompts above the limit; return an empty text if there are none."""
    lengths = {index: len(prompt.token_ids) for index, prompt in enumerate(prompts)}
    found = [f"{rows.place(index)}: {length} tokens" for index, length in lengths.items() if length > limit]
    shown = [*found[:_SHOWN], "..."] if len(found) > _SHOWN else found
    return f"{len(found)} of {len(rows)} of {rows.source} ({', '.join(shown)})" if found else ""


def _warn_of_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt], rows: Rows) -> None:
    seen = {prompt.text for prompt in train}
    if shared := [index for index, prompt in enumerate(held_out) if prompt.text in seen]:
        text = (
            "%d of %d prompts in data.eval also occur in data.train, first %s: the evaluation is not held out"
        )
        log.warning(text, len(shared), len(held_out), rows.place(shared[0]))


def open_curricula(config: Config, sizes: Sequence[int], saved: Mapping[str, Any]) -> Curricula | None:
    """Continue the curricula of sources of so many rows from their `saved` state, if the config has one."""
    if config.data.curriculum.floor is None:
        return None
    groups, lag, refills = config.batch.groups, config.staleness.max_lag, config.algorithm.max_refills
    return Curricula(
        make_mixture(config.data, sizes, seed=config.run.seed),
        solved=config.data.curriculum.solved,
        # A step that rejects raises the credit, and so do groups of lost weights that were under way.
        reach=(lag + 1 + refills + lag + 1) * groups,
        window=config.window_groups,
        state=saved,
    )


def draw_probe(seed: int, lengths: Sequence[int], vocabulary: int) -> list[tuple[int, ...]]:
    """Draw token sequences of these lengths: random, so that every weight takes part, and always the same."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths]
