"""`asyncrl reward test`: tries the reward functions of a config on its data, in the processes of a run.

Each function is tried alone, and on one response at a time: times are its own, and failures are separate. One
that is called for groups gets all responses to a prompt, because it may compare them.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import local_files, unusable
from asyncrl.config.reward_section import ModelScore, RewardFunctionConfig
from asyncrl.config.schema import Config
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.prompts import PromptSource, RowRenderer, light_renderer, load_tokenizer
from asyncrl.errors import DataError, RewardError
from asyncrl.launch.scorers import scorers_in, started_scorers
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards import opened as scoring
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.rewards.forms import EPISODE_COLUMNS, ground_truth
from asyncrl.rewards.opened import Rewards
from asyncrl.run.directory import RunDirectory
from asyncrl.types import Prompt

# Columns that may hold the reference answer; the first one that a row has counts.
REFERENCES = ("answer", "solution", "reference", "ground_truth", "target", "completion", "output")
# Responses of a model early in training: nothing, nonsense, other alphabets, no end.
_SHORT = ("", "I do not know.", "0", "-1 1,000 3.14 1e400 ####", "\\boxed{} </think> ```")
WRONG = (*_SHORT, "答案 \U0001f600 \x00 \u202e", "no " * 2000)
PRINTED_S = 0.05  # output arrives apart from the answers
REPEATED = 8  # calls that are made a second time
TIMEOUTS = 3  # a function that hung this often is not tried further


@dataclass(frozen=True, slots=True)
class Case:
    """One response to be scored."""

    kind: str  # reference | wrong | sample
    given: RewardInput
    task: int = 0  # as in `Prompt`


@dataclass(slots=True)
class Tried:
    """The results of one reward function."""

    function: RewardFunctionConfig
    scores: dict[str, list[float]] = field(default_factory=dict)  # by kind of response
    answers: list[str | None] = field(default_factory=list)  # `Rollout.answer` of each scored response
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    abstained: set[int] = field(default_factory=set)  # places of the cases for which it returned None
    untried: int = 0
    unequal: str = ""  # two scores of one response, if they differ
    printed: str = ""  # the end of what the function printed


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of all reward functions."""

    cases: Sequence[Case]
    parts: Sequence[Tried]
    unscored: int  # responses for which every function abstained, and nothing else scores them


def try_rewards(config_path: Path, overrides: Sequence[str], *, count: int, samples: Path | None) -> Trial:
    """Score `count` responses from `samples`, or else answers to `count` prompts. Raises DataError."""
    config = validated_config(config_path, overrides, asks_hub=True)
    cases = list(sample_cases(config, samples, count) if samples else generic_cases(config, count))
    if not cases:
        raise DataError(f"{samples or 'data.train'} holds no response to score; give another --samples")
    tasks, scored, parts, unscored = [*config.data.tasks.items()], dict[str, list[Case]](), list[Tried](), 0
    for case in cases:
        scored.setdefault(" ".join(config.functions_of(tasks[case.task][0])), []).append(case)
    with started_scorers(config) as directory:
        for keys, some in scored.items():
            functions = [config.reward_functions[key] for key in keys.split()]
            tried = [asyncio.run(_try_part(config, function, some, directory)) for function in functions]
            if not config.of(tasks[some[0].task][1]).environment.is_used:
                unscored += len(set.intersection(*(part.abstained for part in tried)))
            parts += tried
    return Trial(cases, parts, unscored)


def generic_cases(config: Config, count: int) -> Iterator[Case]:
    """Yield wrong answers to the first `count` prompts of the run, and the data's reference answers.

    Functions of tasks that have none of these prompts get the first ones of their own.
    """
    source = _prompts(config)
    prompts = [source.prompt(ticket) for ticket in range(1, min(count, len(source)) + 1)]
    tried = {prompt.task for prompt in prompts}
    for task, one in enumerate(config.data.tasks.values()):
        prompts += source.of_task(task, count) if one.reward and task not in tried else []
    for prompt in prompts:
        named = (prompt.row[name] for name in REFERENCES if name in prompt.row)
        reference = next(named, ground_truth(prompt.row))
        point = ".0" if isinstance(reference, float) else ""  # which `rewards.builtin.known` leaves out
        right = [("reference", str(reference).removesuffix(point))] if reference is not None else []
        for kind, text in (*right, *(("wrong", text) for text in WRONG)):
            tokens = _sampled(source.tokenizer, text)
            given = RewardInput(
                prompt=prompt.text, response=text, row=prompt.row, chat=prompt.chat, response_tokens=tokens
            )
            yield Case(kind, replace(given, played=_played(config, prompt, text)), prompt.task)


