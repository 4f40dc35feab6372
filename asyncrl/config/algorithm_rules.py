"""The rules about the algorithm and its optimizers. They do not judge a user's own functions."""

from collections.abc import Iterator, Mapping

from asyncrl.config import registry
from asyncrl.config.algorithm import CriticConfig, KLConfig, OptimizerConfig
from asyncrl.config.base import Choice, Mistake, broken
from asyncrl.config.reward_section import TEACHER_NAME, reward_parts
from asyncrl.config.run_fields import RunFields
from asyncrl.config.sections import BatchConfig, LearnerConfig
from asyncrl.errors import ConfigError

# Advantages that need at least two rollouts of a prompt.
GROUP_ADVANTAGES = {"grpo", "dr_grpo", "rloo", "grpo_passk", "reinforce_plus_plus_baseline", "opo"}
GROUP_ADVANTAGES |= {"gpg", "maxrl", "lite_ppo", "gdpo", "optimal_token_baseline"}
GROUP_ADVANTAGES |= {"turn_rloo", "gigpo", "mt_grpo", *registry.ON_PAIRS}

# Policy losses without a probability ratio: only a correction can account for the age of a token.
WITHOUT_RATIO = frozenset({"reinforce", "gpg"})

# Corrections that keep tokens with a bounded weight.
CAPPED = frozenset({"truncate", "reject", "veto", "m2po"})

# Estimators with the value of the plain one, but with a gradient of their own.
PLAIN = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}


def _groups_can_be_compared(run: RunFields) -> Iterator[Mistake]:
    batch, missing = run.batch, run.batch.missing_episodes
    name, params = run.algorithm.advantage.name, run.algorithm.advantage.params
    compares = name in GROUP_ADVANTAGES and params.get("threshold") is None
    if batch.group_size == 1 and (compares or (name == "distill" and params.get("reward"))):
        text = f"batch.group_size is 1, but advantage `{name}` compares rollouts of one group; use "
        yield broken("batch.group_size algorithm.advantage", f"{text}group_size >= 2 or another advantage")
    key, found = "batch.missing_episodes", f"batch.missing_episodes is {missing}"
    if missing >= batch.group_size:
        text = f"{found}, but of batch.group_size {batch.group_size} at least one episode must be left"
        yield broken(f"{key} batch.group_size", f"{text}; allowed is at most {batch.group_size - 1}")
    if missing and name == "grpo_passk":
        text = f"{found}, but advantage `{name}` maximises pass@k, where k is the size of a whole group"
        yield broken(f"{key} algorithm.advantage", f"{text}; set it to 0, or take grpo or rloo")
    needed = registry.NEEDS.get(("advantage", name), frozenset())
    if run.environment.command and "turn_states_K" in needed:
        text = f"algorithm.advantage is {name}, which compares turns from the same state, but an agent "
        text += "(environment.command) names no states; take rloo or grpo"
        yield broken("algorithm.advantage environment.command", text)
    if not run.environment.is_used and needed & registry.OF_TURNS:
        text = f"algorithm.advantage is {name}, which needs rewards or states of turns, but there is no "
        text += "environment to give them; set environment.uses, or take rloo or grpo"
        yield broken("algorithm.advantage environment.uses", text)


def episodes_can_fail(run: RunFields) -> Iterator[Mistake]:
    """A rule of the run: of several sources, one with an environment is enough."""
    key, missing = "batch.missing_episodes", run.batch.missing_episodes
    if missing and not any(one.environment.is_used for one in run.training):
        text = f"{key} is {missing}, but only episodes of an environment can fail alone; drop it, or name an "
        yield broken(f"{key} environment.uses data.train", f"{text}environment")


