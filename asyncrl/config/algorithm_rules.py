"""The rules of `agreements` about the algorithm. They do not judge a user's own functions."""

from collections.abc import Callable, Iterator, Mapping

from asyncrl.config import registry
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, EntropyConfig, KLConfig
from asyncrl.config.base import Choice, Mistake
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.reward_section import RewardConfig, reward_parts
from asyncrl.config.sections import BatchConfig, LearnerConfig, SamplingConfig, StalenessConfig

# Advantages that need at least two rollouts of a prompt.
GROUP_ADVANTAGES = {"grpo", "dr_grpo", "rloo", "grpo_passk", "reinforce_plus_plus_baseline", "opo"}
GROUP_ADVANTAGES |= {"gpg", "maxrl", "lite_ppo", "gdpo", "optimal_token_baseline"}
GROUP_ADVANTAGES |= {"turn_rloo", "gigpo", "mt_grpo", *registry.ON_PAIRS}

# Advantages whose objective depends on the size of the group: pass@k for k episodes.
WHOLE_GROUPS = {"grpo_passk"}

# Policy losses without a probability ratio: only a correction can account for the age of a token.
WITHOUT_RATIO = frozenset({"reinforce", "gpg"})

# Corrections that keep tokens with a bounded weight.
CAPPED = frozenset({"truncate", "reject", "veto"})

# Estimators with the value of the plain one, but with a gradient of their own.
PLAIN = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}


def _groups_can_be_compared(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Mistake]:
    name, params = algorithm.advantage.name, algorithm.advantage.params
    compares = name in GROUP_ADVANTAGES and params.get("threshold") is None
    if batch.group_size == 1 and (compares or (name == "distill" and params.get("reward"))):
        cure = "use group_size >= 2 or another advantage"
        text = f"batch.group_size is 1, but advantage `{name}` compares rollouts of one group; {cure}"
        yield Mistake(("batch.group_size", "algorithm.advantage"), text)


