"""A reward model in processes of the run: its numbers, its death, and a run without it."""

import asyncio
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.control import scoring
from asyncrl.control.scoring import ScorerService, endpoint_of, serve_scores
from asyncrl.errors import ConfigError, EngineError, RewardError
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.launch import scorer_process
from asyncrl.launch.scorers import scorer_specs, scorers_in
from asyncrl.preflight.reward_trial import try_rewards
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.base import Question, RewardInput, Score, Unanswered
from asyncrl.rewards.opened import Rewards
from asyncrl.run.directory import RunDirectory
from tests.support.command import ASYNCRL
from tests.support.models import SIZES, tiny_qwen2
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# In place of {{}} stands the directory of a test.
ASKED = "{{function: model_judge, params: {{scorer: rm, prompt: {}/judge.jinja}}}}"


def reward_model(directory: Path, labels: int = 1, pad: int = 0) -> Path:
    """A tiny Qwen2 with a random score, and the tokenizer of `tiny_qwen2`."""
    tiny_qwen2(directory)
    plain = json.loads((directory / "config.json").read_text())
    config = Qwen2Config(
        **{"vocab_size": plain["vocab_size"]} | SIZES, num_labels=labels, pad_token_id=pad, eos_token_id=1
    )
    torch.manual_seed(3)
    Qwen2ForSequenceClassification(config).float().save_pretrained(directory)
    return directory


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    values = {
        "run": {"name": "scored", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"functions": [{"function": "model_score", "params": {"scorer": "rm"}}], "timeout_s": 1.0},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 24},
        "learner": {"device": "cpu"},
        "scorers": {"rm": {"model": str(tmp_path / "rm")}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return path


def scores(
    config: Config, directory: Path, *asked: list[list[int]], timeout_s: float = 1.0
) -> list[list[float]]:
    """The rewards of groups of token ids, asked one group after the other."""

    async def run() -> list[list[float]]:
        reward = config.reward.model_copy(update={"timeout_s": timeout_s})
        rewards = Rewards(reward, directory, open_scorer=scorers_in(config, directory))
        await rewards.start()
        try:
            inputs = [
                [RewardInput(prompt="", response="", row={}, token_ids=ids) for ids in group]
                for group in asked
            ]
            found: list[list[Score]] = [await rewards.score(group) for group in inputs]
        finally:
            await rewards.close()
        return [[one.total for one in group] for group in found]

    return asyncio.run(run())


def language_model(directory: Path) -> Path:
    """A tiny Qwen2 whose template ends a chat with `=`, and whose answers have digits."""
    tiny_qwen2(directory, tied=False, seed=4)
    (directory / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}=")
    return directory


def right_words(directory: Path, question: str, most: int) -> str:
    """What transformers says to a question."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer(f"{question}=", return_tensors="pt")["input_ids"]
    said = model.generate(ids, do_sample=False, max_new_tokens=most)[0, ids.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True))


@contextmanager
def supervised(config: Config, directory: RunDirectory) -> Iterator[dict[str, int]]:
    """The scorers of a run; yields their process ids."""
    pids: dict[str, int] = {}
    supervisor = Supervisor(
        scorer_specs(config, directory, config.scorers), max_restarts=3, on_change=pids.update
    )
    watching = threading.Thread(target=supervisor.run)
    watching.start()
    try:
        yield pids
    finally:
        supervisor.request_stop("over")
        watching.join()
        supervisor.stop()


def right_score(directory: Path, ids: list[int]) -> float:
    """What transformers computes of token ids."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits.item())


def test_a_scorer_computes_what_transformers_does_and_is_started_again(config_file, tmp_path):
    reward_model(tmp_path / "rm", pad=1)  # the token that ends an answer, as without one that pads
    config, directory = validated_config(config_file), RunDirectory(tmp_path / "runs" / "scored")
    directory.create(fresh=False)
    directory.config.write_text(config_file.read_text())
    draw = np.random.default_rng(0)
    groups = [[draw.integers(2, 12, size=n).tolist() for n in (1, 5, 31, 32)] for _ in range(2)]
    groups[0] += [[2, 3, 1], [2, 3, 1, 1], [1, 1], [2, 1, 3]]
    right = [[right_score(tmp_path / "rm", ids) for ids in group] for group in groups]
    with supervised(config, directory) as pids:
        (first,) = scores(config, directory.path, groups[0], timeout_s=300.0)
        assert np.abs(np.subtract(first, right[0])).max() <= 1e-5
        before = pids["rm.0"]
        psutil.Process(before).kill()
        # Asked while it is dead: the calls are repeated until it is back.
        (second,) = scores(config, directory.path, groups[1], timeout_s=300.0)
        assert np.abs(np.subtract(second, right[1])).max() <= 1e-5
        wait_until(lambda: pids["rm.0"] != before)
        with pytest.raises(RewardError, match="the scorer `rm` says: vLLM refused a request of 99 tokens"):
            scores(config, directory.path, [[2] * 99], timeout_s=60.0)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_judge_of_the_run_says_what_transformers_does_and_is_started_again(
    config_file, tmp_path, monkeypatch, engine
):
    monkeypatch.setattr(scoring, "WORDS_S", 2.0)
    language_model(tmp_path / "rm")
    (tmp_path / "judge.jinja").write_text("rate {{ response }}")
    params = {"scorer": "rm", "prompt": str(tmp_path / "judge.jinja"), "max_tokens": 40}
    function = {"function": "model_judge", "params": params | {"parse": "regex", "pattern": "([0-9])"}}
    settings = [f"reward.functions={json.dumps([function])}", "scorers.rm.max_tokens=64"]
    config = validated_config(config_file, [*settings, f"generator.engine={engine}"])
    directory = RunDirectory(tmp_path / "runs" / "scored")
    directory.create(fresh=False)
    directory.config.write_text(dump_config(config))

    async def judged(*responses: str) -> list[Score]:
        reward = config.reward.model_copy(update={"timeout_s": 300.0})
        rewards = Rewards(reward, directory.path, open_scorer=scorers_in(config, directory.path))
        await rewards.start()
        try:
            return await rewards.score([RewardInput(prompt="", response=one, row={}) for one in responses])
        finally:
            await rewards.close()

    def are_right(responses: list[str], found: list[Score]) -> None:
        for response, score in zip(responses, found, strict=True):
            (said,) = score.judgements
            assert said.answer == right_words(tmp_path / "rm", f"rate {response}", 40)
            digits = [letter for letter in said.answer if letter.isdigit()]
            assert (said.prompt, score.total) == (f"rate {response}", float(digits[-1]))

    with supervised(config, directory) as pids:
        are_right(["x", "is it"], asyncio.run(judged("x", "is it")))
        before = pids["rm.0"]
        psutil.Process(before).kill()
        are_right(["7"], asyncio.run(judged("7")))
        wait_until(lambda: pids["rm.0"] != before)
        with pytest.raises(RewardError, match="an answer of 40 are more than 64; raise max_tokens"):
            asyncio.run(judged("x" * 30))


def test_reward_test_starts_a_scorer_and_stops_it(config_file, tmp_path):
    reward_model(tmp_path / "rm")
    words, samples = ("2", "3 is", "eleven"), tmp_path / "samples.jsonl"
    rows = [json.dumps({"prompt": "1+1=", "response": word}) + "\n" for word in words]
    samples.write_text("".join(rows))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = [[*tokenizer("1+1=")["input_ids"], *tokenizer(word)["input_ids"], 1] for word in words]
    trial = try_rewards(config_file, ["reward.timeout_s=300"], count=3, samples=samples)
    (part,) = trial.parts
    assert not part.failures and not part.unequal and not trial.unscored
    assert part.scores["sample"] == pytest.approx(
        [right_score(tmp_path / "rm", one) for one in ids], abs=1e-5
    )
    assert not [
        one for one in psutil.Process().children(recursive=True) if "scorer_process" in str(one.cmdline())
    ]


def test_eval_starts_a_scorer_beside_the_engine(config_file, tmp_path):
    reward_model(tmp_path / "rm")
    prompts = ("1+1=", "is it 7 ?")
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    settings = ("generator.engine=transformers", "reward.timeout_s=300", "sampling.max_prompt_tokens=16")
    command = [*ASYNCRL, "eval", str(tmp_path / "model"), str(config_file), *settings]
    command.append(f"data.eval={tmp_path / 'eval.jsonl'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    right = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = policy.generate(ids, do_sample=False, max_new_tokens=24)[0].tolist()
        right.append(right_score(tmp_path / "rm", whole))
    assert json.loads(done.stdout)["eval/reward_mean"] == pytest.approx(np.mean(right), abs=1e-5)


def test_without_a_scorer_the_reward_fails_and_says_why(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "START_S", 0.2)
    reward_model(tmp_path / "rm")
    with pytest.raises(RewardError, match="no scorer `rm` answered within"):
        scores(validated_config(config_file), tmp_path, [[2, 3]])


def test_any_scorer_answers_and_a_lost_call_is_repeated(config_file, tmp_path, monkeypatch):
    """Two scorers, of which one never answers: each call ends at the other one."""
    monkeypatch.setattr(scoring, "ANSWER_S", 0.2)
    reward_model(tmp_path / "rm")
    config = validated_config(config_file, ["scorers.rm.count=2"])
    asked: list[int] = [0, 0]

    async def number(request: Mapping[str, Any]) -> float:
        asked[0] += any(request["ids"])  # not those that look for a scorer
        return float(sum(request["ids"]))

    async def silence(request: Mapping[str, Any]) -> float:
        if not any(request["ids"]):
            return 0.0
        asked[1] += 1
        is_lost.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_scores(endpoint_of(tmp_path, "rm", 1), silence))
            await is_lost.wait()
            tasks.create_task(serve_scores(endpoint_of(tmp_path, "rm", 0), number))

    stop: list = []
    is_lost = asyncio.Event()

    def target() -> None:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(serve())

    serving = threading.Thread(target=target)
    serving.start()
    wait_until(lambda: (tmp_path / "rm.1.sock").exists())
    try:
        found = scores(config, tmp_path, [[2, n] for n in range(3, 9)], timeout_s=60.0)
    finally:
        stop[0]()
        serving.join()
    assert found == [[5.0, 6.0, 7.0, 8.0, 9.0, 10.0]]
    assert asked[0] >= 6 and asked[1] > 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["scorers.rm.model={}/two"], "found Qwen2ForSequenceClassification with 2 labels"),
        (["scorers.rm.model={}/model"], "found Qwen2ForCausalLM"),
        (["scorers.rm.model={}/other"], "another tokenizer than model.path"),
        (["scorers.rm.model={}/nothing"], "found no "),
        (["reward.functions.0.params={{scorer: judge}}"], "asks the scorer `judge`; scorers has rm"),
        (["reward.functions=[3]"], "a section with function"),
        (["reward.functions=[{{function: exact_match}}]"], "no `model_score` and no `model_judge` asks it"),
        ([f"reward.functions=[{ASKED}]"], "no chat template"),
        ([f"reward.functions=[{ASKED},{{{{function: model_score, params: {{{{scorer: rm}}}}}}}}]"], "its own scorer"),
        ([f"reward.functions=[{ASKED}]", "scorers.rm.model={}/judge"], "takes 512 tokens; lower it"),
        ([f"reward.functions=[{ASKED}]", "scorers.rm.max_tokens=512"], "max_tokens of `model_judge` is 512"),
    ],
)  # fmt: skip
def test_what_cannot_score_is_named_before_the_run(config_file, tmp_path, overrides, said):
    reward_model(tmp_path / "rm")
    reward_model(tmp_path / "two", labels=2)
    language_model(tmp_path / "judge")
    (tmp_path / "judge.jinja").write_text("good?")
    tokenizer = json.loads((reward_model(tmp_path / "other") / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = dict(zip(tokenizer["model"]["vocab"], range(99, 0, -1), strict=False))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as error:
        validated_config(config_file, [one.format(tmp_path) for one in overrides])
    assert said in str(error.value), str(error.value)


@pytest.mark.parametrize(("gpus", "width"), [((3,), 1), ((), 2)])
def test_a_judge_with_a_gpu_of_its_own_is_no_wider_than_that(tmp_path, monkeypatch, gpus, width):
    """vLLM refuses more workers than GPUs that it sees; without `gpus` it sees those of the policy, too.

    Its share is that of its seat, and the cache is what this leaves: the config's are of the policy.
    """
    (tmp_path / "judge.jinja").write_text("{{ response }}")
    judge = {"function": "model_judge", "params": {"scorer": "rm", "prompt": f"{tmp_path}/judge.jinja"}}
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "none"},
            "data": {"train": "none.jsonl"},
            "generator": {"tensor_parallel": 2, "gpu_memory_utilization": 0.2, "kv_cache_gib": 3},
            "learner": {"device": "cpu"},
            "scorers": {"rm": {"model": "none", "gpus": gpus}},
            "reward": {"functions": [judge]},
        }
    )
    opened = []

    async def open_engine(model, generator, *_, **__):
        opened.append((generator.tensor_parallel, generator.gpu_memory_utilization, generator.kv_cache_gib))
        raise EngineError("as far as this test goes")

    monkeypatch.setattr(scorer_process, "open_engine", open_engine)
    with pytest.raises(EngineError, match="as far"):
        asyncio.run(scorer_process._score(config, "rm", "ipc://none", 0.85))
    assert opened == [(width, 0.85, None)]


