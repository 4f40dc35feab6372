"""Episodes over an engine whose every probability is known: what is recorded, and what ends, fails or counts."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.algo.trainable import GroupLimits, trainable
from asyncrl.algo.turn_advantages import gigpo
from asyncrl.batch.estimate import Estimator
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.registry import OF_TURNS
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler, group_seed, require_same_start
from asyncrl.engine.fake import EOS, FakeEngine, logits_of, logprobs_of
from asyncrl.environments.base import Answer, BudgetSpent, Outcome
from asyncrl.environments.loops import Conversation, play_text
from asyncrl.errors import ConfigError, EngineError, EnvironmentFault, RewardError
from asyncrl.launch.players import Players
from asyncrl.lineage import Weights
from asyncrl.rewards.base import Score
from asyncrl.types import Prompt
from asyncrl.wire.group_frames import decode_group, encode_group
from tests.support.letters import Letters, read, text_of
from tests.support.task_config import config_of
from tests.support.waiting import elapse, in_virtual_time, until

LIMITS = GroupLimits(vocabulary=16, rollouts=3, max_tokens=200)
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=150)
PROMPT = Prompt(token_ids=(1, 2), text="ab", row={"goal": "abc"})


class Played:
    """An environment whose `play` is a function."""

    def __init__(self, play):
        self.play_once, self.calls = play, []

    async def start(self): ...

    async def close(self): ...

    async def play(self, talk, row, *, prompt, seed, episode):
        self.calls.append((seed, episode, row, prompt))
        return await self.play_once(talk, episode)


class Lengths:
    """Scores the number of turns, and keeps what it was given."""

    def __init__(self):
        self.given = []

    async def score(self, inputs):
        self.given += inputs
        return [
            Score(total=2.0 * one.played["turns"], parts={"turns": one.played["turns"]}) for one in inputs
        ]


def sampler(play, engine=None, scorer=None, most_missing=0, **config):
    environment = Played(play)
    made = EpisodeSampler(
        engine or FakeEngine(),
        scorer,
        environment,
        EnvironmentConfig.model_validate({"uses": "e.py:E"} | config),
        renderer=Letters(),
        read=read,
        max_prompt_tokens=50,
        generator_id="g0",
        seed=7,
        most_missing=most_missing,
    )
    return made, environment


async def three_turns(talk, episode):
    texts = ["ab", "cd", "efg"]
    for text in texts:
        await talk.complete(text)
        talk.score_turn(0.5, 9)
    return Outcome(finish_reason="stop", reward=1.5, metrics={"own": episode})


def group_of(made, **more):
    return in_virtual_time(made.group(PROMPT, 5, LIMITS, SPEC, **more))


def test_episodes_count_until_the_last_of_their_group_has_ended():
    """They keep their place until then, so `engine.duty.Duty` sees them as waiting."""
    seen = []

    async def play(talk, episode):
        if episode == 1:  # as a slow environment
            await elapse(0.05)
        await talk.complete("ab")
        seen.append(made.clock.episodes)
        return Outcome(finish_reason="stop", reward=1.0)

    made, _ = sampler(play)
    group_of(made)
    assert seen == [LIMITS.rollouts] * LIMITS.rollouts and made.clock.episodes == 0


def test_a_group_has_the_sampled_tokens_as_actions_and_what_was_said_between_them_as_context():
    scorer = Lengths()
    made, _ = sampler(three_turns, scorer=scorer, weight=10.0)
    group = group_of(made)
    assert group.episode_of is None and group.episodes == 3 and trainable(group, LIMITS) is None
    for rollout in group.rollouts:
        assert rollout.prompt_ids.tolist() == [1, 2]
        pieces, start = [], 0
        for end in rollout.turns.ends:
            pieces.append(rollout.response_ids[start:end].tolist())
            start = end
        assert pieces[1][:2] == [3, 4] and pieces[2][:3] == [5, 6, 7]
        context = np.zeros(len(rollout.response_ids), bool)
        for end, given in zip(rollout.turns.ends[:-1], (2, 3), strict=True):
            context[end : end + given] = True
        np.testing.assert_array_equal(rollout.action_mask, ~context)
        expected = logprobs_of(logits_of(0))[rollout.response_ids] * ~context
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=1e-6)
        # Rewards of turns are a part of the episode's reward, in which the environment's has the weight 10.
        assert rollout.turns.rewards.tolist() == [5.0] * 3 and rollout.turns.states.tolist() == [9] * 3
        assert rollout.reward == 2 * 3 + 10 * 1.5
        assert rollout.reward_parts == {"turns": 3, "environment": 1.5} and rollout.finish_reason == "stop"
    assert group.episode_metrics["own"].tolist() == [0, 1, 2]
    assert group.episode_metrics["turns"].tolist() == [3, 3, 3]
    assert group.episode_metrics["replays"].tolist() == [0, 0, 0]
    last = text_of(group.rollouts[0].response_ids[group.rollouts[0].turns.ends[1] + 3 :].tolist())
    given = scorer.given[0]
    assert (
        given.response == last
        and [one["role"] for one in given.played["messages"]] == ["user", "assistant"] * 3
    )
    assert (raw := given.raw_response()).rstrip("!") == last and not raw.endswith("!")
    assert given.row["goal"] == "abc" and given.played["result"]["reward"] == 1.5 and not given.truncated
    assert encode_group(decode_group(encode_group(group))) == encode_group(group)


def test_if_all_functions_abstain_the_environments_own_reward_counts_or_the_reward_has_failed():
    class Abstaining:
        async def score(self, inputs):
            return [Score(total=0.0, parts={}) for _ in inputs]

    async def unscored(talk, episode):
        await talk.complete("ab")
        return Outcome(finish_reason="stop")

    group = group_of(sampler(three_turns, scorer=Abstaining())[0])
    assert [(one.reward, one.reward_parts) for one in group.rollouts] == [(1.5, {"environment": 1.5})] * 3
    with pytest.raises(RewardError, match="every reward function returned None"):
        group_of(sampler(unscored, scorer=Abstaining())[0])


def test_text_of_the_environment_before_the_first_answer_is_broken_and_the_datasets_is_not(monkeypatch):
    """The model has no chat template; "gh" is the text of a special token, and a blank is the letter o."""
    encode = Letters.encode
    monkeypatch.setattr(Letters, "special_texts", frozenset({"gh"}))
    monkeypatch.setattr(Letters, "encode", lambda self, text, **more: encode(self, text.replace(" ", "o")))

    async def play(talk, episode):
        await talk.complete("agh" + "cgh")
        return Outcome(finish_reason="stop", reward=1.0)

    prompt = replace(PROMPT, text="agh")
    group = in_virtual_time(sampler(play)[0].group(prompt, 5, LIMITS, SPEC))
    assert text_of(group.rollouts[0].prompt_ids.tolist()) == "agh" + "cgoh"
    assert group.episode_metrics["chat/broken_specials"].tolist() == [1, 1, 1]


def test_the_time_of_an_episode_is_the_models_or_the_environments():
    async def play(talk, episode):
        await elapse(0.1)
        await talk.complete("ab")
        return Outcome(finish_reason="stop", reward=1.0)

    token_s = 0.01
    made, _ = sampler(play, FakeEngine(token_s=token_s))
    group = in_virtual_time(made.group(PROMPT, 5, LIMITS, replace(SPEC, max_response_tokens=8)))
    model_s, environment_s = (group.episode_metrics[name] for name in ("model_s", "environment_s"))
    sampled = np.array([one.actions for one in group.rollouts])
    assert (model_s > token_s * sampled * 0.99).all() and (environment_s > 0.099).all()
    assert (model_s + environment_s <= group.sampling_s + 1e-3).all()


def test_episodes_of_a_group_share_a_seed_and_other_tickets_and_runs_have_others():
    made, environment = sampler(three_turns)
    group_of(made)
    assert {seed for seed, *_ in environment.calls} == {group_seed(7, 5)}
    assert sorted(episode for _, episode, *_ in environment.calls) == [0, 1, 2]
    seeds = {group_seed(run, ticket) for run in range(20) for ticket in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)


def test_episodes_of_a_held_out_row_begin_alike_in_every_evaluation():
    """Each round has tickets of its own."""
    made, environment = sampler(three_turns)
    rows = [replace(PROMPT, held_out=index) for index in range(3)]
    seeds = []
    for round_ in range(2):
        for row in rows:
            environment.calls.clear()
            asyncio.run(made.group(row, 1 + 3 * round_ + row.held_out, LIMITS, SPEC))
            seeds.append({seed for seed, *_ in environment.calls})
    assert seeds[:3] == seeds[3:] and len(set.union(*seeds)) == 3
    assert not set.union(*seeds) & {group_seed(7, ticket) for ticket in range(100)}


def test_a_greedy_episode_is_played_for_its_reward_only():
    async def play(talk, episode):
        answer = await talk.complete("ab")
        return Outcome(finish_reason=answer.finish_reason, reward=float(answer.tokens))

    made, _ = sampler(play)
    group = group_of(made, greedy=True)
    best = int(logits_of(0).argmax())
    assert group.greedy_reward == (1.0 if best == EOS else SPEC.max_response_tokens)
    assert group.episodes == 3


def test_samples_of_an_evaluation_cut_off_no_episode_of_training(tmp_path):
    async def play(talk, episode):
        for text in "abcdef":
            await talk.chat([{"role": "user", "content": text}], max_tokens=1)
        return Outcome(finish_reason="stop", reward=1.0)

    config = config_of(
        model={"path": "m"},
        environment={"uses": "game.py:Guess"},
        eval={"samples": 1024, "temperature": 1.0},
    )
    prompts = SimpleNamespace(tokenizer=None, renderer=Letters())
    made = Players.of(config, tmp_path).sampler(FakeEngine(), prompts, "g0")
    made.environment, made.scorer, made.read = Played(play), None, read
    group = group_of(made)
    assert len(group.rollouts) == 6 * LIMITS.rollouts
    assert {one.finish_reason for one in group.rollouts} == {"stop"}


def test_conversations_of_one_episode_are_its_sequences_and_have_its_reward():
    async def play(talk, episode):
        answer = await talk.chat([{"role": "user", "content": "ab"}])
        if episode == 1:
            await talk.chat([{"role": "user", "content": "cc"}])  # another conversation
            opening = [{"role": "user", "content": "ab"}, answer.message]
            await talk.chat([*opening, {"role": "user", "content": "d"}])
            await talk.chat([*opening, {"role": "user", "content": "e"}])  # a branch
        return Outcome(finish_reason="stop", reward=float(episode))

    made, _ = sampler(play)
    group = group_of(made)
    assert group.episode_of.tolist() == [0, 1, 1, 1, 2] and group.episodes == 3
    assert [one.reward for one in group.rollouts] == [0, 1, 1, 1, 2]
    # Means over episodes need the zeros.
    assert group.episode_metrics["chat/branches"].tolist() == [0, 1, 0]
    assert group.episode_metrics["chat/roots"].tolist() == [1, 2, 1]
    assert group.episode_metrics["chat/rendered"].tolist() == [0, 0, 0]
    assert trainable(group, LIMITS) is None


@pytest.mark.parametrize(
    ("config", "tokens", "finish"),
    [({"max_turns": 2}, 150, "turns"), ({"max_turns": 99}, 20, "length")],
)
def test_a_spent_budget_ends_the_episode_which_is_scored(config, tokens, finish):
    async def play(talk, episode):
        turns = 0
        try:
            while True:
                await talk.complete("abc")
                turns += 1
        except BudgetSpent as spent:
            return Outcome(finish_reason=spent.finish_reason, reward=float(turns))

    scorer = Lengths()
    made, _ = sampler(play, scorer=scorer, **config)
    spec = SamplingSpec(temperature=1.0, max_response_tokens=tokens)
    group = asyncio.run(made.group(PROMPT, 1, LIMITS, spec))
    for rollout in group.rollouts:
        assert rollout.finish_reason == finish and len(rollout.response_ids) <= tokens
        assert rollout.reward_parts["environment"] == rollout.reward_parts["turns"] >= 1
    assert all(given.truncated for given in scorer.given)
    if finish == "turns":
        assert all(len(rollout.turns.ends) == 2 for rollout in group.rollouts)


@pytest.mark.parametrize("how", ["one by one", "branches", "together", "branches together"])
def test_an_episode_has_at_most_the_sequences_that_a_learner_takes(how):
    """Without the limit the learner would refuse the group, and the ticket would fail again and again."""

    async def play(talk, episode):
        opening = [{"role": "user", "content": "ab"}]
        first = await talk.chat(opening, max_tokens=1)
        if how.startswith("branches"):
            opening += [first.message]
        messages = [*opening, {"role": "user", "content": "c"}]
        chats = [talk.chat(messages, max_tokens=1) for _ in range(300)]
        if "together" in how:
            said = await asyncio.gather(*chats, return_exceptions=True)
            spent = next((one for one in said if isinstance(one, BudgetSpent)), None)
            assert all(isinstance(one, Answer | BudgetSpent) for one in said)
            return Outcome(finish_reason=spent.finish_reason, reward=1.0)
        finish = "stop"
        for chat in chats:
            try:
                await chat
            except BudgetSpent as spent:
                finish = spent.finish_reason
        return Outcome(finish_reason=finish, reward=1.0)

    limits = GroupLimits(vocabulary=16, rollouts=1, max_tokens=20_000)
    made, _ = sampler(play, max_turns=1000)
    spec = SamplingSpec(temperature=1.0, max_response_tokens=10_000)
    made._max_prompt_tokens = 10_000
    group = asyncio.run(made.group(PROMPT, 1, limits, spec))
    assert trainable(decode_group(encode_group(group)), limits) is None
    assert {one.finish_reason for one in group.rollouts} == {"sequences"}
    assert len(group.rollouts) == 256


def test_a_first_prompt_that_is_too_long_is_the_environments_fault():
    async def play(talk, episode):
        await talk.complete("a" * 51)

    made, _ = sampler(play, replays=0)
    with pytest.raises(RewardError, match=r"51 tokens; sampling\.max_prompt_tokens allows 50"):
        group_of(made)


def test_at_the_deadline_the_turn_is_aborted_and_the_environment_may_still_score():
    async def play(talk, episode):
        try:
            while True:
                await talk.complete("ab")
        except BudgetSpent as spent:
            return Outcome(finish_reason=spent.finish_reason, reward=4.0)

    engine = FakeEngine(token_s=0.005)
    made, _ = sampler(play, engine, episode_s=0.5, max_turns=1000)
    group = asyncio.run(made.group(PROMPT, 1, LIMITS, SamplingSpec(temperature=1.0, max_response_tokens=149)))
    assert {one.finish_reason for one in group.rollouts} <= {"time", "length"}
    assert all(one.reward == 4.0 for one in group.rollouts) and engine.stats().running_requests == 0


def test_an_environment_that_does_not_end_is_killed_and_its_episode_scored_by_functions_or_a_fault():
    ended = []

    async def play(talk, episode):
        await talk.complete("ab")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(episode)

    made, _ = sampler(play, scorer=Lengths(), episode_s=0.1, step_s=0.05)
    group = group_of(made)
    assert {one.finish_reason for one in group.rollouts} == {"time"} and sorted(ended) == [0, 1, 2]
    assert all(one.reward_parts == {"turns": 1} for one in group.rollouts)
    made, _ = sampler(play, episode_s=0.1, step_s=0.05, replays=0)
    with pytest.raises(RewardError, match=r"neither ended within 0\.25 s nor gave a reward"):
        group_of(made)
    assert made.faults["hung"]


def test_a_faulted_episode_is_played_again_alone_and_never_scored():
    attempts = {0: 0, 1: 0, 2: 0}

    async def play(talk, episode):
        attempts[episode] += 1
        await talk.complete("ab")
        if episode == 1 and attempts[1] < 3:
            raise EnvironmentFault("broken pipe")
        return Outcome(finish_reason="stop", reward=1.0)

    made, _ = sampler(play, replays=2)
    group = group_of(made)
    assert attempts == {0: 1, 1: 3, 2: 1} and made.faults == {"raised": 2}
    assert group.episode_metrics["replays"].tolist() == [0, 2, 0]
    assert [one.reward for one in group.rollouts] == [1, 1, 1]


def test_an_episode_that_nothing_scores_is_a_fault_but_not_if_it_was_cut_off():
    def ending(finish_reason):
        async def play(talk, episode):
            await talk.complete("ab")
            return Outcome(finish_reason=finish_reason)

        return play

    with pytest.raises(RewardError, match=r"gave no reward, and reward\.functions is \[\]"):
        group_of(sampler(ending("stop"), replays=0)[0])
    assert {one.reward for one in group_of(sampler(ending("turns"))[0]).rollouts} == {0.0}
    scored = group_of(sampler(ending("stop"), scorer=Lengths())[0])
    assert {one.reward for one in scored.rollouts} == {2.0}


def test_an_episode_whose_replays_all_fail_fails_the_ticket_with_the_reasons():
    async def play(talk, episode):
        if episode == 1:
            raise EnvironmentFault("broken pipe")
        await asyncio.Event().wait()

    made, _ = sampler(play, replays=1)
    with pytest.raises(RewardError, match="in all 2 attempts at an episode: 2 x broken pipe"):
        group_of(made)


def broken(*episodes):
    """An environment that fails in these episodes, each time for another reason, and rewards the others."""
    attempts = Counter()

    async def play(talk, episode):
        attempts[episode] += 1
        await talk.complete("ab")
        if episode in episodes:
            raise EnvironmentFault("broken pipe", reason=("hung", "died")[attempts[episode] % 2])
        return Outcome(finish_reason="stop", reward=float(episode), metrics={"own": episode})

    return play


@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1)])
def test_a_group_may_go_without_episodes_that_failed_in_all_attempts(failing):
    made, environment = sampler(broken(*failing), most_missing=2, replays=2)
    group = group_of(made)
    left = [episode for episode in range(3) if episode not in failing]
    assert [one.reward for one in group.rollouts] == left == group.episode_metrics["own"].tolist()
    assert group.episodes == len(left) and group.missing == {"died": len(failing)}, "the last reason counts"
    assert trainable(group, LIMITS) is None
    again = decode_group(encode_group(group))
    assert again.missing == group.missing and encode_group(again) == encode_group(group)
    played = Counter(episode for _, episode, *_ in environment.calls)
    assert played == {episode: 3 if episode in failing else 1 for episode in range(3)}
    assert made.faults == {"died": 2 * len(failing), "hung": len(failing)} and made.clock.episodes == 0


def test_sequences_of_the_episodes_that_are_left_belong_to_them():
    async def play(talk, episode):
        for text in "ab"[: 1 + (episode > 0)]:
            await talk.chat([{"role": "user", "content": text}])  # another conversation
        if episode == 0:
            raise EnvironmentFault("broken pipe")
        return Outcome(finish_reason="stop", reward=float(episode))

    made, _ = sampler(play, most_missing=1, replays=0)
    group = group_of(made)
    assert group.episode_of.tolist() == [0, 0, 1, 1]
    assert [one.reward for one in group.rollouts] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("failing", "most_missing", "whole", "greedy"),
    [
        ((1,), 0, False, False),
        ((0, 1), 1, False, False),
        ((0, 1, 2), 3, False, False),  # one episode is left at least
        ((1,), 2, True, False),  # statistics of held-out groups are over all of them
        ((3,), 2, False, True),  # the greedy episode has no sibling
    ],
)
def test_a_ticket_fails_when_more_is_missing_than_its_group_may_go_without(
    failing, most_missing, whole, greedy
):
    made, _ = sampler(broken(*failing), most_missing=most_missing, replays=0)
    with pytest.raises(RewardError, match="in all 1 attempts at an episode: 1 x broken pipe"):
        asyncio.run(made.group(PROMPT, 5, replace(LIMITS, whole=whole), SPEC, greedy=greedy))
    assert made.clock.episodes == 0


def test_the_greedy_episode_is_not_taken_for_one_that_is_missing():
    made, _ = sampler(broken(1), most_missing=1, replays=0)
    group = group_of(made, greedy=True)
    assert (group.greedy_reward, [one.reward for one in group.rollouts]) == (3.0, [0.0, 2.0])


def test_an_episode_without_an_answer_is_a_fault_and_not_a_score():
    async def play(talk, episode):
        return Outcome(finish_reason="stop", reward=1.0)

    made, _ = sampler(play, replays=0)
    with pytest.raises(RewardError, match="without an answer of the model"):
        group_of(made)


@pytest.mark.parametrize(
    "says",
    [
        lambda talk: talk.chat(["hello"]),
        lambda talk: talk.chat([{"role": "user", "content": "a", "tool_calls": [1]}]),
        lambda talk: talk.chat("hello"),
        lambda talk: talk.complete(7),
    ],
)
def test_what_is_neither_text_nor_a_message_is_a_fault_and_does_not_end_the_generator(says):
    async def play(talk, episode):
        await talk.complete("ab")
        await says(talk)

    made, _ = sampler(play, replays=0)
    with pytest.raises(RewardError, match=r"cannot be used \((AttributeError|ValueError): "):
        group_of(made)


def test_tools_without_a_parser_are_the_episodes_fault_and_do_not_end_the_run():
    async def offers(talk, episode):
        await talk.complete("ab")
        if episode == 1:
            await talk.chat([{"role": "user", "content": "ab"}], tools=[{"function": {"name": "rare"}}])
        return Outcome(finish_reason="stop", reward=1.0)

    def read_strictly(prompt_ids, rollout, tools):
        if tools:
            raise ConfigError("model.tool_parser: there are tools")
        return read(prompt_ids, rollout, tools)

    made, _ = sampler(offers, replays=1)
    made.read = read_strictly
    with pytest.raises(RewardError, match=r"all 2 attempts at an episode: 2 x model.tool_parser: there are"):
        group_of(made)


def test_a_turn_keeps_what_an_earlier_call_gave():
    async def play(talk, episode):
        await talk.complete("ab")
        for given in ((None, 17), (0.5,)) if episode else ((0.5,), (None, 17)):
            talk.score_turn(*given)
        return Outcome(finish_reason="stop", reward=1.0)

    for one in group_of(sampler(play)[0]).rollouts:
        assert (one.turns.states.tolist(), one.turns.rewards.tolist()) == ([17], [0.5])


# What `reset` returned, then the steps: reward, next observation, whether the episode is over. Episode 1 comes
# back to `a`.
WALKS = (
    ("a", (0.0, "b", False), (1.0, "x", True)),
    ("a", (0.5, "c", False), (0.0, "a", False), (1.0, "x", True)),
    ("a", (None, "b", False), (0.0, "x", True)),
)


def test_gigpo_compares_the_turns_of_text_environments_that_follow_the_same_observation():
    """By hand, with gamma 1, other episodes: R = 1, 1.5, 0; turns in `a` still got 1, 1.5, 1, 0, in `b` 1 and 0."""

    async def play(talk, episode):
        first, *steps = WALKS[episode]

        async def ask(request):
            if request["do"] == "reset":
                return {"value": first}
            reward, observation, done = steps.pop(0)
            return {"value": [observation, reward, done]}

        return await play_text(Conversation(talk, "", 100), ask, {}, rewards=False)

    made, _ = sampler(play)
    group = decode_group(encode_group(group_of(made)))
    estimator = Estimator(advantage=partial(gigpo, gamma=1.0), max_response_tokens=150, needs=OF_TURNS)
    _, advantages_T, _ = estimator.estimate([group], {}, 0.0)
    expected = [
        0.25 + (1 - 2.5 / 3),
        0.25 + 1,
        1.0 + (1.5 - 1 / 2),
        1.0,
        1.0 + (1 - 1 / 2),
        -1.25 - 3.5 / 3,
        -1.25 - 1,
    ]
    tokens = [
        int(count)
        for one in group.rollouts
        for count in np.diff(np.cumsum(one.action_mask)[one.turns.ends - 1], prepend=0)
    ]
    np.testing.assert_allclose(advantages_T, np.repeat(expected, tokens), atol=1e-6)


def test_a_fault_that_follows_from_the_engines_error_is_the_engines_and_is_not_played_again():
    engine = FakeEngine(token_s=0.002)

    async def play(talk, episode):
        aborting = asyncio.create_task(engine.abort_requests())
        try:
            while True:
                await talk.complete("ab")
        except EngineError as error:
            await aborting
            raise EnvironmentFault(f"a call was refused: {error}") from error

    made, environment = sampler(play, engine)
    with pytest.raises(EngineError, match="aborted"):
        group_of(made)
    assert not made.faults and len(environment.calls) == LIMITS.rollouts


def test_an_environment_that_swallows_the_engines_error_has_a_hole_and_no_group():
    engine = FakeEngine(token_s=0.002)

    async def play(talk, episode):
        await talk.complete("ab")
        aborting = asyncio.create_task(engine.abort_requests())
        try:
            while True:
                await talk.complete("ab")
        except EngineError:
            await aborting
        except BudgetSpent:
            pass
        return Outcome(finish_reason="stop", reward=1.0)

    made, _ = sampler(play, engine)
    with pytest.raises(EngineError, match="aborted"):
        group_of(made)


def test_a_cancelled_group_ends_its_turns_before_its_environments():
    engine, seen = FakeEngine(token_s=10.0), []

    async def play(talk, episode):
        try:
            await asyncio.gather(talk.complete("ab"))
        finally:
            with pytest.raises(BudgetSpent):
                await talk.complete("ab")
            seen.append(episode)

    async def scenario():
        made, _ = sampler(play, engine)
        group = asyncio.create_task(made.group(PROMPT, 1, LIMITS, SPEC))
        await until(lambda: engine.stats().running_requests == 3)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert engine.stats().running_requests == 0 and sorted(seen) == [0, 1, 2]

    asyncio.run(scenario())


def test_all_turns_use_the_cache_of_the_episodes_start_and_tokens_name_the_weights_that_sampled_them():
    engine, salts = FakeEngine(), []
    sample = engine.sample

    async def recorded(prompt_ids, count, spec, *, salt=None):
        salts.append(salt)
        return await sample(prompt_ids, count, spec, salt=salt)

    engine.sample = recorded

    async def play(talk, episode):
        await talk.complete("ab")
        await engine.begin_update()
        await engine.receive(SimpleNamespace(details={}, version=1))
        await engine.finish_update(Weights(1))
        await talk.complete("cd")
        return Outcome(finish_reason="stop", reward=1.0)

    made, _ = sampler(play, engine)
    one = GroupLimits(vocabulary=16, rollouts=1, max_tokens=200)
    group = asyncio.run(made.group(PROMPT, 1, one, SPEC))
    assert salts == ["0", "0"] and engine.salt == "1"
    (rollout,) = group.rollouts
    first = rollout.turns.ends[0]
    assert rollout.versions.tolist() == [0] * (first + 2) + [1] * (len(rollout.response_ids) - first - 2)
    assert group.finished_version == 1


def test_special_tokens_of_the_rows_own_messages_reach_the_model():
    async def play(talk, episode):
        await talk.chat(prompt.messages)
        return Outcome(finish_reason="stop", reward=1.0)

    prompt = replace(PROMPT, messages=({"role": "user", "content": "cab"},))
    made, _ = sampler(play)
    made.renderer = type("Named", (Letters,), {"special_texts": frozenset({"ab"})})()
    episode = in_virtual_time(made.play(prompt, SPEC, seed=0, episode=0))
    assert episode.rollouts[0].prompt_ids.tolist() == [3, 1, 2]


def test_episodes_of_one_seed_must_begin_alike():
    drawn = iter(range(100))

    async def fair(talk, episode):
        await talk.complete("ab")

    async def unfair(talk, episode):
        await talk.complete(f"a{next(drawn)}")

    async def unscored(talk, episode):
        async def ask(request):
            assert request["do"] == "reset", "an episode without a turn is not scored"
            return {"value": "go"}

        return await play_text(Conversation(talk, [], 100), ask, {}, rewards=True)

    for play in (fair, unscored):
        asyncio.run(require_same_start(Played(play), PROMPT))
    with pytest.raises(EnvironmentFault, match="'a0' and 'a1'; the episodes of a group are compared"):
        asyncio.run(require_same_start(Played(unfair), PROMPT))


@pytest.mark.parametrize("nothing", [None, []])
def test_an_environment_that_says_nothing_still_takes_its_turn(nothing):
    """Else the next answer would continue the last one."""
    steps = [[nothing, 0.0, False], ["", 1.0, True]]

    async def ask(request):
        return {"value": "go" if request["do"] == "reset" else steps.pop(0)}

    said = []

    class Talk:
        async def chat(self, messages, *, tools=()):
            said.append([one["role"] for one in messages])
            return Answer(text="a")

        def score_turn(self, reward, state=None): ...

    talk = Talk()
    asyncio.run(play_text(Conversation(talk, [], 100), ask, {}, rewards=False))
    assert said == [["user"], ["user", "assistant", "user"]]


def test_an_episode_without_time_for_its_first_answer_says_so():
    async def play(talk, episode):
        try:
            await talk.complete("ab")
        except BudgetSpent as spent:
            return Outcome(finish_reason=spent.finish_reason)

    made, _ = sampler(play, FakeEngine(token_s=3600.0), Lengths(), episode_s=5.0, replays=0)
    with pytest.raises(RewardError, match=r"environment\.episode_s \(5\) passed before the first answer"):
        group_of(made)


def test_a_reward_model_reads_the_conversation_that_the_answer_ends():
    """A call that is not trained may go on with another conversation afterwards."""
    scorer = Lengths()

    async def play(talk, episode):
        await talk.chat([{"role": "user", "content": "ab"}])
        first = talk.last
        await talk.chat([{"role": "user", "content": "cd"}])
        answer = first.message
        await talk.chat(
            [{"role": "user", "content": "ab"}, answer, {"role": "user", "content": "ef"}], train=False
        )
        return Outcome(finish_reason="stop")

    made, _ = sampler(play, FakeEngine(), scorer)
    group_of(made)
    for one in scorer.given:
        assert text_of(one.token_ids).endswith(one.raw_response()[-3:]) and "cd" in text_of(one.token_ids)
