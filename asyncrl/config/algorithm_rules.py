"""The rules of `agreements` about the algorithm. They do not judge a user's own functions."""

from collections.abc import Callable, Iterator, Mapping

from asyncrl.config import registry
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, EntropyConfig, KLConfig
from asyncrl.config.base import Choice, Mistake
from asyncrl.config.sections import BatchConfig, LearnerConfig, RewardConfig, SamplingConfig, StalenessConfig

# Advantages that need at least two rollouts of a prompt.
GROUP_ADVANTAGES = frozenset(
    {
        "grpo",
        "dr_grpo",
        "rloo",
        "grpo_passk",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "maxrl",
        "lite_ppo",
        "gdpo",
    }
    | {"optimal_token_baseline"}
)

# Policy losses without a probability ratio: only a correction can account for the age of a token.
WITHOUT_RATIO = frozenset({"reinforce", "gpg"})

# Estimators with the value of the plain one, but with a gradient of their own.
PLAIN = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}


def _groups_can_be_compared(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Mistake]:
    name = algorithm.advantage.name
    if batch.group_size == 1 and name in GROUP_ADVANTAGES:
        yield Mistake(
            ("batch.group_size", "algorithm.advantage"),
            f"batch.group_size is 1, but advantage `{name}` compares rollouts of one group; use group_size "
            ">= 2 or another advantage",
        )


def _stale_tokens_are_corrected(algorithm: AlgorithmConfig, staleness: StalenessConfig) -> Iterator[Mistake]:
    """Exactly one of the two, the correction or the loss, must account for the age of tokens."""
    lag = staleness.max_lag
    loss, correction = algorithm.policy_loss.name, algorithm.correction.name
    if algorithm.proximal == "behaviour":
        if correction != "none":
            yield Mistake(
                ("algorithm.correction", "algorithm.proximal"),
                f"algorithm.correction is `{correction}`, but with algorithm.proximal behaviour it would "
                "compare the behaviour policy with itself, and every weight would be 1; set correction: "
                "none, or proximal: recompute",
            )
        if loss in WITHOUT_RATIO and lag > 0:
            yield Mistake(
                ("algorithm.proximal", "algorithm.policy_loss", "staleness.max_lag"),
                f"algorithm.proximal is behaviour and policy_loss `{loss}` has no ratio: nothing corrects "
                f"tokens that are up to {lag} steps old (staleness.max_lag); set proximal: recompute with a "
                "correction, policy_loss: truncated_reinforce, or max_lag: 0",
            )
        if algorithm.rejections:
            yield Mistake(
                ("algorithm.rejections", "algorithm.proximal"),
                "algorithm.rejections compare proximal and behaviour policy, but algorithm.proximal is "
                "behaviour, the same; drop them, or set proximal: recompute",
            )
    elif correction == "none" and lag > 0 and not _is_own(algorithm.policy_loss):
        yield Mistake(
            ("algorithm.correction", "algorithm.proximal", "algorithm.policy_loss", "staleness.max_lag"),
            f"algorithm.correction is none, but algorithm.proximal is {algorithm.proximal}, whose loss "
            f"leaves the age of tokens (up to {lag} steps: staleness.max_lag) to the correction; set "
            "correction: truncate, or proximal: behaviour with a loss that has a ratio, or max_lag: 0",
        )