def test_an_error_of_a_scorer_reaches_the_caller(tmp_path):
    async def refuse(request: Mapping[str, Any]) -> float:
        raise EngineError("too long")

    async def run() -> None:
        endpoint = endpoint_of(tmp_path, "rm", 0)
        serving = asyncio.create_task(serve_scores(endpoint, refuse))
        service = ScorerService("rm", tmp_path, 1, call_s=60.0, remembers=True)
        await service.start()
        with pytest.raises(Unanswered, match="the scorer `rm` says: too long") as failure:
            await service.ask(asked(1))
        assert failure.value.reason == "refused" and not failure.value.may_pass
        await service.close()
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(run())


@asynccontextmanager
async def answering(directory: Path, score: scoring.Score) -> AsyncIterator[None]:
    """A scorer within the test; its end is a death without notice."""
    serving = asyncio.create_task(serve_scores(endpoint_of(directory, "rm", 0), score))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def length(request: Mapping[str, Any]) -> float:
    return float(len(request["ids"]))


def asked(*ids: int) -> Question:
    return Question(request={"ids": list(ids)}, read=lambda reply: (reply, ""))


def test_a_call_may_have_megabytes_and_a_larger_one_is_refused_by_the_caller(tmp_path):
    async def run() -> None:
        service = ScorerService("rm", tmp_path, 1, call_s=200.0, remembers=True)
        await service.start()
        async with answering(tmp_path, length):
            # Around 32 KiB, the limit of the learner's socket, and far above.
            for tokens in (6_000, 7_000, 1 << 20):
                assert await service.ask(asked(*[1 << 20] * tokens)) == tokens
            with pytest.raises(Unanswered, match=r"has \d+ bytes, allowed are 16777216; shorten") as failure:
                await service.ask(asked(*[1 << 20] * (1 << 22)))
        assert failure.value.reason == "refused"
        await service.close()

    asyncio.run(run())