def _played(config: Config, prompt: Prompt | None, response: str) -> dict[str, Any]:
    """Return the columns of an episode of one answer, for which an environment gave 0; none without it."""
    if prompt is None or not [*config.tasks.values()][prompt.task].environment.is_used:
        return {}
    asked = prompt.messages or ({"role": "user", "content": prompt.text},)
    said = [*asked, {"role": "assistant", "content": response}]
    return dict(zip(EPISODE_COLUMNS, (said, 1, {"reward": 0.0, "parts": {}, "metrics": {}}), strict=True))


def _sampled(tokenizer: Any, response: str) -> int:
    """Return how many tokens a policy samples for a response, with the one that ends it."""
    return len(tokenizer(response, add_special_tokens=False)["input_ids"]) + 1


def _prompts(config: Config) -> PromptSource:
    """Return the prompts of the run. Torch is imported only if one may be too long. Raises DataError."""
    data, model, sampling, seed = config.data, config.model, config.sampling, config.run.seed
    is_light = (Path(model.path) / "tokenizer.json").is_file() and not model.trust_remote_code
    is_light = is_light and data.images_key is None and data.long_prompts == "refuse"
    if is_light and (render := light_renderer(data, model)):
        # The policy's own tokenizer may add a token, so it judges prompts that reach the limit.
        lower = sampling.model_copy(update={"max_prompt_tokens": sampling.max_prompt_tokens - 1})
        with contextlib.suppress(DataError):
            tokenizer, plays = render.tokenizer, config.plays
            return PromptSource(data, model, lower, seed=seed, tokenizer=tokenizer, plays=plays)
    return PromptSource.of(config)


def sample_cases(config: Config, path: Path, count: int) -> Iterator[Case]:
    """Yield the newest `count` responses of a run directory, or the first of a file (`response`)."""
    path = path if path.exists() or not (runs := Path("runs", path)).exists() else runs
    if not (path.is_dir() or local_files(str(path))):
        raise DataError(f"--samples: {unusable(str(path))}; give a run directory or a file of responses")
    finder = _PromptFinder(config) if path.is_dir() else None
    opened = finder.source if finder else light_renderer(config.data, config.model)
    tokenizer = opened.tokenizer if opened else load_tokenizer(config.model)
    records = load_rows(str(RunDirectory(path).samples if finder else path))
    places = range(len(records))[:: -1 if finder else 1]
    # The record of a ticket that died has no versions, because it has no response.
    sampled = ((index, one) for index in places if (one := records[index]).get("versions") != [])
    # A run that goes on appends to its samples, and then no more rows can be read.
    for index, record in sorted(islice(sampled, count)):
        if not isinstance(record.get("response"), str):
            place = records.place(index)
            raise DataError(f"{place}: no text in column `response`; it has {', '.join(record)}")
        found = finder.prompt(record) if finder else None
        row, task = (found.row, found.task) if found else (record, 0)
        prompt = record.get("prompt") or record.get(config.data.prompt_field) or ""
        chat = found.chat if found else prompt if isinstance(prompt, list) else None
        # Functions get what the template writes, as in a run; a file may lack columns that the data has.
        if chat and isinstance(opened, RowRenderer) and opened.reader.chat_template:
            with contextlib.suppress(DataError):
                prompt = opened.prompt(Rows([{**record, config.data.prompt_field: chat}], ""), 0).text
        truncated = (record.get("finish_reason") or "stop") != "stop"
        text = record["response"]
        if _played(config, found, text):  # a run scores the last answer, before which `reports` writes a mark
            text = text.rpartition("\n[model] ")[2]
        tokens = sum(count for _, count in record.get("versions") or ()) or _sampled(tokenizer, text)
        given = RewardInput(
            prompt=str(prompt), response=text, row=row, chat=chat, truncated=truncated, response_tokens=tokens
        )
        yield Case("sample", replace(given, played=_played(config, found, text)), task)


