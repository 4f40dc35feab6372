"""`http_reward` and `llm_judge` against a server on a real socket that fails in every way there is."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.reward_section import TEXT_BYTES, RewardConfig
from asyncrl.errors import MissingLibrary, RewardError
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.rewards.opened import Rewards
from tests.support.judge_server import Asked, Reply, chat, served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

REASONS = ("limited", "unavailable", "refused", "unreadable", "late")


def config(function: str, params: Mapping[str, Any], **settings: Any) -> RewardConfig:
    functions = [{"function": function, "params": params}]
    return RewardConfig.model_validate({"functions": functions, "timeout_s": 20.0} | settings)


def score(rewards: Rewards, *groups: Sequence[str], **row: Any) -> list[list[Score] | RewardError]:
    """Score groups of responses at the same time; in place of a failed group stands its error."""

    async def run() -> list[list[Score] | RewardError]:
        await rewards.start()
        try:
            inputs = [[RewardInput(prompt="p", response=text, row=row) for text in group] for group in groups]
            found = await asyncio.gather(*map(rewards.score, inputs), return_exceptions=True)
        finally:
            await rewards.close()
        for one in found:
            assert isinstance(one, (list, RewardError)), one
        return found  # type: ignore[return-value]

    return asyncio.run(run())


def length(asked: Asked, number: int) -> Reply:
    """A right answer of a reward service."""
    return Reply({"rewards": [float(len(asked.body["completions"][0]))]})


def failures(rewards: Rewards) -> dict[str, int]:
    return {reason: rewards.counts[f"reward_failures_{reason}"] for reason in REASONS}


HUGE = Reply(b'{"rewards": [' + b"1" * (2 << 20) + b"]}")
# Name -> (what the service answers to the response "bad", the reason in metrics, calls of it at three attempts)
FAULTS = {
    "rate limit until long after": (Reply({}, 429, {"retry-after": "600"}), "limited", 1),
    "down until long after": (Reply({}, 503, {"retry-after": "600"}), "unavailable", 1),
    "wrong request": (Reply({"error": "no such model"}, 404), "refused", 1),
    "redirect": (Reply(b"", 302, {"location": "/elsewhere"}), "refused", 1),
    "no JSON": (Reply(b"<html>proxy</html>"), "unreadable", 3),
    "another JSON": (Reply({"score": 0}), "unreadable", 3),
    "no number": (Reply({"rewards": ["0"]}), "unreadable", 3),
    "NaN": (Reply(b'{"rewards": [NaN]}'), "unreadable", 3),
    "infinity": (Reply(b'{"rewards": [-Infinity]}'), "unreadable", 3),
    "two numbers": (Reply({"rewards": [0, 0]}), "unreadable", 3),
    "none": (Reply({"rewards": []}), "unreadable", 3),
    "huge": (HUGE, "unreadable", 3),
    "not UTF-8": (Reply(b'{"rewards": ["\xff\xfe"]}'), "unreadable", 3),
    "deep": (Reply(b"[" * 100_000), "unreadable", 3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_score_is_a_failed_reward_and_never_a_number(name):
    fault, reason, calls = FAULTS[name]
    answer = lambda asked, number: fault if asked.body["completions"] == ["bad"] else length(asked, number)  # noqa: E731
    with served(answer) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}), Path("runs"))
        bad, good = score(rewards, ["good", "bad", "better"], ["other", "one"])
        assert sum(asked.body["completions"] == ["bad"] for asked in server.asked) == calls
    assert isinstance(bad, RewardError) and "reward part `http_reward`" in str(bad)
    # The groups next to it are scored.
    assert isinstance(good, list) and [one.total for one in good] == [5.0, 3.0]
    assert failures(rewards) == dict.fromkeys(REASONS, 0) | {reason: 1}
    assert rewards.counts["reward_retries"] == calls - 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Reply(fault="hang"), "late"),
        (Reply({"rewards": [0]}, fault="drip"), "late"),
        (Reply(fault="drop"), "unavailable"),
        (Reply({}, 500), "unavailable"),
        (Reply({}, 429), "limited"),
    ],
    ids=["hang", "drip", "drop", "500", "429"],
)
def test_what_may_pass_is_asked_again_until_the_time_is_over(fault, reason):
    with served(lambda asked, number: fault) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}, timeout_s=1.5), Path("runs"))
        (failed,) = score(rewards, ["a"])
        calls = len(server.asked)
    assert isinstance(failed, RewardError), failed
    assert failures(rewards) == dict.fromkeys(REASONS, 0) | {reason: 1}
    # The time may end in the pause before a call, or before the server has read the last one.
    assert rewards.counts["reward_calls"] - calls in (0, 1) and calls >= rewards.counts["reward_retries"]
    assert (calls == 1) == (reason == "late")


def test_a_dead_service_fails_the_reward():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        rewards = Rewards(config("http_reward", {"url": url}, timeout_s=1.0), Path("runs"))
        (failed,) = score(rewards, ["a"])
    assert isinstance(failed, RewardError) and "lost the connection" in str(failed)
    assert rewards.counts["reward_failures_unavailable"] == 1


@pytest.mark.parametrize(
    "first", [Reply({}, 429, {"retry-after": "1"}), Reply({}, 500), Reply(b"x"), Reply(fault="drop")]
)
def test_what_passes_is_scored(first):
    with served(lambda asked, number: length(asked, number) if number else first) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}), Path("runs"))
        (found,) = score(rewards, ["abc"], answer="42")
        times = [asked.at_s for asked in server.asked]
        assert server.asked[-1].body == {
            "prompts": ["p"],
            "completions": ["abc"],
            "columns": {"answer": ["42"]},
        }
    assert isinstance(found, list) and found[0].parts == {"http_reward": 3.0} and not found[0].judgements
    assert (rewards.counts["reward_calls"], rewards.counts["reward_retries"]) == (2, 1)
    assert first.status != 429 or times[1] - times[0] >= 1.0


def test_equal_requests_are_sent_once_also_while_they_are_asked():
    with served(length) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}), Path("runs"))
        found = score(rewards, ["a", "a", "bb"], ["bb", "a", "ccc"])
        assert sorted(asked.body["completions"][0] for asked in server.asked) == ["a", "bb", "ccc"]
        apart = Rewards(config("http_reward", {"url": server.url, "cache": False}), Path("runs"))
        score(apart, ["a", "a"])
        assert len(server.asked) == 5
    assert [[one.total for one in group] for group in found] == [[1, 1, 2], [2, 1, 3]]
    assert (rewards.counts["reward_calls"], rewards.counts["reward_cache_hits"]) == (3, 3)


def test_a_failure_is_not_remembered():
    with served(lambda asked, number: length(asked, number) if number else Reply({}, 404)) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}), Path("runs"))

        async def run() -> list[Score]:
            await rewards.start()
            try:
                with pytest.raises(RewardError, match="status 404"):
                    await rewards.score([RewardInput(prompt="p", response="a", row={})])
                return await rewards.score([RewardInput(prompt="p", response="a", row={})])
            finally:
                await rewards.close()

        assert asyncio.run(run())[0].total == 1.0


def test_hundreds_are_asked_at_the_same_time():
    """Nothing is answered before 200 have asked."""
    together = threading.Barrier(200)

    def answer(asked: Asked, number: int) -> Reply:
        if number < together.parties:
            together.wait(60)
        return length(asked, number)

    with served(answer) as server:
        rewards = Rewards(config("http_reward", {"url": server.url}), Path("runs"))
        texts = ["x" * n for n in range(1, 301)]
        (found,) = score(rewards, texts)
    assert isinstance(found, list) and [one.total for one in found] == list(map(len, texts))


def test_parts_of_services_and_of_functions_are_added_up(tmp_path):
    with served(length) as server:
        functions = [
            {"function": "exact_match", "weight": 10.0},
            {"function": "http_reward", "params": {"url": server.url}, "weight": 0.5, "name": "long"},
        ]
        both = RewardConfig.model_validate({"functions": functions})
        (found,) = score(Rewards(both, tmp_path), ["42", "no"], answer="42")
    assert isinstance(found, list)
    assert [(one.total, dict(one.parts), one.answer) for one in found] == [
        (11.0, {"exact_match": 1.0, "long": 2.0}, "42"),
        (1.0, {"exact_match": 0.0, "long": 2.0}, "no"),
    ]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "judge.jinja"
    path.write_text("Rate {{ response }} for {{ prompt }}, knowing {{ answer }}.")
    return path


def judge(url: str, template: Path, **params: Any) -> Rewards:
    return Rewards(
        config("llm_judge", {"url": url, "model": "m", "prompt": str(template)} | params), Path("runs")
    )


@pytest.mark.parametrize(
    ("words", "params", "value"),
    [
        ('Good. {"score": 0.75}', {}, 0.75),
        ('{"score": 3} I was wrong: ```json\n{"why": {"a": 1}, "score": "4"}\n```', {}, 4.0),
        ('{"score": 0.75, "criteria": {"style": {"score": 0.1}}} {"thanks": 1}', {}, 0.75),
        ('{"criteria": [{"score": 0}, {"score": 0.5}], "score": 1} {', {}, 1.0),
        ("{" * 40 + '{"score": 0.25}', {}, 0.25),
        ("[[2]] no, [[7.5]]", {"parse": "regex"}, 7.5),
        ("Score: -3/10", {"parse": "regex", "pattern": r"Score: (-?\d+)"}, -3.0),
        ("seven", {}, None),
        ('{"score": "high"}', {}, None),
        ('{"score": null}', {}, None),
        ('{"score": NaN}', {}, None),
        ('{"score": 1e999}', {}, None),
        ("[[nan]]", {"parse": "regex"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_score_is_found_in_the_words_of_a_judge(template, words, params, value):
    with served(lambda asked, number: chat(words)) as server:
        (found,) = score(judge(server.url, template, **params), ["r"], answer="a")
        asked = server.asked[0]
    question = "Rate r for p, knowing a."
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {"model": "m", "messages": [{"role": "user", "content": question}]}
    if value is None:
        assert isinstance(found, RewardError), found
        return
    assert isinstance(found, list) and found[0].total == value
    (said,) = found[0].judgements
    assert (said.part, said.prompt, said.answer, said.score) == ("llm_judge", question, words, value)


def test_no_more_of_the_words_of_a_judge_is_remembered_than_is_shown(template):
    with served(lambda asked, number: chat("é" * 100_000 + '{"score": 1}')) as server:
        rewards = judge(server.url, template)
        (found,) = score(rewards, ["r"], answer="a")
    assert isinstance(found, list) and found[0].total == 1.0
    assert found[0].judgements[0].answer == "é" * (TEXT_BYTES // 2)
    (asked,) = rewards._askers["llm_judge"]._asked.values()
    assert len(asked.result()[1]) <= TEXT_BYTES


def test_votes_are_asked_separately_and_averaged(template):
    with served(lambda asked, number: chat(json.dumps({"score": [1, 0, 0.5][number % 3]}))) as server:
        rewards = judge(server.url, template, votes=3, request={"temperature": 1, "max_tokens": 9})
        (found,) = score(rewards, ["r", "r"], answer="a")
        assert [asked.body["temperature"] for asked in server.asked] == [1, 1, 1]
    assert isinstance(found, list) and [one.total for one in found] == [0.5, 0.5]
    assert sorted(said.score for said in found[0].judgements) == [0, 0.5, 1]
    assert rewards.counts["reward_cache_hits"] == 3


@pytest.mark.parametrize(
    ("verdict", "both", "one"),
    [
        (lambda first, second: "[[A]]", 0.5, 1.0),  # it prefers a position
        (lambda first, second: "[[A]]" if first == "mine" else "[[B]]", 1.0, 1.0),
        (lambda first, second: "[[0.25]]" if first == "mine" else "[[0.75]]", 0.25, 0.25),
        (lambda first, second: "[[C]]", 0.5, 0.5),
        (lambda first, second: "[[2]]", None, None),
    ],
)  # fmt: skip
def test_a_comparison_is_asked_in_both_orders(tmp_path, verdict, both, one):
    template = tmp_path / "pair.jinja"
    template.write_text("{{ first }}|{{ second }}")

    def answer(asked: Asked, number: int) -> Reply:
        return chat(verdict(*asked.body["messages"][0]["content"].split("|")))

    for orders, expected in ((True, both), (False, one)):
        with served(answer) as server:
            params = {"against": "theirs", "both_orders": orders, "parse": "regex"}
            (found,) = score(judge(server.url, template, **params), ["mine"], theirs="yours")
            shown = {asked.body["messages"][0]["content"] for asked in server.asked}
        assert shown == ({"mine|yours", "yours|mine"} if orders else {"mine|yours"})
        if expected is None:
            assert isinstance(found, RewardError)
        else:
            assert isinstance(found, list) and found[0].total == expected


def test_a_response_that_is_the_other_one_is_half_as_good_as_both(tmp_path):
    template = tmp_path / "pair.jinja"
    template.write_text("{{ first }}|{{ second }}")
    with served(lambda asked, number: chat("[[A]]")) as server:
        one = judge(server.url, template, against="theirs", parse="regex", votes=2)
        (found,) = score(one, ["same"], theirs="same")
        assert isinstance(found, list) and found[0].total == 0.5 and len(server.asked) == 4


def test_the_key_comes_from_its_variable_and_is_in_no_message(template, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-secret\n")  # as a file that an editor has written
    wrong = Reply({"error": "Incorrect API key provided: sk-secret"}, 401)
    with served(lambda asked, number: wrong) as server:
        (found,) = score(judge(server.url, template, key_env="MY_JUDGE_KEY"), ["r"], answer="a")
        assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
        score(judge(server.url, template), ["r"], answer="a")
        assert server.asked[1].headers["authorization"] == "Bearer none"
    assert isinstance(found, RewardError) and "401" in str(found) and "sk-secret" not in str(found)
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-s\u00e9cret")
    with pytest.raises(
        RewardError, match=r"MY_JUDGE_KEY .* has characters that no HTTP header can hold"
    ) as no:
        judge(server.url, template, key_env="MY_JUDGE_KEY")
    assert "cret" not in str(no.value)
    monkeypatch.delenv("MY_JUDGE_KEY")
    with pytest.raises(RewardError, match="MY_JUDGE_KEY"):
        judge(server.url, template, key_env="MY_JUDGE_KEY")


@pytest.mark.parametrize("path", ["/reward", "/reward/", "/"])
def test_a_service_is_asked_at_its_address_and_a_judge_below_it(template, path):
    with served(lambda asked, number: Reply({"rewards": [1.0]})) as server:
        url = server.url.removesuffix("/v1") + path
        score(Rewards(config("http_reward", {"url": url}), Path("runs")), ["r"])
        score(judge(url, template), ["r"], answer="a")
    assert server.asked[0].path == path
    assert server.asked[-1].path == path.rstrip("/") + "/chat/completions"


@pytest.mark.parametrize(
    ("function", "limit"),
    [
        ("http_reward", {"requests_per_minute": 60}),
        ("llm_judge", {"requests_per_minute": 60}),
        ("llm_judge", {"tokens_per_minute": 600}),
    ],
)
def test_a_limit_per_minute_delays_and_does_not_fail(template, function, limit):
    """The first minute's worth may go out together, then one request a second: the 62nd 2 s after the start."""
    is_judge = function == "llm_judge"
    with served(lambda asked, number: chat('{"score": 1}') if is_judge else length(asked, number)) as server:
        own = {"model": "m", "prompt": str(template)} if is_judge else {}
        rewards = Rewards(config(function, {"url": server.url} | own | limit), Path("runs"))
        start_s = time.monotonic()
        (found,) = score(rewards, [f"{n:20}" for n in range(62)], answer="a")
        times = [asked.at_s for asked in server.asked]
    assert isinstance(found, list) and len(times) == 62
    assert max(times) - start_s >= 1.9


def test_only_a_limit_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiolimiter", None)
    with served(length) as server:
        (found,) = score(Rewards(config("http_reward", {"url": server.url}), Path("runs")), ["abc"])
        assert isinstance(found, list) and found[0].total == 3
        limited = config("http_reward", {"url": server.url, "requests_per_minute": 60})
        with pytest.raises(MissingLibrary, match=r"aiolimiter.*asyncrl\[judge\]"):
            score(Rewards(limited, Path("runs")), ["abc"])


def test_a_row_that_the_template_cannot_take_is_named(template):
    with served(lambda asked, number: chat('{"score": 1}')) as server:
        (found,) = score(judge(server.url, template), ["r"])
        assert isinstance(found, RewardError) and "'answer' is undefined" in str(found)
        assert not server.asked