def test_a_lost_call_ends_before_its_caller_gives_up_however_often_calls_are_lost(tmp_path, monkeypatch):
    """The time of a call would else end in the wait for a scorer that has died."""
    monkeypatch.setattr(scoring, "ANSWER_S", 0.2)

    async def run() -> None:
        service = ScorerService("rm", tmp_path, 1, call_s=1.0, remembers=True)
        await service.start()
        for within in ("0.2", "0.4", "0.8", "0.9", "0.9"):
            with pytest.raises(Unanswered, match=f"within {within} s") as failure:
                await service.ask(asked(1))
            assert failure.value.may_pass
        await service.close()

    asyncio.run(run())


def test_a_scorer_that_dies_while_it_is_looked_for_is_looked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "ANSWER_S", 0.2)

    async def run() -> None:
        service = ScorerService("rm", tmp_path, 1, call_s=1.0, remembers=True)
        await service.start()
        for _ in range(2):
            is_taken = asyncio.Event()

            async def silence(request: Mapping[str, Any], is_taken: asyncio.Event = is_taken) -> float:
                is_taken.set()
                await asyncio.Event().wait()
                raise AssertionError

            async with answering(tmp_path, silence):
                looking = asyncio.create_task(service.admit(asked(1)))
                await is_taken.wait()
            async with answering(tmp_path, length):
                await looking
                assert await service.ask(asked(1, 2, 3)) == 3.0
            # The caller's own time ends while the scorer is away: the next one waits for it.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await service.ask(asked(1))
        await service.close()

    asyncio.run(run())


