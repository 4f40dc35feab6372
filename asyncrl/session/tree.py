"""A session: the conversations of one episode as a tree of turns, each leaf one sequence to train on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.columns import KEPT_COUNTS, KEPT_IDS
from asyncrl.errors import DriftError
from asyncrl.session.base import Renderer, Request, Said, Turn
from asyncrl.session.chat_messages import Breaker, Message, is_begun, key_after, keys_of
from asyncrl.session.delta import KEPT, RENDERED, SHORT, STABLE, delta
from asyncrl.types import Rollout, Turns, VersionSpan

_ROOT = "roots"  # a request that continues no recorded turn
_TEXT = "text"  # plain text behind all that is there
_History = Literal["exact", "template"]
_RULES = (_ROOT, STABLE, SHORT, KEPT, RENDERED)


def sequences_of(turns: Sequence[Turn]) -> tuple[Rollout, ...]:
    """Return the sequences of all leaves, in the order of recording.

    A sequence ends with its last action: what follows is context of nothing. A leaf whose turns are all
    trained elsewhere, or are not trained at all, gives no sequence. If the turns of two sequences took place
    in turn, `Turns.order` says when. Raises DriftError.
    """
    done: set[int] = set()
    found: list[tuple[Sequence[Turn], set[int]]] = []
    for leaf in turns:
        if leaf.children:
            continue
        path = leaf.path
        _require_no_drift(path)
        actions = {turn.index for turn in path if turn.is_trained} - done
        while path and path[-1].index not in actions:
            path.pop()
        if path:
            found.append((path, actions))
        done |= actions
    order = [turn.index for path, actions in found for turn in path if turn.index in actions]
    is_mixed = order != sorted(order)
    return tuple(_sequence(path, actions, is_mixed=is_mixed) for path, actions in found)


def _sequence(path: Sequence[Turn], actions: set[int], *, is_mixed: bool) -> Rollout:
    """The turns of `path` one behind the other; those in `actions` are trained."""
    ids: list[NDArray[np.int32]] = []
    mask: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    spans: list[VersionSpan] = []
    counts: list[NDArray[np.int32]] = []
    kept: list[NDArray[np.int32]] = []
    ends: list[int] = []
    length = 0
    for turn in path:
        given, rollout = len(turn.delta_ids) if turn.parent else 0, turn.rollout
        if given:
            ids.append(np.array(turn.delta_ids, dtype=np.int32))
            mask.append(np.zeros(given, dtype=np.bool_))
            logprobs.append(np.zeros(given, dtype=np.float32))
            spans.append(spans[-1]._replace(tokens=given))
        is_action = turn.index in actions
        ids.append(rollout.response_ids)
        mask.append(rollout.action_mask & is_action)
        logprobs.append(rollout.behaviour_logprobs * np.float32(is_action))
        counts += [np.zeros(given, np.int32), np.zeros(len(rollout.response_ids), np.int32)]
        if is_action and KEPT_COUNTS in rollout.recorded:
            counts[-1] = rollout.recorded[KEPT_COUNTS]
            kept.append(rollout.recorded[KEPT_IDS])
        spans += rollout.version_spans
        length += given + len(rollout.response_ids)
        if is_action:
            ends.append(length)
    runs = groupby(spans, key=lambda span: span.weights)  # neighbours of the same weights
    return replace(
        path[-1].rollout,
        prompt_ids=path[0].rollout.prompt_ids,
        response_ids=np.concatenate(ids),
        action_mask=np.concatenate(mask),
        behaviour_logprobs=np.concatenate(logprobs),
        version_spans=tuple(
            VersionSpan(weights.version, sum(span.tokens for span in run), weights.lineage)
            for weights, run in runs
        ),
        recorded={KEPT_COUNTS: np.concatenate(counts), KEPT_IDS: np.concatenate(kept)} if kept else {},
        turns=_turns([turn for turn in path if turn.index in actions], ends, is_mixed=is_mixed),
    )


def _turns(trained: Sequence[Turn], ends: Sequence[int], *, is_mixed: bool) -> Turns | None:
    rewards = states = order = None
    if any(turn.reward is not None for turn in trained):
        rewards = np.array([turn.reward or 0.0 for turn in trained], dtype=np.float32)
    if any(turn.state is not None for turn in trained):
        states = np.array([turn.state or 0 for turn in trained], dtype=np.uint64)
    if is_mixed:
        order = np.array([turn.index for turn in trained], dtype=np.int32)
    if len(ends) == 1 and rewards is None and states is None and order is None:
        return None
    return Turns(ends=np.array(ends, dtype=np.int32), rewards=rewards, states=states, order=order)


def _require_no_drift(path: Sequence[Turn]) -> None:
    """Raise DriftError unless the engine's prompt of every turn is the ids before it."""
    before = blake2b()
    for turn in path:
        before.update(np.array(turn.delta_ids, dtype=np.int32).tobytes())
        if before.digest() != turn.prompt_digest:
            raise DriftError(
                f"turn {turn.index} of a session was sampled behind other token ids than its sequence has "
                "there; the engine must report the prompt that the session gave it"
            )
        before.update(turn.sampled_ids.astype(np.int32).tobytes())