def _stale_tokens_are_corrected(run: RunFields) -> Iterator[Mistake]:
    """Either the correction or the loss, but not both, must account for the age of tokens."""
    algorithm, lag, proximal = run.algorithm, run.staleness.max_lag, "algorithm.proximal"
    loss, correction = algorithm.policy_loss.name, algorithm.correction.name
    ages = lag > 0 and algorithm.advantage.name not in registry.ON_PAIRS
    if algorithm.proximal == "behaviour":
        if correction != "none":
            text = f"algorithm.correction is `{correction}`, but with {proximal} behaviour it compares a "
            text += "policy with itself: every weight would be 1; set correction: none, or proximal: "
            yield broken(f"algorithm.correction {proximal}", f"{text}recompute")
        if loss in WITHOUT_RATIO and ages:
            text = f"{proximal} is behaviour and policy_loss `{loss}` has no ratio: nothing corrects tokens "
            text += f"of older policies (staleness.max_lag is {lag}); set proximal: recompute with a "
            text += "correction, policy_loss: truncated_reinforce, or max_lag: 0"
            yield broken(f"{proximal} algorithm.policy_loss staleness.max_lag", text)
        if algorithm.rejections:
            text = f"algorithm.rejections compare proximal and behaviour policy, but {proximal} is behaviour,"
            text += " the same; drop them, or set proximal: recompute"
            yield broken(f"algorithm.rejections {proximal}", text)
    elif correction == "none" and ages and not _is_own(algorithm.policy_loss):
        keys = f"algorithm.correction {proximal} algorithm.policy_loss staleness.max_lag"
        text = f"algorithm.correction is none, but {proximal} is {algorithm.proximal}, whose loss leaves the "
        text += f"age of tokens (staleness.max_lag is {lag}) to the correction; set correction: "
        text += "truncate, or proximal: behaviour with a loss that has a ratio, or max_lag: 0"
        yield broken(keys, text)
    for choice in algorithm.rejections:
        if choice.name in ("none", "truncate"):
            text = f"algorithm.rejections has `{choice.name}`, which rejects nothing; take mask, reject, "
            yield broken("algorithm.rejections", f"{text}veto or m2po, or make it the correction")
        elif (unread := choice.params.keys() & {"cap", "normalise", "weights"}) and not _is_own(choice):
            text = f"algorithm.rejections has `{choice.name}` with {', '.join(sorted(unread))}, but only "
            text += "algorithm.correction weighs tokens; drop it, or set it there"
            yield broken("algorithm.rejections algorithm.correction", text)


def _pairs_are_trained_whole(run: RunFields) -> Iterator[Mistake]:
    """The gradient of a loss on given episodes needs the weights of the step's beginning, and all tokens."""
    algorithm, key = run.algorithm, "algorithm.advantage"
    name, policy = algorithm.advantage.name, run.staleness.policy
    sees_rewards = name in registry.ON_PAIRS or name == "distill"
    if sees_rewards and algorithm.kl.coefficient and algorithm.kl.placement == "reward":
        text = f"algorithm.kl.placement is reward, but advantage `{name}` has its own use of the reference"
        yield broken(f"algorithm.kl.placement {key}", f"{text}; set placement: loss, or coefficient: 0")
    reason = f"advantage `{name}` is the gradient of a loss on whole episodes, at the weights before a step"
    wanted: tuple[tuple[str, object, object], ...] = (
        ("algorithm.policy_loss", algorithm.policy_loss.name, "reinforce"),
        ("algorithm.aggregation", algorithm.aggregation.name, "seq-mean-token-sum"),
        ("algorithm.correction", algorithm.correction.name, "none"),
        ("algorithm.rejections", [choice.name for choice in algorithm.rejections], []),
        ("algorithm.mask_truncated", algorithm.mask_truncated, False),
        ("staleness.policy", policy, "drop" if policy == "drop" else "correct_only"),
        ("batch.minibatches", run.batch.minibatches, 1),
        ("batch.epochs", run.batch.epochs, 1),
    )
    for one, found, allowed in wanted if name in registry.ON_PAIRS else ():
        if found != allowed and ":" not in str(found):
            text = f"{one} is {found}, but {reason}; set it to {allowed}"
            text = text.replace("True", "true").replace("False", "false").replace("'", "")
            yield broken(f"{one} {key}", text)


def _interpolation_saves_something(run: RunFields) -> Iterator[Mistake]:
    key = "algorithm.proximal"
    if run.algorithm.proximal != "log_linear":
        return
    for at, choice in _corrections(run).items():
        if registry.sees_step(choice):
            text = f"{at} `{choice.name}` needs the weights of the whole step before it, but {key}: "
            text += "log_linear gives them during the step; set recompute, or drop m2po and normalise"
            yield broken(f"{at}.normalise {at} {key}", text)
    if run.batch.optimizer_steps == 1:
        text = f"{key} is log_linear, but with one optimizer step per batch (batch.minibatches * epochs) the "
        text += "exact proximal policy costs no forward pass; set proximal: recompute"
        yield broken(f"{key} batch.minibatches batch.epochs", text)
    if run.staleness.max_lag == 0:
        text = f"{key} is log_linear, which is the behaviour policy itself at staleness.max_lag 0; set "
        text += "proximal: behaviour with correction: none, or recompute"
        yield broken(f"{key} staleness.max_lag", text)