def _groups_may_lack_episodes(
    algorithm: AlgorithmConfig, batch: BatchConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    key, missing, name = "batch.missing_episodes", batch.missing_episodes, algorithm.advantage.name
    found = f"{key} is {missing}"
    if missing and not environment.is_used:
        text = f"{found}, but only episodes of an environment can fail alone; drop it, or name an environment"
        yield Mistake((key, "environment.uses"), text)
    elif missing >= batch.group_size:
        text = f"{found}, but of batch.group_size {batch.group_size} at least one episode must be left"
        yield Mistake((key, "batch.group_size"), f"{text}; allowed is at most {batch.group_size - 1}")
    if missing and name in WHOLE_GROUPS:
        text = f"{found}, but advantage `{name}` maximises pass@k, where k is the size of a whole group"
        yield Mistake((key, "algorithm.advantage"), f"{text}; set it to 0, or take grpo or rloo")


def _stale_tokens_are_corrected(algorithm: AlgorithmConfig, staleness: StalenessConfig) -> Iterator[Mistake]:
    """Either the correction or the loss, but not both, must account for the age of tokens."""
    lag = staleness.max_lag
    loss, correction = algorithm.policy_loss.name, algorithm.correction.name
    ages = lag > 0 and algorithm.advantage.name not in registry.ON_PAIRS
    if algorithm.proximal == "behaviour":
        if correction != "none":
            yield Mistake(
                ("algorithm.correction", "algorithm.proximal"),
                f"algorithm.correction is `{correction}`, but with algorithm.proximal behaviour it compares "
                "a policy with itself: every weight would be 1; set correction: none, or proximal: recompute",
            )
        if loss in WITHOUT_RATIO and ages:
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
    elif correction == "none" and ages and not _is_own(algorithm.policy_loss):
        yield Mistake(
            ("algorithm.correction", "algorithm.proximal", "algorithm.policy_loss", "staleness.max_lag"),
            f"algorithm.correction is none, but algorithm.proximal is {algorithm.proximal}, whose loss "
            f"leaves the age of tokens (up to {lag} steps: staleness.max_lag) to the correction; set "
            "correction: truncate, or proximal: behaviour with a loss that has a ratio, or max_lag: 0",
        )


def _pairs_are_trained_whole(
    algorithm: AlgorithmConfig, batch: BatchConfig, staleness: StalenessConfig
) -> Iterator[Mistake]:
    """The gradient of a loss on given episodes needs the weights of the step's beginning, and all tokens."""
    name, key = algorithm.advantage.name, "algorithm.advantage"
    sees_rewards = name in registry.ON_PAIRS or name == "distill"
    if sees_rewards and algorithm.kl.coefficient and algorithm.kl.placement == "reward":
        text = f"algorithm.kl.placement is reward, but advantage `{name}` has its own use of the reference"
        yield Mistake(("algorithm.kl.placement", key), f"{text}; set placement: loss, or coefficient: 0")
    if name not in registry.ON_PAIRS:
        return
    reason = f"advantage `{name}` is the gradient of a loss on whole episodes, at the weights before a step"
    wanted: tuple[tuple[str, object, object], ...] = (
        ("algorithm.policy_loss", algorithm.policy_loss.name, "reinforce"),
        ("algorithm.aggregation", algorithm.aggregation.name, "seq-mean-token-sum"),
        ("algorithm.correction", algorithm.correction.name, "none"),
        ("algorithm.rejections", [choice.name for choice in algorithm.rejections], []),
        ("algorithm.mask_truncated", algorithm.mask_truncated, False),
        ("staleness.policy", staleness.policy, "drop" if staleness.policy == "drop" else "correct_only"),
        ("batch.minibatches", batch.minibatches, 1),
        ("batch.epochs", batch.epochs, 1),
    )
    for one, found, allowed in wanted:
        if found != allowed and ":" not in str(found):
            text = f"{one} is {found}, but {reason}; set it to {allowed}"
            yield Mistake((one, key), text.replace("True", "true").replace("False", "false").replace("'", ""))


def _rejections_reject(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    for choice in algorithm.rejections:
        if choice.name in ("none", "truncate"):
            cure = "take mask, reject or veto, or make it the correction"
            text = f"algorithm.rejections has `{choice.name}`, which rejects nothing; {cure}"
            yield Mistake(("algorithm.rejections",), text)


def _normalised_weights_are_known(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    """Normalised weights need the mean over the optimizer step before the step begins."""
    if algorithm.correction.params.get("normalise") and algorithm.proximal == "log_linear":
        yield Mistake(
            ("algorithm.correction.normalise", "algorithm.proximal"),
            "algorithm.correction.normalise needs the weights of the whole step before it, but "
            "algorithm.proximal: log_linear gives them during the step; set recompute, or normalise: false",
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
    kl, default, advantage = algorithm.kl, KLConfig(), algorithm.advantage
    needed = registry.NEEDS.get(("advantage", advantage.name), frozenset())
    has_reference = _is_own(advantage) or "reference_logprobs_T" in needed
    for key in ("estimator", "placement", "target", "reference_decay", "bias_corrected"):
        if key in ("estimator", "reference_decay") and has_reference:
            continue
        found = getattr(kl, key)
        if found != getattr(default, key) and not kl.coefficient:
            yield Mistake(
                (f"algorithm.kl.{key}", "algorithm.kl.coefficient"),
                f"algorithm.kl.{key} is {getattr(found, 'name', found)}, but algorithm.kl.coefficient "
                "is 0 and stays so: there is no reference model; set a coefficient, e.g. 0.001, or drop it",
            )
    if algorithm.reference and not (kl.coefficient or has_reference):
        yield Mistake(
            ("algorithm.reference", "algorithm.kl.coefficient", "algorithm.advantage"),
            f"algorithm.reference is set, but neither algorithm.kl nor advantage `{advantage.name}` uses a "
            "reference; drop it, set kl.coefficient, or take an advantage that does, such as distill",
        )
    if algorithm.reference and kl.reference_decay < 1:
        yield Mistake(
            ("algorithm.reference", "algorithm.kl.reference_decay"),
            "algorithm.reference is a model of its own, and algorithm.kl.reference_decay would mix the "
            "policy's weights into it; drop one of them",
        )
    if kl.horizon != default.horizon and kl.target is None:
        text = "algorithm.kl.horizon is set, but there is no target; set algorithm.kl.target or drop horizon"
        yield Mistake(("algorithm.kl.horizon", "algorithm.kl.target"), text)


def _kl_estimator_fits_its_place(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    kl = algorithm.kl
    name, key = kl.estimator.name, "algorithm.kl.estimator"
    corrected, placement, coefficient = (
        f"algorithm.kl.{one}" for one in ("bias_corrected", "placement", "coefficient")
    )
    if kl.coefficient and kl.placement == "loss" and name == "k1" and not kl.bias_corrected:
        yield Mistake(
            (key, corrected, placement, coefficient),
            f"{key} is k1, whose gradient in the loss is zero on average; allowed there are k2, k3, abs, "
            "k1+, k3+ and abs+; set one of them (k1+ has k1's value and a gradient), bias_corrected: true, "
            "or placement: reward",
        )
    if kl.bias_corrected and kl.placement == "reward":
        cure = "drop it, or set placement: loss"
        text = f"{corrected} is true, but {placement} is reward, where the KL has no gradient; {cure}"
        yield Mistake((corrected, placement), text)
    if kl.bias_corrected and name in PLAIN:
        cure = f"but {corrected} needs the estimator's own; set {PLAIN[name]}"
        yield Mistake((key, corrected), f"{key} is {name}, which takes the gradient of k2, {cure}")
    if kl.coefficient and kl.placement == "reward" and name in PLAIN:
        yield Mistake(
            (key, placement, coefficient),
            f"{key} is {name}, which differs from {PLAIN[name]} in its gradient only, and the reward uses "
            f"the value only; set {PLAIN[name]}",
        )


def _entropy_controller_has_room(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    entropy, default, target = algorithm.entropy, EntropyConfig(), "algorithm.entropy.target"
    if entropy.target is None:
        for key in ("step", "maximum"):
            if getattr(entropy, key) != getattr(default, key):
                text = f"algorithm.entropy.{key} is set, but there is no target; set {target} or drop {key}"
                yield Mistake((f"algorithm.entropy.{key}", target), text)
    elif not 0 <= entropy.coefficient <= entropy.maximum:
        yield Mistake(
            ("algorithm.entropy.coefficient", "algorithm.entropy.maximum", target),
            f"algorithm.entropy.coefficient is {entropy.coefficient}, the initial value of the adaptive one; "
            f"allowed is 0 to {entropy.maximum} (maximum); set it to 0, or drop target for a fixed one",
        )


def _critic_is_used(
    algorithm: AlgorithmConfig, critic: CriticConfig, learner: LearnerConfig
) -> Iterator[Mistake]:
    name = algorithm.advantage.name
    if _is_own(algorithm.advantage):
        return
    has_critic = "values_T" in registry.NEEDS.get(("advantage", name), ())
    if not has_critic and critic != CriticConfig():
        cure = "drop the section or set algorithm.advantage: gae"
        text = f"critic is set, but advantage `{name}` needs no values, so there is none; {cure}"
        yield Mistake(("critic", "algorithm.advantage"), text)
    if has_critic and critic.warmup_steps >= learner.steps:
        found = f"critic.warmup_steps is {critic.warmup_steps} of {learner.steps} steps (learner.steps)"
        text = f"{found}: the policy would never learn; lower it"
        yield Mistake(("critic.warmup_steps", "learner.steps"), text)


def _an_environment_scores_turns(
    algorithm: AlgorithmConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    name = algorithm.advantage.name
    needs = registry.NEEDS.get(("advantage", name), frozenset())
    if environment.command and "turn_states_K" in needs:
        found = f"algorithm.advantage is {name}, which compares turns from the same state"
        text = f"{found}, but an agent (environment.command) names no states; take rloo or grpo"
        yield Mistake(("algorithm.advantage", "environment.command"), text)
    if not environment.is_used and needs & registry.OF_TURNS:
        found = f"algorithm.advantage is {name}, which needs rewards or states of turns"
        text = (
            f"{found}, but there is no environment to give them; set environment.uses, or take rloo or grpo"
        )
        yield Mistake(("algorithm.advantage", "environment.uses"), text)


def _fresh_tokens_are_kept(algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    """A token that the current policy has just sampled has the ratio 1, so it must be kept with weight 1."""
    chosen = {"correction": algorithm.correction}
    chosen |= {f"rejections.{index}": choice for index, choice in enumerate(algorithm.rejections)}
    for where, correction in chosen.items():
        for key, sign, allowed in (("cap", 1.0, "at least"), ("floor", -1.0, "at most")):
            bound = correction.params.get(key)
            if correction.name in CAPPED and isinstance(bound, int | float) and sign * (bound - 1.0) < 0:
                yield Mistake(
                    (f"algorithm.{where}.{key}",),
                    f"algorithm.{where}.{key} is {bound}, but the ratio of a fresh token is 1, so "
                    f"`{correction.name}` would weigh every token by {bound}, like another learning rate; "
                    f"set it to {allowed} 1, and learner.optimizer.lr for a smaller step",
                )
        bounds_a_ratio = correction.params.get("divergence", "k1") == "k1"
        if correction.name not in ("mask", "reject", "veto") or not bounds_a_ratio:
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


def _gdpo_sees_parts(
    algorithm: AlgorithmConfig, reward: RewardConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    """GDPO normalises each part of the reward as it was scored, so changes to the sum do not reach it."""
    advantage, key = algorithm.advantage, "algorithm.advantage"
    if advantage.name != "gdpo":
        return
    if algorithm.shaping:
        found = "algorithm.shaping changes the sum of the reward, but advantage `gdpo` sees its parts"
        yield Mistake(("algorithm.shaping", key), f"{found}; make it a reward function")
    if algorithm.kl.placement == "reward":
        found = "algorithm.kl.placement is reward, but advantage `gdpo` sees only the parts of the reward"
        yield Mistake(("algorithm.kl.placement", key), f"{found}; set placement: loss")
    weights, parts = advantage.params.get("weights"), set(reward_parts(reward, environment))
    if isinstance(weights, Mapping) and (unknown := set(weights) - parts):
        allowed = f"the parts of the reward are {', '.join(sorted(parts))}; use their names"
        text = f"{key}.weights names {', '.join(sorted(unknown))}; {allowed}"
        yield Mistake((f"{key}.weights", "reward.functions"), text)


def _shaping_has_an_effect(sampling: SamplingConfig, algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    limit = sampling.max_response_tokens
    for index, choice in enumerate(algorithm.shaping):
        key, buffer = f"algorithm.shaping.{index}.buffer_tokens", choice.params.get("buffer_tokens")
        if choice.name == "soft_overlong" and isinstance(buffer, int) and buffer >= limit:
            yield Mistake(
                (key, "sampling.max_response_tokens"),
                f"{key} is {buffer}, not below sampling.max_response_tokens ({limit}): every answer would be "
                f"punished for its length; set a fifth of that, {max(1, limit // 5)}, or raise the limit",
            )


def _is_own(choice: Choice) -> bool:
    return ":" in choice.name


ALGORITHM_RULES: tuple[Callable[..., Iterator[Mistake]], ...] = (
    _groups_can_be_compared,
    _groups_may_lack_episodes,
    _stale_tokens_are_corrected,
    _pairs_are_trained_whole,
    _rejections_reject,
    _normalised_weights_are_known,
    _interpolation_saves_something,
    _kl_acts,
    _kl_estimator_fits_its_place,
    _entropy_controller_has_room,
    _critic_is_used,
    _an_environment_scores_turns,
    _fresh_tokens_are_kept,
    _gdpo_sees_parts,
    _shaping_has_an_effect,
)
