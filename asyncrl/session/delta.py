"""The text between a sampled answer and the next one.

Only this text is tokenised. It begins behind the stop token of the answer, so that the sampled ids stay as
they are, whatever the template would write in their place.
"""

from collections.abc import Sequence

from asyncrl.errors import RenderError
from asyncrl.session.base import Renderer
from asyncrl.session.chat_messages import Message
from asyncrl.session.chat_template import PROBE

STABLE = "stable"  # the template's text of the history is a prefix of its text of the longer history
SHORT = "short"  # the same holds for a history of two messages that stands for the real one
KEPT = "kept"  # the template keeps the last answer, and what it writes behind the answer's stop is taken
RENDERED = "rendered"  # none holds: the whole conversation is rendered and begins a sequence
_PLAIN = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "some_name", "content": "x"}
# Conversations that show whether a template rewrites what was said, and what is said next.
_PROBES: dict[str, tuple[Sequence[Message], Message]] = {
    "an answer": (_PLAIN, _PLAIN[0]),
    "an answer with reasoning": ((_PLAIN[0], {**_PLAIN[1], "reasoning_content": "y"}), _PLAIN[0]),
    "a tool call": (PROBE, _RESULT),
}
_MARK = "the-last-answer-ends-here-8f1c2d"


def closer(renderer: Renderer) -> str:
    """Return the token that closes a template's answers, or "". Some base models' stop token is another."""
    try:
        text = renderer.render([_PLAIN[0], {**_PLAIN[1], "content": _MARK}], generation=False)
    except RenderError:
        return ""
    behind = text.partition(_MARK)[2].rstrip()
    known = renderer.special_texts | {renderer.decode([one]) for one in renderer.stop_ids}
    return max((one for one in known if behind.endswith(one)), key=len, default="")


class _Border:
    """What a template writes behind an answer."""

    def __init__(self, renderer: Renderer, tools: Sequence[Message]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._closer = closer(renderer)
        stops = {renderer.decode([one]) for one in renderer.stop_ids} | ({self._closer} - {""})
        self._stops = sorted(stops, key=len, reverse=True)

    def render(self, messages: Sequence[Message], *, generation: bool) -> str | None:
        try:
            return self._renderer.render(messages, self._tools, generation=generation)
        except RenderError:
            return None

    def closing(self, history: str) -> str:
        """The stop token and the blanks with which the text of a history ends, or "" if it ends otherwise."""
        place, stop = max(((history.rfind(stop), stop) for stop in self._stops), default=(-1, ""))
        behind = history[place + len(stop) :] if place >= 0 else "text"
        return stop + behind if not behind.strip() else ""

    def continued(self, history: Sequence[Message], new: Sequence[Message]) -> str | None:
        """The text behind the last answer if the longer history begins with the text of the shorter one."""
        before = self.render(history, generation=False)
        after = self.render([*history, *new], generation=True)
        if before is None or after is None or not after.startswith(before):
            return None
        return self.closing(before) + after[len(before) :]

    def marked(self, history: Sequence[Message], new: Sequence[Message]) -> str | None:
        """The text from the first stop token behind the last answer."""
        after = self.render([*history[:-1], {**history[-1], "content": _MARK}, *new], generation=True)
        if after is None or after.count(_MARK) != 1:
            return None
        behind = after.partition(_MARK)[2]
        places = [place for stop in self._stops if (place := behind.find(stop)) >= 0]
        return behind[min(places) :] if places else None

    def after_stop(self, text: str, stop: str | None) -> str:
        """`text` without the stop token that the policy has sampled.

        `stop` is None if the answer was cut off: the text then begins with the template's stop token. A stop
        token that closes answers is also left out if the policy sampled another in its place. If the stop
        token opens the next message (GLM, tool results of Gemma 4), it is left out only if sampled.
        """
        first = next((one for one in self._stops if text.startswith(one)), "")
        is_left_out = stop is not None and first in (stop, self._closer)
        return text[len(first) :] if is_left_out else text


def delta(
    renderer: Renderer,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Message],
    last_id: int,
) -> tuple[str, str] | None:
    """Return the rule that holds and the text to tokenise behind the token `last_id`, or None.

    `history` ends with the answer that `last_id` ends. The first of STABLE, SHORT, KEPT that holds is taken.
    """
    border = _Border(renderer, tools)
    bare = {name: history[-1][name] for name in ("role", "tool_calls") if name in history[-1]}
    short = [_PLAIN[0], {**bare, "content": "" if "tool_calls" in bare else "x"}]
    rule, text = STABLE, border.continued(history, new)
    if text is None:
        rule, text = SHORT, border.continued(short, new)
    if text is None:
        rule, text = KEPT, border.marked(history, new)
    if text is None:
        return None
    stop = renderer.decode([last_id]) if last_id in renderer.stop_ids else None
    return rule, border.after_stop(text, stop)


def rewritten(renderer: Renderer) -> list[str]:
    """Return behind which answers the chat template rewrites the history when a message follows."""
    border = _Border(renderer, ())
    return [
        name
        for name, (history, new) in _PROBES.items()
        if border.continued(history, [new]) is None
        and border.render(history, generation=False) is not None
        and border.render([*history, new], generation=True) is not None
    ]