def _a_reference_is_used(run: RunFields) -> Iterator[Mistake]:
    kl, advantage, reference = run.algorithm.kl, run.algorithm.advantage, run.algorithm.reference
    needed = registry.NEEDS.get(("advantage", advantage.name), frozenset())
    has_reference = _is_own(advantage) or "reference_logprobs_T" in needed
    for key in ("estimator", "placement", "target", "reference_decay", "bias_corrected"):
        found, is_read = getattr(kl, key), has_reference and key in ("estimator", "reference_decay")
        if found != getattr(KLConfig(), key) and not kl.coefficient and not is_read:
            text = f"algorithm.kl.{key} is {getattr(found, 'name', found)}, but algorithm.kl.coefficient is "
            text += "0 and stays so: there is no reference model; set a coefficient, e.g. 0.001, or drop it"
            yield broken(f"algorithm.kl.{key} algorithm.kl.coefficient", text)
    if reference and not (kl.coefficient or has_reference):
        text = f"algorithm.reference is set, but neither algorithm.kl nor advantage `{advantage.name}` uses "
        text += "a reference; drop it, set kl.coefficient, or take an advantage that does, such as distill"
        yield broken("algorithm.reference algorithm.kl.coefficient algorithm.advantage", text)
    if reference and reference.path is None and reference.template is None:
        text = "algorithm.reference has no path, so it is model.path, and reads what the policy reads; set "
        yield broken("algorithm.reference", f"{text}path, or template, or drop it")
    if reference and reference.path is None and run.model.lora is not None and run.model.lora.start:
        text = "algorithm.reference has no path, so the teacher is model.path without model.lora.start, and "
        text += "would draw the policy back to it; set the path of a whole model (`asyncrl export --merge`)"
        yield broken("algorithm.reference model.lora.start", text)
    key = "algorithm.kl.reference_decay"
    if reference and kl.reference_decay < 1:
        text = f"algorithm.reference is a model of its own, and {key} would mix the policy's weights into it"
        yield broken(f"algorithm.reference {key}", f"{text}; drop one of them")
    if run.model.lora is not None and kl.reference_decay != 1:
        text = f"{key} is {kl.reference_decay:g}, but with model.lora the reference is the policy as it "
        yield broken(f"{key} model.lora", f"{text}began, which does not move; drop {key}, or model.lora")


def _a_scorer_can_teach(run: RunFields) -> Iterator[Mistake]:
    """A teacher in scorer processes reads tokens only, among all, at temperature 1."""
    teacher, key, sampling = run.algorithm.reference, "algorithm.reference.scorers", run.sampling
    for is_wrong, other, found in (
        (sampling.temperature != 1, "sampling.temperature", f"is {sampling.temperature:g}, not 1"),
        (sampling.top_k > 0, "sampling.top_k", "is set, and scorers measure a token among all"),
        (run.data.images_key is not None, "data.images_key", "is set, and scorers read text"),
        (TEACHER_NAME in run.scorers, f"scorers.{TEACHER_NAME}", "has the name of the teacher's processes"),
    ):
        if teacher and teacher.scorers and is_wrong:
            text = f"{key} is {teacher.scorers}, but {other} {found}; change it, or drop {key}"
            yield broken(f"{key} {other}", text)
    told = "algorithm.reference.template"
    if teacher and teacher.template is not None and not teacher.scorers:
        text = f"{told} is set, but {key} is 0, and in the learner a teacher reads what the policy reads"
        yield broken(f"{told} {key}", f"{text}; set it to 1, or drop {told}")
    if teacher and teacher.template is not None and run.environment.is_used:
        text = f"{told} stands in place of the prompt of a row, and episodes have many; drop it, or the "
        yield broken(f"{told} environment.uses", f"{text}environment")


