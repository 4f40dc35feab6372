"""The loops of an episode between a model and an environment's worker.

A talk that has no turn left raises BudgetSpent: the episode ends, and is scored if the environment can.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.environments.base import BudgetSpent, Outcome, Talk
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.returned import read_reset, read_reward, read_step
from asyncrl.errors import EnvironmentFault

# Sends a request to the worker of the episode, and returns its reply. Raises EnvironmentFault.
Ask = Callable[..., Awaitable[Mapping[str, Any]]]


async def asked(ask: Ask, do: str, **arguments: Any) -> Mapping[str, Any]:
    """Return a reply of the environment. Raises EnvironmentFault, also if its method raised."""
    reply = await ask({"do": do, **arguments})
    if "error" in reply:
        raise EnvironmentFault(f"`{do}` raised {reply['error']} ({reply['where']})")
    return reply


async def play_text(
    talk: Talk, conversation: Conversation, ask: Ask, start: Mapping[str, Any], *, rewards: bool
) -> Outcome:
    """Play a text environment: an answer is the argument of `step`, whose observation comes next."""
    conversation.observe(read_reset(await asked(ask, "reset", **start)))
    total: float | None = None
    finish_reason = ""
    try:
        while not finish_reason:
            answer = await conversation.answer()
            step = read_step(await asked(ask, "step", text=answer.text))
            if step.reward is not None:
                total = (total or 0.0) + step.reward
                talk.score_turn(step.reward)
            if step.done:
                # An answer that was cut off may have ended the episode by chance.
                finish_reason = "turns" if step.truncated else answer.finish_reason
            else:
                conversation.observe(step.observation)
    except BudgetSpent as spent:
        finish_reason = spent.finish_reason
    if rewards:
        last = read_reward("reward", (await asked(ask, "reward"))["value"])
        total = last if total is None or last is None else total + last
    return Outcome(finish_reason=finish_reason, reward=total)