def _rejections_reject(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    for choice in algorithm.rejections:
        if choice.name in ("none", "truncate"):
            yield Mistake(
                ("algorithm.rejections",),
                f"algorithm.rejections has `{choice.name}`, which rejects nothing; take mask, reject or "
                "veto, or make it the correction",
            )


def _normalised_weights_are_known(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    """Normalised weights need the mean over the optimizer step before the step begins."""
    if algorithm.correction.params.get("normalise") and algorithm.proximal == "log_linear":
        yield Mistake(
            ("algorithm.correction.normalise", "algorithm.proximal"),
            "algorithm.correction.normalise needs the weights of the whole step before it, but "
            "algorithm.proximal is log_linear, which gives them in the middle of it; set proximal: "
            "recompute, or normalise: false",
        )


def _interpolation_saves_something(
    algorithm: AlgorithmConfig, batch: BatchConfig, staleness: StalenessConfig
) -> Iterator[Mistake]:
    if algorithm.proximal != "log_linear":
        return
    if batch.minibatches * batch.epochs == 1:
        yield Mistake(
            ("algorithm.proximal", "batch.minibatches", "batch.epochs"),
            "algorithm.proximal is log_linear, but with one optimizer step per batch (batch.minibatches * "
            "epochs) the exact proximal policy costs no forward pass; set proximal: recompute",
        )
    if staleness.max_lag == 0:
        yield Mistake(
            ("algorithm.proximal", "staleness.max_lag"),
            "algorithm.proximal is log_linear, which is the behaviour policy itself at staleness.max_lag "
            "0; set proximal: behaviour with correction: none, or recompute",
        )


def _kl_acts(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    kl, default = algorithm.kl, KLConfig()
    acting = [
        key
        for key in ("placement", "target", "reference_decay", "bias_corrected")
        if getattr(kl, key) != getattr(default, key)
    ]
    if not kl.coefficient:
        for key in acting:
            yield Mistake(
                (f"algorithm.kl.{key}", "algorithm.kl.coefficient"),
                f"algorithm.kl.{key} is {getattr(kl, key)}, but algorithm.kl.coefficient is 0 and stays so: "
                "there is no reference model; set a coefficient, e.g. 0.001, or drop the key",
            )
    if kl.horizon != default.horizon and kl.target is None:
        yield Mistake(
            ("algorithm.kl.horizon", "algorithm.kl.target"),
            "algorithm.kl.horizon is set, but only the way to a target depends on it; set "
            "algorithm.kl.target or drop horizon",
        )


def _kl_estimator_fits_its_place(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    kl = algorithm.kl
    name = kl.estimator.name
    if kl.coefficient and kl.placement == "loss" and name == "k1" and not kl.bias_corrected:
        yield Mistake(
            (
                "algorithm.kl.estimator",
                "algorithm.kl.bias_corrected",
                "algorithm.kl.placement",
                "algorithm.kl.coefficient",
            ),
            "algorithm.kl.estimator is k1, whose gradient in the loss is zero on average; allowed there "
            "are k2, k3, abs, k1+, k3+ and abs+; set one of them (k1+ has k1's value and a gradient), "
            "bias_corrected: true, or placement: reward",
        )
    if kl.bias_corrected and kl.placement == "reward":
        yield Mistake(
            ("algorithm.kl.bias_corrected", "algorithm.kl.placement"),
            "algorithm.kl.bias_corrected is true, but algorithm.kl.placement is reward, where the KL has "
            "no gradient; drop it, or set placement: loss",
        )
    if kl.bias_corrected and name in PLAIN:
        yield Mistake(
            ("algorithm.kl.estimator", "algorithm.kl.bias_corrected"),
            f"algorithm.kl.estimator is {name}, which takes the gradient of k2, but "
            f"algorithm.kl.bias_corrected needs the estimator's own; set {PLAIN[name]}",
        )
    if kl.coefficient and kl.placement == "reward" and name in PLAIN:
        yield Mistake(
            ("algorithm.kl.estimator", "algorithm.kl.placement", "algorithm.kl.coefficient"),
            f"algorithm.kl.estimator is {name}, which differs from {PLAIN[name]} in its gradient only, and "
            f"the reward uses the value only; set {PLAIN[name]}",
        )


def _entropy_controller_has_room(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    entropy, default = algorithm.entropy, EntropyConfig()
    if entropy.target is None:
        for key in ("step", "maximum"):
            if getattr(entropy, key) != getattr(default, key):
                yield Mistake(
                    (f"algorithm.entropy.{key}", "algorithm.entropy.target"),
                    f"algorithm.entropy.{key} is set, but no target to reach; set algorithm.entropy.target "
                    f"or drop {key}",
                )
    elif not 0 <= entropy.coefficient <= entropy.maximum:
        yield Mistake(
            ("algorithm.entropy.coefficient", "algorithm.entropy.maximum", "algorithm.entropy.target"),
            f"algorithm.entropy.coefficient is {entropy.coefficient}, where the adaptive coefficient "
            f"begins; allowed is 0 to {entropy.maximum} (maximum); set it to 0, or drop target for a fixed "
            "one",
        )


def _critic_is_used(
    algorithm: AlgorithmConfig, critic: CriticConfig, learner: LearnerConfig
) -> Iterator[Mistake]:
    advantage = algorithm.advantage
    if _is_own(advantage):
        return
    has_critic = "values_T" in registry.NEEDS.get(("advantage", advantage.name), ())
    if not has_critic and critic != CriticConfig():
        yield Mistake(
            ("critic", "algorithm.advantage"),
            f"critic is set, but advantage `{advantage.name}` needs no values, so there is none; drop the "
            "section or set algorithm.advantage: gae",
        )
    if has_critic and critic.warmup_steps >= learner.steps:
        yield Mistake(
            ("critic.warmup_steps", "learner.steps"),
            f"critic.warmup_steps is {critic.warmup_steps} of {learner.steps} steps (learner.steps): the "
            "policy would never learn; lower it",
        )


def _fresh_tokens_are_kept(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    """A token that the current policy has just sampled has the ratio 1, so a bound must not exclude 1."""
    chosen = {"correction": algorithm.correction}
    chosen |= {f"rejections.{index}": choice for index, choice in enumerate(algorithm.rejections)}
    for where, correction in chosen.items():
        if (
            correction.name not in ("mask", "reject", "veto")
            or correction.params.get("divergence", "k1") != "k1"
        ):
            continue
        for key, side in (("low", -1.0), ("high", 1.0)):
            bound = correction.params.get(key)
            if isinstance(bound, int | float) and side * (bound - 1.0) <= 0:
                yield Mistake(
                    (f"algorithm.{where}.{key}",),
                    f"algorithm.{where}.{key} is {bound}, but the ratio of a fresh token is 1, give or take "
                    f"rounding: `{correction.name}` would reject data of the policy itself; set it "
                    f"{'above' if side > 0 else 'below'} 1",
                )


def _gdpo_sees_parts(algorithm: AlgorithmConfig, reward: RewardConfig) -> Iterator[Mistake]:
    """GDPO normalises each part of the reward as it was scored, so changes to the sum do not reach it."""
    advantage = algorithm.advantage
    if advantage.name != "gdpo":
        return
    if algorithm.shaping:
        yield Mistake(
            ("algorithm.shaping", "algorithm.advantage"),
            "algorithm.shaping changes the sum of the reward, but advantage `gdpo` sees its parts; make it "
            "a reward function",
        )
    if algorithm.kl.placement == "reward":
        yield Mistake(
            ("algorithm.kl.placement", "algorithm.advantage"),
            "algorithm.kl.placement is reward, but advantage `gdpo` sees the parts of the reward only; set "
            "placement: loss",
        )
    weights, parts = advantage.params.get("weights"), {function.part for function in reward.functions}
    if isinstance(weights, Mapping) and (unknown := set(weights) - parts):
        yield Mistake(
            ("algorithm.advantage.weights", "reward.functions"),
            f"algorithm.advantage.weights names {', '.join(sorted(unknown))}; the parts of the reward are "
            f"{', '.join(sorted(parts))}; use their names",
        )


def _shaping_spares_somebody(sampling: SamplingConfig, algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    limit = sampling.max_response_tokens
    for index, choice in enumerate(algorithm.shaping):
        buffer = choice.params.get("buffer_tokens")
        if choice.name == "soft_overlong" and isinstance(buffer, int) and buffer >= limit:
            yield Mistake(
                (f"algorithm.shaping.{index}.buffer_tokens", "sampling.max_response_tokens"),
                f"algorithm.shaping.{index}.buffer_tokens is {buffer}, not below "
                f"sampling.max_response_tokens ({limit}): every answer would be punished for its length; "
                f"set it to a fifth of that, {max(1, limit // 5)}, or raise the limit",
            )


def _is_own(choice: Choice) -> bool:
    return ":" in choice.name


ALGORITHM_RULES: tuple[Callable[..., Iterator[Mistake]], ...] = (
    _groups_can_be_compared,
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