def _kl_estimator_fits_its_place(run: RunFields) -> Iterator[Mistake]:
    kl, name, key = run.algorithm.kl, run.algorithm.kl.estimator.name, "algorithm.kl.estimator"
    corrected, placement = "algorithm.kl.bias_corrected", "algorithm.kl.placement"
    if kl.coefficient and kl.placement == "loss" and name == "k1" and not kl.bias_corrected:
        text = f"{key} is k1, whose gradient in the loss is zero on average; allowed there are k2, k3, abs, "
        text += "k1+, k3+ and abs+; set one of them (k1+ has k1's value and a gradient), bias_corrected: "
        text += "true, or placement: reward"
        yield broken(f"{key} {corrected} {placement} algorithm.kl.coefficient", text)
    if kl.bias_corrected and kl.placement == "reward":
        text = f"{corrected} is true, but {placement} is reward, where the KL has no gradient; drop it, or "
        yield broken(f"{corrected} {placement}", f"{text}set placement: loss")
    if kl.coefficient and kl.placement == "reward" and name in PLAIN:
        text = f"{key} is {name}, which differs from {PLAIN[name]} in its gradient only, and the reward uses "
        text += f"the value only; set {PLAIN[name]}"
        yield broken(f"{key} {placement} algorithm.kl.coefficient", text)
    entropy, largest = run.algorithm.entropy, "algorithm.entropy.maximum"
    for section, name, keys in ((kl, "kl", ("horizon",)), (entropy, "entropy", ("step", "maximum"))):
        for unread in keys if section.target is None else ():
            if (found := getattr(section, unread)) != type(section).model_fields[unread].default:
                at, target = f"algorithm.{name}.{unread}", f"algorithm.{name}.target"
                text = f"{at} is {found:g}, but without {target} the coefficient stays as it is; set "
                yield broken(f"{at} {target}", f"{text}{target}, or drop it")
    if entropy.target is not None and not 0 <= entropy.coefficient <= entropy.maximum:
        text = f"algorithm.entropy.coefficient is {entropy.coefficient}, the initial value of the adaptive "
        text += f"one; allowed is 0 to {entropy.maximum} (maximum); set it to 0, or drop target for a fixed "
        yield broken(f"algorithm.entropy.coefficient {largest} algorithm.entropy.target", f"{text}one")


def _needed(run: RunFields, *reasons: object) -> tuple[frozenset[str], list[Mistake]]:
    """Return what the advantage needs; a user's function is loaded for a reason only, and may not load."""
    try:
        is_read = any(reasons) or not _is_own(run.algorithm.advantage)
        return registry.needs("advantage", run.algorithm.advantage.name) if is_read else frozenset(), []
    except ConfigError as error:
        return frozenset(), [broken("algorithm.advantage.name", str(error))]


def _critic_is_used(run: RunFields) -> Iterator[Mistake]:
    advantage, key, lora = run.algorithm.advantage, "algorithm.advantage", run.model.lora
    needed, wrong = _needed(run, lora is not None)
    yield from wrong
    is_own, has_critic = _is_own(advantage), "values_T" in needed
    if lora is not None and has_critic:
        text = f"{key} is {advantage.name}, whose critic would train all its weights beside model.lora"
        yield broken(f"{key} model.lora", f"{text}; choose one without, such as rloo")
    if not has_critic and not is_own and run.critic != CriticConfig():
        text = f"critic is set, but advantage `{advantage.name}` needs no values, so there is none; drop the "
        yield broken(f"critic {key}", f"{text}section or set {key}: gae")
    if has_critic and not is_own and run.critic.warmup_steps >= run.learner.steps:
        text = f"critic.warmup_steps is {run.critic.warmup_steps} of {run.learner.steps} steps "
        text += "(learner.steps): the policy would never learn; lower it"
        yield broken("critic.warmup_steps learner.steps", text)


def _corrections(run: RunFields) -> dict[str, Choice]:
    """Return the correction and the rejections by their keys."""
    rejections = enumerate(run.algorithm.rejections)
    return {"algorithm.correction": run.algorithm.correction} | {
        f"algorithm.rejections.{index}": choice for index, choice in rejections
    }


