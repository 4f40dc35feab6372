"""A model's text in a test: a token for each letter, so that ids can be read."""

from asyncrl.engine.fake import EOS
from asyncrl.environments.base import Answer


class Letters:
    """A renderer with a token per letter; a message is its text, an answer ends with token 0."""

    stop_ids = frozenset({EOS})
    special_texts = frozenset({"!"})
    opening_ids: tuple[int, ...] = ()

    def encode(self, text, *, inside=False):
        return [0 if letter == "!" else ord(letter) - 96 for letter in text]

    def decode(self, ids):
        return "".join("!" if one == 0 else chr(96 + one) for one in ids)

    def render(self, messages, tools=(), *, generation):
        return "".join(one["content"] + "!" * (one["role"] == "assistant") for one in messages)


def text_of(ids):
    return Letters().decode([one for one in ids if one != EOS])


def read(prompt_ids, rollout, tools):
    ids = rollout.response_ids.tolist()
    return Answer(text=text_of(ids), finish_reason=rollout.finish_reason, tokens=len(ids))