def test_a_refused_call_gives_later_ones_no_longer_time(tmp_path, monkeypatch):
    """Only silence does: a refusal is an answer."""
    monkeypatch.setattr(scoring, "ANSWER_S", 0.25)

    async def refuse(request: Mapping[str, Any]) -> float:
        if request["ids"] == [1]:
            raise EngineError("too long")
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        service = ScorerService("rm", tmp_path, 1, call_s=1e6, remembers=True)
        await service.start()
        async with answering(tmp_path, refuse):
            for _ in range(20):
                with pytest.raises(Unanswered, match="too long"):
                    await service.ask(asked(1))
            with pytest.raises(Unanswered, match=r"within 0.25 s"):
                await service.ask(asked(2))
        await service.close()

    asyncio.run(run())


def test_a_fault_in_one_call_fails_this_call_and_a_dead_engine_ends_the_scorer(tmp_path):
    is_dead = False

    async def faulty(request: Mapping[str, Any]) -> float:
        if is_dead or request["ids"] == [1]:
            raise RuntimeError("index out of range")
        return 7.0

    async def run() -> None:
        nonlocal is_dead
        serving = asyncio.create_task(serve_scores(endpoint_of(tmp_path, "rm", 0), faulty))
        service = ScorerService("rm", tmp_path, 1, call_s=60.0, remembers=True)
        await service.start()
        bad = asked(1)
        for _ in range(2):
            with pytest.raises(Unanswered, match="says: RuntimeError: index out of range") as failure:
                await service.ask(bad)
            assert failure.value.reason == "refused"
        assert await service.ask(asked(2)) == 7.0
        is_dead = True
        asking = asyncio.create_task(service.ask(bad))
        await asyncio.wait({serving})
        with pytest.RaisesGroup(RuntimeError):
            serving.result()
        assert not asking.done(), "the successor answers"
        asking.cancel()
        await service.close()

    asyncio.run(run())