def _fresh_tokens_are_kept(run: RunFields) -> Iterator[Mistake]:
    """A token that the current policy has just sampled has the ratio 1, so it must be kept with weight 1."""
    for where, correction in _corrections(run).items():
        name, bounds = correction.name, correction.params
        rejects = name in ("mask", "reject", "veto") and bounds.get("divergence", "k1") == "k1"
        for key, bound in bounds.items():
            at, side = f"{where}.{key}", 1 if key in ("cap", "high") else -1
            if not isinstance(bound, int | float):
                continue
            weighs = name in CAPPED and "rejections" not in at
            if weighs and key in ("cap", "floor") and side * (bound - 1) < 0:
                text = f"{at} is {bound}, but the ratio of a fresh token is 1, so `{name}` would weigh every "
                text += f"token by {bound}, like another learning rate; set it to at "
                text += f"{'least' if side > 0 else 'most'} 1, and learner.optimizer.lr for a smaller step"
                yield broken(at, text)
            if key in ("low", "high") and rejects and side * (bound - 1) <= 0:
                text = f"{at} is {bound}, but the ratio of a fresh token is 1, give or take rounding: "
                text += f"`{name}` would reject data of the policy itself; set it "
                yield broken(at, f"{text}{'above' if side > 0 else 'below'} 1")


def _rewards_reach_the_advantage(run: RunFields) -> Iterator[Mistake]:
    algorithm, key, limit = run.algorithm, "algorithm.advantage", run.sampling.max_response_tokens
    for index, choice in enumerate(algorithm.shaping):
        at, buffer = f"algorithm.shaping.{index}.buffer_tokens", choice.params.get("buffer_tokens")
        if choice.name == "soft_overlong" and isinstance(buffer, int) and buffer >= limit:
            text = f"{at} is {buffer}, not below sampling.max_response_tokens ({limit}): every answer would "
            text += f"be punished for its length; set a fifth of that, {max(1, limit // 5)}, or raise the "
            yield broken(f"{at} sampling.max_response_tokens", f"{text}limit")
    # GDPO normalises each part of the reward as it was scored, so changes to the sum do not reach it.
    if algorithm.advantage.name != "gdpo":
        return
    if algorithm.shaping:
        text = "algorithm.shaping changes the sum of the reward, but advantage `gdpo` sees its parts"
        yield broken(f"algorithm.shaping {key}", f"{text}; make it a reward function")
    if algorithm.kl.placement == "reward":
        text = "algorithm.kl.placement is reward, but advantage `gdpo` sees only the parts of the reward"
        yield broken(f"algorithm.kl.placement {key}", f"{text}; set placement: loss")


def _rows_are_tracked(run: RunFields) -> Iterator[Mistake]:
    """A baseline of earlier batches needs every reward of a row, and on every rank the row of a ticket."""
    name, key, floor = run.algorithm.advantage.name, "algorithm.advantage", run.data.curriculum.floor
    filters = ", ".join(one.name for one in run.algorithm.filters if not _is_own(one))
    needed, wrong = _needed(run, filters, floor)
    yield from wrong
    for found, at, why in (
        (filters, "algorithm.filters", "learns from equal rewards too, and its baseline from all"),
        (floor, "data.curriculum.floor", "needs the row of a ticket, and some ranks follow no curriculum"),
    ):
        if found and registry.EXPECTED in needed:
            yield broken(f"{at} {key}", f"{at} is {found}, but advantage `{name}` {why}; drop {at}")


def weighted_parts_exist(run: RunFields) -> Iterator[Mistake]:
    """A rule of the run: a source may lack a part that another one has, but not all that are weighed."""
    advantage, key = run.algorithm.advantage, "algorithm.advantage.weights"
    weights, at = advantage.params.get("weights"), f"{key} reward.functions data.train"
    training = run.training if advantage.name == "gdpo" else ()
    sources = [reward_parts(one.reward, one.environment) for one in training]
    parts = {part: weight for one in sources for part, weight in one.items()}
    if weights is None and {weight for one in sources for weight in one.values()} - {1.0}:
        text = "reward.functions have weights, but advantage `gdpo` trains on each part alone; set "
        cure = ", ".join(f"{part}: {weight:g}" for part, weight in parts.items())
        yield broken(at, f"{text}{key}: {{{cure}}}")
    given = {*(weights if isinstance(weights, Mapping) else parts)}
    if (sources and given - {*parts}) or any(one and given.isdisjoint(one) for one in sources):
        text = f"{key} names {', '.join(sorted(given))}; the parts of the reward are {', '.join(parts)}; use "
        yield broken(at, f"{text}their names, of each source at least one")


