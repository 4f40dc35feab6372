"""Episodes in flight fill the engine: as many more as wait for their environment, by the measured duty."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.algo.trainable import GroupLimits
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.duty import WINDOW_S, Clock, Duty
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import EngineError
from asyncrl.types import Prompt

PER_SLOT = 4


class Measured:
    """A duty whose gauges and time the test sets."""

    def __init__(self, max_running: int = 12) -> None:
        self.now_s, self.requests, self.clock = 0.0, 0, Clock()
        engine = SimpleNamespace(stats=lambda: SimpleNamespace(running_requests=self.requests))
        self.duty = Duty(engine, self.clock, max_running, PER_SLOT * max_running, now=lambda: self.now_s)

    def after(self, seconds: float, *, requests: int, episodes: int, held: int = 0) -> int:
        """The room after so much time with these requests and episodes."""
        self.requests, self.clock.episodes = requests, episodes
        self.now_s += seconds
        return self.duty.room(held)


def test_it_starts_with_a_slot_per_sequence_and_stays_there_without_episodes():
    one = Measured()
    assert one.after(0.0, requests=0, episodes=0) == 12
    assert one.after(30.0, requests=0, episodes=0, held=5) == 7, "single responses that are scored"
    assert one.duty.metrics() == {}


@pytest.mark.parametrize(
    ("requests", "room"), [(12, 12), (8, 18), (6, 24), (4, 36), (3, 48), (1, 48), (0, 48), (20, 12)]
)
def test_room_is_slots_over_duty_and_at_most_four_times_the_slots(requests, room):
    one = Measured()
    assert one.after(WINDOW_S, requests=requests, episodes=12) == room <= PER_SLOT * 12
    found = one.duty.metrics()
    assert found == pytest.approx(
        {"engine/occupancy": min(requests / 12, 1), "episodes/duty": min(requests / 12, 1)}
    )


def test_single_responses_fill_the_slots_and_have_no_metrics_where_there_are_no_episodes():
    one = Measured()
    one.duty.most_held = 0
    assert one.after(WINDOW_S, requests=3, episodes=12) == 12 and one.duty.metrics() == {}


def test_single_responses_count_as_episodes_while_they_are_sampled():
    """Else their requests would be taken for those of the run's episodes."""
    seen = []

    async def sample(*_, **options):
        seen.append(made.clock.episodes)
        raise EngineError("enough")

    made = Sampler(SimpleNamespace(sample=sample), None, None, "g")
    limits, spec = (
        GroupLimits(vocabulary=9, rollouts=3, max_tokens=9),
        SamplingSpec(temperature=1.0, max_response_tokens=8),
    )
    with pytest.raises(EngineError):
        asyncio.run(made.group(Prompt(token_ids=(1,), text="", row={}), 1, limits, spec, greedy=True))
    assert {*seen} == {4} and made.clock.episodes == 0


def test_duty_is_that_of_the_last_minute_weighted_by_time():
    one = Measured()
    one.after(10.0, requests=12, episodes=12)
    assert one.after(30.0, requests=0, episodes=12) == 24, "a third of a minute is not known yet"
    assert one.duty.share == pytest.approx(0.25)
    for _ in range(7):
        room = one.after(WINDOW_S / 6, requests=6, episodes=12)
    assert one.duty.share == pytest.approx(0.5) and room == 24
    for _ in range(7):
        one.after(WINDOW_S / 6, requests=0, episodes=0)
    assert one.duty.share is None


def test_the_number_grows_over_a_minute_also_if_no_episode_samples():
    one, held, known_s = Measured(), 12, 0.0
    for _ in range(60):
        known_s += held / 12
        held += one.after(1.0, requests=0, episodes=held, held=held)
        assert held == min(48, int(12 / max(1 - known_s / 60, 0.25) + 1e-9)), known_s
    assert held == 48


def test_slots_stay_busy_and_the_number_stays_steady_when_tools_take_ten_times_as_long():
    """Groups of 4, turn after turn: up to 1.5 times 10 s for a tool, then a slot for 1 s, with a queue for slots."""
    one, slots, random = Measured(max_running=16), 16, np.random.default_rng(3)
    one.duty.most_held = 16 * slots
    groups = []  # of each episode in them: when it wants a slot or has had it, whether it has it, turns left
    busy, numbers, step_s, room = [], [], 0.1, 16
    for step in range(3600):
        now_s = step * step_s
        for _ in range(room // 4):
            groups.append([[now_s + wait, False, 3] for wait in random.uniform(5, 15, 4)])
        episodes = [episode for group in groups for episode in group if episode[2]]
        for episode in episodes:
            if episode[1] and episode[0] <= now_s:
                episode[:] = [now_s + random.uniform(5, 15), False, episode[2] - 1]
        used = sum(episode[1] for episode in episodes)
        queue = sorted(
            episode for episode in episodes if not episode[1] and episode[2] and episode[0] <= now_s
        )
        for episode in queue[: slots - used]:
            episode[:] = [now_s + 1, True, episode[2]]
        groups = [group for group in groups if any(turns for _, _, turns in group)]
        held = 4 * len(groups)
        room = one.after(step_s, requests=used + len(queue), episodes=held, held=held)
        if now_s >= 120:
            busy.append(min(used + len(queue), slots) / slots)
            numbers.append(held)
    assert np.mean(busy) >= 0.9
    assert max(numbers) < 1.3 * min(numbers)


def test_a_full_engine_lowers_the_number_of_episodes_again():
    one = Measured()
    held = 12
    for _ in range(600):
        held += one.after(1.0, requests=held // 2, episodes=held, held=held)
    assert held == 24
    for _ in range(600):
        held += min(one.after(1.0, requests=held, episodes=held, held=held), 0)
    assert held == 12
