"""What the parts of a config must agree on. One function per rule; each yields one line for every way it is broken.

A line names first the key that it is about (there the problem is shown), then what was found, and ends with what to do.
Pointless settings are problems too: who sets something wants it to act. A user's own functions are taken at their word.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from asyncrl.algo import registry
from asyncrl.config.algorithm import CriticConfig, EntropyConfig, KLConfig
from asyncrl.config.base import Choice

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

Rule = Callable[["Config"], Iterator[str]]

GROUP_ADVANTAGES = frozenset(
    {"grpo", "dr_grpo", "rloo", "grpo_passk", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl", "lite_ppo", "gdpo"}
    | {"optimal_token_baseline"}
)
"""Advantages that need at least two rollouts of a prompt."""

WITHOUT_RATIO = frozenset({"reinforce", "gpg"})
"""Policy losses that do not compare the policy with an anchor: only a correction can answer for the age of a token."""

PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, ROLLOUT_BYTES, GROUP_BYTES = 4, 9, 768, 8192
"""What a group takes in the store at most: its tokens, and what else is told of a rollout and of a group."""

LAST_PORT = 65535
LARGEST = 1 << 53

PLAIN = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}
"""Estimators that differ in their gradient only from the one beside them."""


def disagreements(config: "Config") -> Iterator[str]:
    """Every broken rule."""
    for rule in RULES:
        yield from rule(config)


def _groups_can_be_compared(config: "Config") -> Iterator[str]:
    name = config.algorithm.advantage.name
    if config.batch.group_size == 1 and name in GROUP_ADVANTAGES:
        yield (
            f"batch.group_size is 1, but advantage `{name}` compares rollouts of one group; use group_size >= 2 or another "
            "advantage"
        )


def _samples_differ(config: "Config") -> Iterator[str]:
    if config.eval.samples > 1 and config.eval.temperature == 0:
        yield f"eval.samples is {config.eval.samples} at eval.temperature 0: all samples would be the same; set a temperature"


def _hangs_are_told_from_transfers(config: "Config") -> Iterator[str]:
    hang_s, deadline_s = config.control.hang_s, config.weights.deadline_s
    if hang_s < 2 * deadline_s:
        yield (
            f"control.hang_s is {hang_s:g}, but an engine that receives weights is silent for weights.deadline_s ({deadline_s:g} "
            f"s): it would be killed for that; use hang_s >= {2 * deadline_s:g} or lower the deadline"
        )


def _silence_is_told_from_death(config: "Config") -> Iterator[str]:
    heartbeat_s, timeout_s = config.control.heartbeat_s, config.control.timeout_s
    if timeout_s < 3 * heartbeat_s:
        yield (
            f"control.timeout_s is {timeout_s:g}, but a generator says that it is alive only every {heartbeat_s:g} s "
            "(control.heartbeat_s): it would be counted dead for one late message; "
            f"use timeout_s >= {3 * heartbeat_s:g} or a shorter heartbeat"
        )


def _each_generator_has_a_port(config: "Config") -> Iterator[str]:
    first, count = config.telemetry.prometheus_port, config.generator.count
    if first and first + count > LAST_PORT:
        yield (
            f"telemetry.prometheus_port is {first}, and {count} generators (generator.count) need those up to {first + count}, "
            f"but ports end at {LAST_PORT}; use one <= {LAST_PORT - count}, or 0 for any free ones"
        )


def _numbers_are_exact_everywhere(config: "Config") -> Iterator[str]:
    """Lua counts in doubles, and so do most readers of JSON."""
    for section in type(config).model_fields:
        for key, value in getattr(config, section):
            if isinstance(value, int) and abs(value) > LARGEST:
                yield f"{section}.{key} is {value}; allowed is at most {LARGEST}, the last number that the store counts exactly"


def _system_message_has_a_template(config: "Config") -> Iterator[str]:
    if config.data.system is not None and not config.model.chat_template:
        yield "data.system is set, but model.chat_template is false; set it to true or drop the system message"


def _one_store(config: "Config") -> Iterator[str]:
    if config.store.url is not None and config.store.bind is not None:
        yield "store.bind is where a server started for this run listens, but store.url names one that runs already; drop one"


def _sequences_fit(config: "Config") -> Iterator[str]:
    if config.sampling.max_tokens > config.learner.tokens_per_microbatch:
        yield (
            f"learner.tokens_per_microbatch ({config.learner.tokens_per_microbatch}) is smaller than the longest sequence "
            f"(sampling.max_prompt_tokens + max_response_tokens = {config.sampling.max_tokens}); raise it"
        )


def _store_holds_what_is_open(config: "Config") -> Iterator[str]:
    """Else it is full of groups that no checkpoint holds, no group gets in, and so no checkpoint is ever made."""
    sampling, checkpoint, lag = config.sampling, config.checkpoint, config.staleness.max_lag
    saved = min(checkpoint.keep * checkpoint.every, config.learner.steps)
    groups = (lag + 1 + saved) * config.batch.groups
    tokens_bytes = PROMPT_TOKEN_BYTES * sampling.max_prompt_tokens + RESPONSE_TOKEN_BYTES * sampling.max_response_tokens
    group_bytes = GROUP_BYTES + config.batch.group_size * (ROLLOUT_BYTES + tokens_bytes)
    needed_gib = groups * group_bytes / 2**30
    if needed_gib > config.store.max_gib:
        yield (
            f"store.max_gib is {config.store.max_gib:g}, but up to {needed_gib:.3g} GiB can be open: {lag + 1} steps under way "
            f"(staleness.max_lag + 1) and {saved} that the oldest checkpoint does not hold (checkpoint.keep * every), of "
            f"{config.batch.groups} groups (batch.groups), are {groups} groups of up to {group_bytes / 2**20:.3g} MiB "
            f"({config.batch.group_size} sequences of sampling.max_prompt_tokens and max_response_tokens); a full store would "
            f"stop the run for good: set store.max_gib: {math.ceil(needed_gib)}, or checkpoint more often"
        )


def _shards_divide(config: "Config") -> Iterator[str]:
    """Each shard gives its share of every step."""
    shards = config.store.shards
    for key, number in (("batch.groups", config.batch.groups), ("staleness.window_groups", config.staleness.window_groups)):
        if number is not None and number % shards:
            yield f"store.shards is {shards}, which does not divide {key} ({number}); choose a divisor, or another {key}"


def _stale_tokens_are_corrected(config: "Config") -> Iterator[str]:
    """Exactly one of correction and loss answers for what behaviour and proximal policy disagree on."""
    algorithm, lag = config.algorithm, config.staleness.max_lag
    loss, correction = algorithm.policy_loss.name, algorithm.correction.name
    if algorithm.proximal == "behaviour":
        if correction != "none":
            yield (
                f"algorithm.correction is `{correction}`, but with algorithm.proximal behaviour it would compare the behaviour "
                "policy with itself, and every weight would be 1; set correction: none, or proximal: recompute"
            )
        if loss in WITHOUT_RATIO and lag > 0:
            yield (
                f"algorithm.proximal is behaviour and policy_loss `{loss}` has no ratio: nothing corrects tokens that are up to "
                f"{lag} steps old (staleness.max_lag); set proximal: recompute with a correction, policy_loss: "
                "truncated_reinforce, or max_lag: 0"
            )
        if algorithm.rejections:
            yield (
                "algorithm.rejections compare proximal and behaviour policy, but algorithm.proximal is behaviour, the same; drop "
                "them, or set proximal: recompute"
            )
    elif correction == "none" and lag > 0 and not _is_own(algorithm.policy_loss):
        yield (
            f"algorithm.correction is none, but algorithm.proximal is {algorithm.proximal}, whose loss leaves the age of tokens "
            f"(up to {lag} steps: staleness.max_lag) to the correction; set correction: truncate, or proximal: behaviour "
            "with a loss that has a ratio, or max_lag: 0"
        )


def _interpolation_saves_something(config: "Config") -> Iterator[str]:
    if config.algorithm.proximal != "log_linear":
        return
    if config.batch.minibatches * config.batch.epochs == 1:
        yield (
            "algorithm.proximal is log_linear, but with one optimizer step per batch (batch.minibatches * epochs) the exact "
            "proximal policy costs no forward pass; set proximal: recompute"
        )
    if config.staleness.max_lag == 0:
        yield (
            "algorithm.proximal is log_linear, which is the behaviour policy itself at staleness.max_lag 0; set proximal: "
            "behaviour with correction: none, or recompute"
        )


def _rejections_reject(config: "Config") -> Iterator[str]:
    for choice in config.algorithm.rejections:
        if choice.name in ("none", "truncate"):
            yield (
                f"algorithm.rejections has `{choice.name}`, which rejects nothing; take mask, reject or veto, or make it the "
                "correction"
            )


def _normalised_weights_are_known(config: "Config") -> Iterator[str]:
    """Their mean over the optimizer step is made before the step."""
    algorithm = config.algorithm
    if algorithm.correction.params.get("normalise") and algorithm.proximal == "log_linear":
        yield (
            "algorithm.correction.normalise needs the weights of the whole step before it, but algorithm.proximal is log_linear, "
            "which gives them in the middle of it; set proximal: recompute, or normalise: false"
        )


def _kl_acts(config: "Config") -> Iterator[str]:
    kl, default = config.algorithm.kl, KLConfig()
    acting = [
        key for key in ("placement", "target", "reference_decay", "bias_corrected") if getattr(kl, key) != getattr(default, key)
    ]
    if not kl.coefficient:
        for key in acting:
            yield (
                f"algorithm.kl.{key} is {getattr(kl, key)}, but algorithm.kl.coefficient is 0 and stays so: there is no "
                "reference model; set a coefficient, e.g. 0.001, or drop the key"
            )
    if kl.horizon != default.horizon and kl.target is None:
        yield "algorithm.kl.horizon is set, but only the way to a target depends on it; set algorithm.kl.target or drop horizon"


def _kl_estimator_fits_its_place(config: "Config") -> Iterator[str]:
    kl = config.algorithm.kl
    name = kl.estimator.name
    if kl.coefficient and kl.placement == "loss" and name == "k1" and not kl.bias_corrected:
        yield (
            "algorithm.kl.estimator is k1, whose gradient in the loss is zero on average; allowed there are k2, k3, abs, k1+, "
            "k3+ and abs+; set one of them (k1+ has k1's value and a gradient), bias_corrected: true, or placement: reward"
        )
    if kl.bias_corrected and kl.placement == "reward":
        yield (
            "algorithm.kl.bias_corrected is true, but algorithm.kl.placement is reward, where the KL has no gradient; drop it, "
            "or set placement: loss"
        )
    if kl.bias_corrected and name in PLAIN:
        yield (
            f"algorithm.kl.estimator is {name}, which takes the gradient of k2, but algorithm.kl.bias_corrected needs the "
            f"estimator's own; set {PLAIN[name]}"
        )
    if kl.coefficient and kl.placement == "reward" and name in PLAIN:
        yield (
            f"algorithm.kl.estimator is {name}, which differs from {PLAIN[name]} in its gradient only, and the reward uses the "
            f"value only; set {PLAIN[name]}"
        )


def _entropy_controller_has_room(config: "Config") -> Iterator[str]:
    entropy, default = config.algorithm.entropy, EntropyConfig()
    if entropy.target is None:
        for key in ("step", "maximum"):
            if getattr(entropy, key) != getattr(default, key):
                yield f"algorithm.entropy.{key} is set, but no target to reach; set algorithm.entropy.target or drop {key}"
    elif not 0 <= entropy.coefficient <= entropy.maximum:
        yield (
            f"algorithm.entropy.coefficient is {entropy.coefficient}, where the adaptive coefficient begins; allowed is 0 to "
            f"{entropy.maximum} (maximum); set it to 0, or drop target for a fixed one"
        )


def _critic_is_used(config: "Config") -> Iterator[str]:
    advantage, critic = config.algorithm.advantage, config.critic
    if _is_own(advantage):
        return
    has_critic = "values_T" in registry.NEEDS.get(("advantage", advantage.name), ())
    if not has_critic and critic != CriticConfig():
        yield (
            f"critic is set, but advantage `{advantage.name}` needs no values, so there is none; drop the section or set "
            "algorithm.advantage: gae"
        )
    if has_critic and critic.warmup_steps >= config.learner.steps:
        yield (
            f"critic.warmup_steps is {critic.warmup_steps} of {config.learner.steps} steps (learner.steps): the policy would "
            "never learn; lower it"
        )


def _fresh_tokens_are_kept(config: "Config") -> Iterator[str]:
    """The ratio of a token that the policy itself has just sampled is 1."""
    algorithm = config.algorithm
    chosen = {"correction": algorithm.correction}
    chosen |= {f"rejections.{index}": choice for index, choice in enumerate(algorithm.rejections)}
    for where, correction in chosen.items():
        if correction.name not in ("mask", "reject", "veto") or correction.params.get("divergence", "k1") != "k1":
            continue
        for key, side in (("low", -1.0), ("high", 1.0)):
            bound = correction.params.get(key)
            if isinstance(bound, int | float) and side * (bound - 1.0) <= 0:
                yield (
                    f"algorithm.{where}.{key} is {bound}, but the ratio of a fresh token is 1, give or take rounding: "
                    f"`{correction.name}` would reject data of the policy itself; set it {'above' if side > 0 else 'below'} 1"
                )


def _gdpo_sees_parts(config: "Config") -> Iterator[str]:
    """It normalises the parts of the reward as they were scored, so what is done to their sum never reaches it."""
    advantage = config.algorithm.advantage
    if advantage.name != "gdpo":
        return
    if config.algorithm.shaping:
        yield "algorithm.shaping changes the sum of the reward, but advantage `gdpo` sees its parts; make it a reward function"
    if config.algorithm.kl.placement == "reward":
        yield "algorithm.kl.placement is reward, but advantage `gdpo` sees the parts of the reward only; set placement: loss"
    weights, parts = advantage.params.get("weights"), {function.part for function in config.reward.functions}
    if isinstance(weights, Mapping) and (unknown := set(weights) - parts):
        yield (
            f"algorithm.advantage.weights names {', '.join(sorted(unknown))}; the parts of the reward are "
            f"{', '.join(sorted(parts))}; use their names"
        )


def _shaping_spares_somebody(config: "Config") -> Iterator[str]:
    limit = config.sampling.max_response_tokens
    for index, choice in enumerate(config.algorithm.shaping):
        buffer = choice.params.get("buffer_tokens")
        if choice.name == "soft_overlong" and isinstance(buffer, int) and buffer >= limit:
            yield (
                f"algorithm.shaping.{index}.buffer_tokens is {buffer}, not below sampling.max_response_tokens ({limit}): every "
                f"answer would be punished for its length; set it to a fifth of that, {max(1, limit // 5)}, or raise the limit"
            )


def _is_own(choice: Choice) -> bool:
    return ":" in choice.name


RULES: tuple[Rule, ...] = (
    _groups_can_be_compared,
    _hangs_are_told_from_transfers,
    _silence_is_told_from_death,
    _each_generator_has_a_port,
    _numbers_are_exact_everywhere,
    _samples_differ,
    _system_message_has_a_template,
    _one_store,
    _sequences_fit,
    _store_holds_what_is_open,
    _shards_divide,
    _stale_tokens_are_corrected,
    _rejections_reject,
    _normalised_weights_are_known,
    _interpolation_saves_something,
    _kl_acts,
    _kl_estimator_fits_its_place,
    _entropy_controller_has_room,
    _critic_is_used,
    _fresh_tokens_are_kept,
    _gdpo_sees_parts,
    _shaping_spares_somebody,
)