class Session:
    """Finds for each request the recorded turn that it continues, and records the answers.

    `history="exact"` keeps what was sampled, also where the template would rewrite it. `history="template"`
    gives the policy the template's text of the whole conversation, which begins a sequence if rewritten.
    """

    def __init__(
        self, renderer: Renderer, *, history: _History = "exact", own: str | Sequence[Message] = ""
    ) -> None:
        """Take the user's `own` text, or first messages: special tokens within it stay what they are."""
        self._renderer = renderer
        self._own = [own] if isinstance(own, str) else [str(one["content"]) for one in own]
        self._history = history
        self.turns: list[Turn] = []  # in the order of recording
        self._found: dict[bytes, list[Turn]] = {}  # by the key of the conversation up to the answer
        # Turns that are `roots`, `branches` or `untrained`, those of each rule, and those that the template
        # would have `rewritten`. `broken_specials` are texts of special tokens that were broken.
        self.counts: Counter[str] = Counter()
        self.sequences = 0  # at most: leaves of the tree, of which some may have nothing to train

    def request(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> Request:
        """Return the ids to sample behind: the turn that these messages continue, and what is new.

        Raises RenderError if the template refuses messages that continue no turn.
        """
        keys = list(keys_of(messages, tools))
        parent, known = self._find(keys)
        # The history is that of the record, because it has the reasoning that many agents do not send back.
        said = parent.said if parent else None
        breaker = Breaker(self._renderer.special_texts)
        own = [*self._own, *[""] * len(messages)][known:]
        new = [breaker.message(one, own=text) for one, text in zip(messages[known:], own, strict=False)]
        broken = breaker.broken
        shown = breaker.value(tools)
        # Tools are part of the key, so those of a continued conversation have been counted.
        broken = broken if parent else breaker.broken
        for message in new:
            said = Said(said, message)
        rule, text = self._continued(parent, new, shown)
        if rule in (_ROOT, RENDERED):
            parent = None
        ids = tuple(
            self._behind(int(parent.sampled_ids[-1]), text) if parent else self._renderer.encode(text)
        )
        return Request(
            prompt_ids=(*parent.ids, *ids) if parent else ids,
            parent=parent,
            delta_ids=ids,
            rule=rule,
            broken_specials=broken,
            said=said,
            key=keys[-1],
            begun_key=keys[-2] if said and is_begun([said.message]) else None,
        )

    def request_text(self, text: str) -> Request:
        """Return the ids to sample behind for a model without a chat template.

        The text is tokenised as it is, behind everything that was recorded so far. The first text of a
        session is a prompt: it gets the tokens that the tokenizer puts before a text, unless it has them.
        """
        breaker = Breaker(self._renderer.special_texts)
        parent = self.turns[-1] if self.turns else None
        broken = breaker.text(text, own="" if parent else [*self._own, ""][0])
        ids = tuple(self._renderer.encode(broken, inside=parent is not None))
        opening = self._renderer.opening_ids
        if parent is None and ids[: len(opening)] != opening:
            ids = (*opening, *ids)
        return Request(
            prompt_ids=(*parent.ids, *ids) if parent else ids,
            parent=parent,
            delta_ids=ids,
            rule=_TEXT,
            broken_specials=breaker.broken,
        )

    def record(self, request: Request, rollout: Rollout, message: Message, *, train: bool = True) -> Turn:
        """Add the answer to the tree as the engine gave it, and return its turn.

        `message` is the answer as the agent gets it; if it continues a message, the agent may join the two.
        With `train=False` its tokens are context only. Raises ValueError if the answer has no tokens.
        """
        if not len(rollout.response_ids):
            raise ValueError("the answer has no tokens; the engine must sample at least one")
        before, answer = request.said, Breaker(self._renderer.special_texts).message(message)
        keys = [key_after(request.key, message)] if request.key else []
        if before and request.begun_key:
            begun, before = before.message["content"], before.before
            answer["content"] = begun + answer["content"]
            joined = {**message, "content": f"{begun}{message.get('content') or ''}"}
            keys.append(key_after(request.begun_key, joined))
        turn = Turn(
            index=len(self.turns),
            parent=request.parent,
            delta_ids=request.delta_ids,
            prompt_digest=blake2b(rollout.prompt_ids.astype(np.int32).tobytes()).digest(),
            rollout=replace(rollout, prompt_ids=rollout.prompt_ids[:0].copy()) if request.parent else rollout,
            message=message,
            said=Said(before, answer) if request.key else None,
            is_trained=train,
        )
        self.turns.append(turn)
        for key in keys:
            self._found.setdefault(key, []).append(turn)
        self._count(request, turn)
        return turn

    def rollouts(self) -> tuple[Rollout, ...]:
        """Return one sequence for each leaf, in the order of recording; rewards are the caller's.

        A turn that several sequences share is an action in the first of them only. Raises DriftError if a
        turn was sampled behind other ids than those before it in its sequence.
        """
        return sequences_of(self.turns)

    def _find(self, keys: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The turn with the longest of these conversations, childless if possible, and its message count."""
        for count in reversed(range(len(keys))):
            if turns := self._found.get(keys[count]):
                return next((turn for turn in reversed(turns) if not turn.children), turns[-1]), count
        return None, 0

    def _continued(
        self, parent: Turn | None, new: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[str, str]:
        """The rule, and the text to tokenise behind the parent, or, for a new sequence, all of it."""
        history = parent.said.messages if parent and parent.said else ()
        if parent is not None and self._history == "exact":
            last_id = int(parent.sampled_ids[-1])
            if new:
                found = delta(self._renderer, history, new, tools, last_id)
            else:  # the answer itself is to be continued, which it can be where it was cut off
                is_cut = parent.rollout.finish_reason == "length" and last_id not in self._renderer.stop_ids
                found = (STABLE, "") if is_cut else None
            if found is not None:
                return found
        whole = self._renderer.render([*history, *new], tools, generation=True)
        if parent is None:
            return _ROOT, whole
        if self._history == "template" and whole.startswith(before := self._renderer.decode(parent.ids)):
            return STABLE, whole[len(before) :]
        return RENDERED, whole

    def _behind(self, last_id: int, text: str) -> list[int]:
        """The ids that `text` has behind a stop token: some tokenizers put a blank there, others do not."""
        if last_id in self._renderer.stop_ids:
            first, *ids = self._renderer.encode(self._renderer.decode([last_id]) + text)
            if first == last_id:
                return ids
        return self._renderer.encode(text)

    def _count(self, request: Request, turn: Turn) -> None:
        rules = _RULES if request.key else (_TEXT,)
        self.counts.update(dict.fromkeys((*rules, "branches"), 0))  # a mean over episodes needs the zeros
        self.counts[request.rule] += 1
        self.counts["broken_specials"] += request.broken_specials
        self.counts["untrained"] += not turn.is_trained
        self.counts["rewritten"] += request.rule not in (_ROOT, _TEXT, STABLE)
        self.sequences += turn.parent is None or turn.parent.children > 0
        if turn.parent is not None:
            turn.parent.children += 1
            self.counts["branches"] += turn.parent.children > 1