def optimizers(
    learner: LearnerConfig, critic: CriticConfig, batch: BatchConfig
) -> Iterator[tuple[str, OptimizerConfig, int, str]]:
    """Yield the key of each optimizer, the optimizer, how many steps it takes, and how these are counted."""
    for where, optimizer, count in (
        ("learner.optimizer", learner.optimizer, learner.steps - critic.warmup_steps),
        ("critic.optimizer", critic.optimizer, learner.steps),
    ):
        steps = count * batch.optimizer_steps
        formed = f"{steps} optimizer steps ({count} batches x batch.minibatches x batch.epochs)"
        yield where, optimizer, steps, formed


def _an_optimizer_gets_what_it_steps(run: RunFields) -> Iterator[Mistake]:
    """ZeRO cuts parameters into flat parts; DeepSpeed joins matrices for Muon, in bfloat16's stage 1 only."""
    half, stage = run.model.dtype == "bfloat16", run.learner.zero_stage
    offload = run.learner.offload_optimizer
    cut = f"learner.zero_stage {stage} with model.dtype {run.model.dtype} cuts into flat parts"
    for where, optimizer, _, _ in optimizers(run.learner, run.critic, run.batch):
        kind, keys = optimizer.kind, f"{where}.kind learner.zero_stage model.dtype"
        text = f"{where}.kind is {kind}, which needs whole matrices, which {cut}; set zero_stage: "
        if kind == "adafactor" and (half or stage > 0):
            yield broken(keys, f"{text}0 with dtype: float32, or kind: adamw_8bit")
        if kind == "muon" and stage > half:
            yield broken(keys, f"{text}{int(half)}, or kind: adamw")
        if kind != "adamw" and offload:
            text = f"{where}.kind is {kind}, but learner.offload_optimizer steps AdamW only; set kind: adamw"
            yield broken(f"{where}.kind learner.offload_optimizer", f"{text}, or drop it")
    # DeepSpeed's stages 1 and 2 keep a gradient that is not finite in host memory for all later steps.
    if offload and stage != 3:
        text = f"learner.offload_optimizer is true, but learner.zero_stage is {stage}, with which DeepSpeed "
        text += "keeps a bfloat16 gradient that is not finite for all later steps; set it to 3, with one "
        text += "rank too, or drop offload_optimizer"
        yield broken("learner.offload_optimizer learner.zero_stage", text)
    if offload and run.learner.device == "cpu":
        text = "learner.offload_optimizer is true, but on learner.device cpu all is in host memory; drop it"
        yield broken("learner.offload_optimizer learner.device", text)


def _rates_fall(run: RunFields) -> Iterator[Mistake]:
    """A rate that falls needs steps after its warm-up, and one that does not takes no arguments."""
    for where, optimizer, steps, formed in optimizers(run.learner, run.critic, run.batch):
        if optimizer.schedule != "constant" and optimizer.warmup_of(steps) >= steps:
            keys = f"{where}.warmup_steps {where}.schedule learner.steps batch.minibatches batch.epochs"
            text = f"{where}.warmup_steps is {optimizer.warmup_steps} of {formed}: the rate would never fall"
            yield broken(keys, f"{text}; lower it, or drop schedule")
        if optimizer.schedule == "constant" and optimizer.schedule_arguments:
            text = f"{where}.schedule_arguments has {', '.join(optimizer.schedule_arguments)}, but {where}."
            text += "schedule is constant; set one that takes it, or drop it"
            yield broken(f"{where}.schedule_arguments {where}.schedule", text)


def _is_own(choice: Choice) -> bool:
    return ":" in choice.name


ALGORITHM_RULES = (
    _an_optimizer_gets_what_it_steps,
    _rates_fall,
    _groups_can_be_compared,
    _stale_tokens_are_corrected,
    _pairs_are_trained_whole,
    _interpolation_saves_something,
    _a_reference_is_used,
    _a_scorer_can_teach,
    _kl_estimator_fits_its_place,
    _critic_is_used,
    _fresh_tokens_are_kept,
    _rewards_reach_the_advantage,
    _rows_are_tracked,
)
