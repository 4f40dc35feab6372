"""The first probe: each rank computes what transformers computes, or nothing is trained."""

from collections.abc import Sequence
from itertools import chain

from asyncrl.config.schema import Config
from asyncrl.data.prompts import draw_probe, other_tokens
from asyncrl.errors import ConfigError
from asyncrl.hosting.machine import read_model
from asyncrl.trainer.base import Trainer
from asyncrl.trainer.miniature import require_agreement
from asyncrl.trainer.sequence_parallel import length_dependent
from asyncrl.weights.agreement import learner_fault


def require_right_code(config: Config) -> None:
    """Raise ConfigError if the learner computes something else than transformers with such a model.

    Also if a teacher has other tokens than the policy.
    """
    require_agreement(read_model(config.model)[0])
    if config.algorithm.reference is not None:
        require_agreement(read_model(config.reference)[0])
        if text := other_tokens(config):
            raise ConfigError(f"algorithm.reference.path: {text}")


def certified_probe(config: Config, trainer: Trainer) -> tuple[Sequence[Sequence[int]], list[float]]:
    """Return the sequences that engines score, and the learner's log-probabilities, one after the other.

    The learner and transformers score these, packed, and one more beyond a sliding window. Raises ConfigError
    on every rank if they differ by more than rounding explains.
    """
    model = read_model(config.model)[0]
    text, longest = model.get_text_config(), config.sampling.max_tokens
    for kind, most in length_dependent(model).items():
        if longest > most:
            raise ConfigError(
                f"model.path: found rope_type {kind} and sequences of up to {longest} tokens; above {most}, "
                "all positions of a pack would depend on its longest sequence; lower "
                "sampling.max_prompt_tokens or sampling.max_response_tokens, or choose another model"
            )
    last = min(config.weights.probe_tokens, longest - 1)
    lengths = [max(2, last // 3), max(2, last // 2), last]
    window = getattr(text, "sliding_window", None) or longest
    beyond = [min(window + last, longest)] if window < longest else []
    sequences = draw_probe(config.run.seed, [*lengths, *beyond], text.vocab_size)
    probe = sequences[: len(lengths)]
    plain = trainer.score_plainly(sequences)
    # A long sequence is compared at its end.
    packed, alone = (
        [*chain(*(own[-len(one) :] for own, one in zip(scores, plain, strict=True)))]
        for scores in (trainer.score(sequences), [trainer.score([ids])[0] for ids in sequences])
    )
    limit, dtype = config.weights.probe_limit, config.model.dtype
    found = learner_fault(packed, alone, [*chain(*plain)], limit=limit, dtype=dtype)
    for share, fault in enumerate(map(bytes.decode, trainer.gather(found.encode()))):
        if fault:
            raise ConfigError(f"model.path: {config.model.path}, share {share} of the learner: {fault}")
    return probe, [*chain(*trainer.score(probe))]
