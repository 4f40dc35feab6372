"""The small games of the shipped configs, and the careless pupils that warm up their models."""

import asyncio
import random
import runpy
import sys
from pathlib import Path

import pytest

from asyncrl.addons.endpoint.agent_process import AgentEnvironment
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Answer
from asyncrl.quickstart.games import GUESSES, LARGEST, Calculator, Guess
from examples.pupils import EOS, IGNORED, PUPILS, Size, batches_of_games, careless_sum, make_tokenizer
from tests.support.agent_talks import ScriptedTalk

EXAMPLES = Path(__file__).parents[2] / "examples"
GAMES = {"guess": (Guess, ("secret",)), "calculator": (Calculator, ("answer",))}


def bisected(secret: int) -> float:
    game, low, high, total = Guess(), 0, LARGEST, 0.0
    game.reset(secret)
    while True:
        middle = (low + high) // 2
        said, reward, done = game.step(f"{middle:02}")
        total += reward
        low, high = (low, middle - 1) if said == "<" else (middle + 1, high)
        if done:
            return total


def test_bisection_finds_all_numbers_but_one():
    assert sum(map(bisected, range(LARGEST + 1))) == 31


def test_a_guess_of_another_form_says_nothing_and_costs_a_guess():
    game = Guess()
    game.reset(3)
    assert [game.step(text) for text in ("3", "", "003", "abc", "xx")] == [("?", 0.0, False)] * 4 + [
        ("?", 0.0, True)
    ]


def test_the_calculator_answers_once_and_the_answer_is_compared_as_text():
    game = Calculator()
    game.reset("933")
    assert game.step("?347+586") == ("933>", 0.0, False)
    assert game.step("933") == ("", 1.0, True)
    game.reset("933")
    assert game.step("0933") == ("", 0.0, True)
    game.reset("933")
    game.step("?1+1")
    assert game.step("?347+586") == ("", 0.0, True), "the second question is an answer"


@pytest.mark.parametrize(
    "answers", [["933"], ["0933"], ["?347+586", "933"], ["?1+1", "?347+586"]], ids="-".join
)
def test_the_agent_of_the_calculator_plays_the_same_game(answers):
    """The shipped program, with its client, over the endpoint: the same observations and reward."""
    game, row = Calculator(), {"answer": "933"}
    game.reset(**row)
    steps = [game.step(answer) for answer in answers]
    talk = ScriptedTalk(*[Answer(text=text, tokens=4) for text in answers])
    outcome = asyncio.run(played(talk, row, "347+586="))
    assert [one["text"] for one in talk.asked] == ["347+586=", *(said for said, _, done in steps if not done)]
    assert (outcome.reward, outcome.finish_reason) == (sum(reward for _, reward, _ in steps), "stop")


async def played(talk, row, prompt):
    program = str(EXAMPLES / "calculator_agent.py")
    environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, program)))
    await environment.start()
    try:
        return await environment.play(talk, row, prompt=prompt, seed=0, episode=0)
    finally:
        await environment.close()


@pytest.mark.parametrize("name", GAMES)
def test_pupils_play_whole_legal_games_and_seldom_well(name):
    kind, columns = GAMES[name]
    pupil, draw = PUPILS[name], random.Random(1)
    train, test = pupil.rows(draw)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    total = 0.0
    for _ in range(2000):
        row = draw.choice(train)
        prompt, *texts = pupil.play(row, draw)
        game = kind()
        game.reset(*(row[column] for column in columns))
        ends = [game.step(answer) for answer in texts[::2]]
        assert prompt == row["prompt"] and [said for said, _, _ in ends[:-1]] == texts[1::2]
        assert [done for *_, done in ends] == [False] * (len(ends) - 1) + [True] and len(ends) <= GUESSES
        total += sum(reward for _, reward, _ in ends)
        assert set("".join(texts)) <= set(pupil.characters)
    low, high = {"guess": (0.25, 0.45), "calculator": (0.05, 0.15)}[name]
    assert low < total / 2000 < high


def test_an_adder_asks_as_often_as_it_says_and_otherwise_forgets_carries():
    pupil, draw = PUPILS["calculator"], random.Random(2)
    train, test = pupil.rows(draw)
    assert not any(careless_sum(row["prompt"]) == row["answer"] for row in train + test)
    games = [pupil.play(draw.choice(train), draw) for _ in range(4000)]
    asked = [game for game in games if len(game) == 4]
    assert len(asked) / len(games) == pytest.approx(0.2, abs=0.02)
    assert all(game[1] == careless_sum(game[0]) for game in games if len(game) == 2)
    right = [game for game in asked if game[1] == f"?{game[0][:-1]}"]
    assert len(right) / len(asked) == pytest.approx(0.6 + 0.4 / 9, abs=0.04)


@pytest.mark.parametrize("name", GAMES)
def test_only_the_pupils_answers_and_their_ends_are_trained(name):
    pupil, size = PUPILS[name], Size(batch=64, steps=1)
    tokenizer = make_tokenizer(pupil.characters)
    ((tokens_BT, labels_BT),) = batches_of_games(pupil, pupil.rows(random.Random(0))[0], size)
    for tokens, labels in zip(tokens_BT.tolist(), labels_BT.tolist(), strict=True):
        trained = [label for label in labels if label != IGNORED]
        assert trained == [token for token, label in zip(tokens, labels, strict=True) if label != IGNORED]
        assert trained[-1] == EOS
        text = tokenizer.decode([EOS if token == IGNORED else token for token in labels])
        answers = [piece for piece in text.split("<eos>") if piece]
        assert all(set(answer) <= set("0123456789?+") for answer in answers)


@pytest.mark.parametrize("game", ["sums", *PUPILS])
def test_a_directory_that_holds_something_is_named_with_the_usage(tmp_path, monkeypatch, capsys, game):
    monkeypatch.setattr("sys.argv", ["pupils.py", game, str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "pupils.py"), run_name="__main__")
    found = capsys.readouterr().err
    assert ended.value.code == 2 and "usage: pupils.py " in found
    assert f"error: {tmp_path} exists" in found and "remove it or name another directory" in found