class _PromptFinder:
    """Finds the prompt of the data from which a recorded rollout was sampled."""

    def __init__(self, config: Config) -> None:
        self.source = _prompts(config)
        self._has_curriculum = config.data.curriculum.floor is not None
        sets = config.data.sets.items()
        self._eval = {name: self.source.eval_prompts(config.of(one).eval.prompts, name) for name, one in sets}

    def prompt(self, record: Mapping[str, Any]) -> Prompt:
        name, number = record.get("eval_set", ""), int(record.get("prompt_number", 0))
        if record.get("kind") == "eval" or number:
            found = self._eval.get(name, [])
            if 0 < number <= len(found):
                return found[number - 1]
            text = f"--samples: found one of held-out prompt {number} in the set `{name}`, which has"
            raise DataError(f"{text} {len(found)} in this config; give data.eval and eval.prompts of its run")
        if self._has_curriculum:
            text = "data.curriculum.floor: it decides during the run which row a sample was made from"
            raise DataError(f"{text}; give --samples a file of responses, with the columns of their rows")
        return self.source.prompt(int(record["ticket_id"]))


async def _try_part(
    config: Config, function: RewardFunctionConfig, cases: Sequence[Case], directory: Path
) -> Tried:
    alone = config.reward.model_copy(update={"functions": (function,), "workers": 1})
    if isinstance(function.remote, ModelScore):
        cases = [*_with_ids(config, cases)]
    rewards = Rewards(alone, config.run.root, open_scorer=scorers_in(config, directory))
    tried, timeouts, made = Tried(function), 0, list[tuple[list[RewardInput], list[Score]]]()
    try:
        await rewards.start()
        calls = groupby(enumerate(cases), lambda one: (rewards.most != 1 and one[1].given.prompt) or one[0])
        for call in ([*pairs] for _, pairs in calls):
            inputs, started_s = [case.given for _, case in call], time.perf_counter()
            try:
                made.append((inputs, await rewards.score(inputs)))
            except RewardError as error:
                tried.failures[f"{'/'.join(dict.fromkeys(case.kind for _, case in call))}: {error}"] += 1
                timeouts += "took longer than" in str(error)
            else:
                for (index, case), score in zip(call, made[-1][1], strict=True):
                    if score.parts:
                        tried.scores.setdefault(case.kind, []).append(score.parts[function.part])
                        tried.answers.append(score.answer)
                    else:
                        tried.abstained.add(index)
            wait_s = scoring.WAIT_S * (rewards.most > 1)
            tried.seconds.append(max(0.0, time.perf_counter() - started_s - wait_s))
            if timeouts == TIMEOUTS:
                tried.untried = len(cases) - call[-1][0] - 1
                break
        if not tried.failures:
            tried.unequal = await _unequal(rewards, made[:REPEATED])
    finally:
        await asyncio.sleep(0.0 if tried.failures else PRINTED_S)
        tried.printed = rewards.printed
        await rewards.close()
    return tried


def _with_ids(config: Config, cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases with the token ids of prompt and response, cut off as those of a run are."""
    tokenizer, most = load_tokenizer(config.model), config.sampling
    for case in cases:
        given = case.given
        prompt = tokenizer(given.prompt, add_special_tokens=not config.model.chat_template)["input_ids"]
        response = tokenizer(given.response, add_special_tokens=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            response.append(tokenizer.eos_token_id)
        ids = [*prompt[-most.max_prompt_tokens :], *response[: most.max_response_tokens]]
        yield replace(case, given=replace(given, token_ids=ids))


async def _unequal(rewards: Rewards, made: Sequence[tuple[list[RewardInput], list[Score]]]) -> str:
    """Call again, and return the first two scores of a response that differ; empty if none do."""
    for inputs, scores in made:
        try:
            again = await rewards.score(inputs)
        except RewardError as error:
            return f"a score, and then an error: {error}"
        for pair in zip(scores, again, strict=True):
            if pair[0].parts != pair[1].parts:
                return " and ".join("".join(map("{:g}".format, one.parts.values())) or "none" for one in pair)
    return ""
