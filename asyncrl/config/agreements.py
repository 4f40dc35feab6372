"""The rules between sections of a run's config (see `Root.RULES`).

A setting without any effect is a mistake too, because its author expects one.
"""

import math
import re
from collections.abc import Callable, Iterator

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.algorithm_rules import ALGORITHM_RULES
from asyncrl.config.base import Mistake
from asyncrl.config.checkpoint_section import CheckpointConfig
from asyncrl.config.data_section import CurriculumConfig, DataConfig
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.host_rules import HOST_RULES
from asyncrl.config.registry import needs
from asyncrl.config.reward_section import (
    TEACHER_NAME,
    ModelScore,
    RewardConfig,
    ScorerConfig,
    reward_parts,
)
from asyncrl.config.sections import (
    BatchConfig,
    ControlConfig,
    EvalConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    SamplingConfig,
    StalenessConfig,
    TelemetryConfig,
    WeightsConfig,
)
from asyncrl.config.store import StoreConfig
from asyncrl.config.store_room import store_holds_what_is_open
from asyncrl.config.vllm_settings import transformers_takes_the_settings, vllm_takes_the_settings

LAST_PORT = 65535


def _a_slot_is_on_this_host(control: ControlConfig, weights: WeightsConfig) -> Iterator[Mistake]:
    if weights.transport in ("slot", "disk") and control.bind is not None:
        text = (
            f"weights.transport is {weights.transport}, but control.bind is {control.bind}, for generators "
            "of other hosts, which cannot read this host's memory and files; leave the transport auto, or "
            "drop control.bind"
        )
        yield Mistake(("weights.transport", "control.bind"), text)
    if weights.transport == "tcp" and control.bind is None:
        text = (
            "weights.transport is tcp, but without control.bind the learner listens on no network; set "
            "it for generators of other hosts, or leave the transport auto"
        )
        yield Mistake(("weights.transport", "control.bind"), text)


def _nccl_sends_from_a_gpu(weights: WeightsConfig) -> Iterator[Mistake]:
    if weights.transport == "nccl" and weights.slots == "host":
        text = (
            "weights.slots is host, but weights.transport is nccl, which sends from the learner's GPU; leave "
            "one of them auto"
        )
        yield Mistake(("weights.slots", "weights.transport"), text)


def _samples_differ(eval: EvalConfig) -> Iterator[Mistake]:
    if eval.samples > 1 and eval.temperature == 0:
        text = f"eval.samples is {eval.samples} at eval.temperature 0: all would be equal; set a temperature"
        yield Mistake(("eval.samples", "eval.temperature"), text)


def _a_judge_of_weights_is_measured(
    checkpoint: CheckpointConfig, learner: LearnerConfig, eval: EvalConfig, data: DataConfig
) -> Iterator[Mistake]:
    stop = learner.stop_when.metric if learner.stop_when else None
    for key, metric in (("checkpoint.best", checkpoint.best), ("learner.stop_when.metric", stop)):
        if metric is not None and metric.startswith("eval/") and data.eval is None:
            text = f"{key} is {metric}, but without data.eval nothing is evaluated; set data.eval"
            yield Mistake((key, "data.eval"), text)
    first = math.lcm(checkpoint.every, eval.every)
    if (checkpoint.best or "").startswith("eval/") and first > learner.steps:
        text = (
            f"checkpoint.best is {checkpoint.best}, but of {learner.steps} steps none but the last is both "
            f"saved (every {checkpoint.every}) and evaluated (every {eval.every}); set checkpoint.every: "
            f"{eval.every}"
        )
        yield Mistake(("checkpoint.best", "checkpoint.every", "eval.every", "learner.steps"), text)


def _a_transfer_is_not_a_hang(control: ControlConfig, weights: WeightsConfig) -> Iterator[Mistake]:
    hang_s, deadline_s = control.hang_s, weights.deadline_s
    if hang_s < 2 * deadline_s:
        yield Mistake(
            ("control.hang_s", "weights.deadline_s"),
            f"control.hang_s is {hang_s:g}, but an engine that receives weights is silent for up to "
            f"weights.deadline_s ({deadline_s:g} s) and would be killed; use hang_s >= {2 * deadline_s:g} or "
            "lower the deadline",
        )


def _a_late_heartbeat_is_not_a_death(control: ControlConfig) -> Iterator[Mistake]:
    heartbeat_s, timeout_s = control.heartbeat_s, control.timeout_s
    if timeout_s < 3 * heartbeat_s:
        yield Mistake(
            ("control.timeout_s", "control.heartbeat_s"),
            f"control.timeout_s is {timeout_s:g}, but control.heartbeat_s is {heartbeat_s:g}: a generator "
            f"would count as dead after one late message; use timeout_s >= {3 * heartbeat_s:g} or a shorter "
            "heartbeat",
        )


def _each_generator_has_a_port(telemetry: TelemetryConfig, generator: GeneratorConfig) -> Iterator[Mistake]:
    first, count = telemetry.prometheus_port, generator.count or 2  # as many on a CPU
    if first and first + count > LAST_PORT:
        yield Mistake(
            ("telemetry.prometheus_port", "generator.count"),
            f"telemetry.prometheus_port is {first}, and {count} generators (generator.count) need ports up "
            f"to {first + count}; allowed is <= {LAST_PORT - count}, or 0 for any free ports",
        )


def _system_message_has_a_template(data: DataConfig, model: ModelConfig) -> Iterator[Mistake]:
    own = {f"data.train.{index}.system": source.system for index, source in enumerate(data.train)}
    for key, value in {"data.system": data.system, **own}.items():
        if value is not None and not model.chat_template:
            text = f"{key} is set, but model.chat_template is false; set it to true, or drop {key}"
            yield Mistake((key, "model.chat_template"), text)


def _sources_are_no_parts(
    data: DataConfig, reward: RewardConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    parts = reward_parts(reward, environment)
    for index, source in enumerate(data.train if len(data.train) > 1 else ()):
        if source.label in parts:
            found = f"{source.label} is also the name of a part of the reward"
            text = f"{found}, and both would be reward/{source.label}/mean; set another `name` here"
            yield Mistake((f"data.train.{index}",), text)


def _long_prompts_can_be_cut(data: DataConfig, environment: EnvironmentConfig) -> Iterator[Mistake]:
    key, how = "data.long_prompts", data.long_prompts
    if how != "refuse" and data.images_key is not None:
        text = f"is {how}, but data.images_key is set, and the rows of images are read without their prompts"
        yield Mistake((key, "data.images_key"), f"{text}; set it to refuse, and remove the long rows")
    elif how == "truncate" and environment.is_used:
        text = "is truncate, but episodes render their messages again in each turn; set it to drop or refuse"
        yield Mistake((key, "environment.uses"), text)


def _images_are_rendered(
    data: DataConfig, model: ModelConfig, environment: EnvironmentConfig, learner: LearnerConfig
) -> Iterator[Mistake]:
    """Images of rows are for prompts of single answers, whose row the sample plan alone decides."""
    for is_wrong, key, found in (
        (not model.chat_template, "model.chat_template", "false, and only a template places images"),
        (environment.is_used, "environment.uses", "set, and episodes have text only"),
        (data.curriculum.floor is not None, "data.curriculum.floor", "set, and not every rank follows it"),
        (learner.sequence_parallel > 1, "learner.sequence_parallel", "over 1, and ranks divide text only"),
    ):
        if data.images_key is not None and is_wrong:
            text = f"data.images_key is set, but {key} is {found}; change it, or drop data.images_key"
            yield Mistake(("data.images_key", key), text)


def _routing_is_recorded(
    model: ModelConfig, generator: GeneratorConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    is_vllm = generator.engine == "vllm"
    for is_wrong, key in ((is_vllm, "generator.engine"), (environment.is_used, "environment.uses")):
        if model.router_replay and is_wrong:
            text = f"model.router_replay needs the engine transformers and no environment; change {key}"
            yield Mistake(("model.router_replay", key), text)


def _something_scores(reward: RewardConfig, environment: EnvironmentConfig) -> Iterator[Mistake]:
    if not reward.functions and not environment.is_used:
        text = (
            "reward.functions is [] and there is no environment: nothing scores a response; name a function"
        )
        yield Mistake(("reward.functions", "environment.uses"), text)


def _scorers_are_there(
    reward: RewardConfig, scorers: dict[str, ScorerConfig], control: ControlConfig
) -> Iterator[Mistake]:
    for name in scorers:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,31}", name):
            text = f"scorers has the name {name!r}; allowed are letters, digits, `_` and `-`; write another"
            yield Mistake(("scorers",), text)
    used = {one.remote.scorer for one in reward.functions if isinstance(one.remote, ModelScore)}
    for name in sorted(used - scorers.keys()):
        text = f"`model_score` asks the scorer `{name}`; scorers has {', '.join(scorers) or 'none'}; add it"
        yield Mistake(("reward.functions", "scorers"), text)
    for name in sorted(scorers.keys() - used):
        text = f"scorers.{name} is set, but no reward function `model_score` asks it; drop it, or add one"
        yield Mistake((f"scorers.{name}", "scorers"), text)
    if used and control.bind is not None:
        text = "is for generators on other hosts, which cannot reach scorers; drop it, or serve the model"
        yield Mistake(("control.bind", "scorers"), f"control.bind {text} behind an address (http_reward)")


def _a_scorer_can_teach(
    algorithm: AlgorithmConfig,
    sampling: SamplingConfig,
    data: DataConfig,
    control: ControlConfig,
    scorers: dict[str, ScorerConfig],
) -> Iterator[Mistake]:
    """A teacher in scorer processes reads tokens only, at temperature 1, on this host."""
    teacher, key = algorithm.reference, "algorithm.reference.scorers"
    if teacher is None:
        return
    if teacher.gpus and not teacher.scorers:
        text = "is set, but no scorers hold the teacher; set algorithm.reference.scorers, or drop gpus"
        yield Mistake(("algorithm.reference.gpus", key), f"algorithm.reference.gpus {text}")
    for is_wrong, other, found in (
        (sampling.temperature != 1, "sampling.temperature", f"is {sampling.temperature:g}, not 1"),
        (data.images_key is not None, "data.images_key", "is set, and scorers read text"),
        (control.bind is not None, "control.bind", "is set, and other hosts cannot reach scorers"),
        (TEACHER_NAME in scorers, f"scorers.{TEACHER_NAME}", "has the name of the teacher's processes"),
    ):
        if teacher.scorers and is_wrong:
            text = f"{key} is {teacher.scorers}, but {other} {found}; change it, or drop {key}"
            yield Mistake((key, other), text)


def _an_environment_is_used(environment: EnvironmentConfig) -> Iterator[Mistake]:
    changed = environment.model_fields_set - {"uses"}
    for key in sorted(changed) if not environment.is_used else ():
        if getattr(environment, key) != getattr(EnvironmentConfig(), key):
            text = f"environment.{key} is set, but environment.uses is not; name the environment, or drop it"
            yield Mistake((f"environment.{key}", "environment.uses"), text)


def _there_is_one_environment(environment: EnvironmentConfig) -> Iterator[Mistake]:
    if environment.uses and environment.command:
        text = "environment.uses and environment.command are both set, and an episode has one environment"
        yield Mistake(("environment.uses", "environment.command"), f"{text}; drop one of them")


def _agents_name_models(environment: EnvironmentConfig) -> Iterator[Mistake]:
    if environment.frozen and environment.uses:
        text = "environment.frozen is set, but only agents (environment.command) name a model in their calls"
        yield Mistake(("environment.frozen", "environment.uses"), f"{text}; drop it")


def _tools_are_rendered(environment: EnvironmentConfig, model: ModelConfig) -> Iterator[Mistake]:
    """Only a chat template says how a model is shown tools."""
    if isinstance(environment.uses, tuple) and environment.uses and not model.chat_template:
        found = "environment.uses is a list of tools, but model.chat_template is false"
        text = f"{found}; set it to true, or name a class with `reset` and `step` for plain text"
        yield Mistake(("environment.uses", "model.chat_template"), text)


def _a_curriculum_can_judge(data: DataConfig, batch: BatchConfig, store: StoreConfig) -> Iterator[Mistake]:
    key, curriculum = "data.curriculum.floor", data.curriculum
    if curriculum.floor is None:
        if curriculum.solved != CurriculumConfig().solved:
            text = f"data.curriculum.solved is set, but {key} is null: nothing is skipped; set it, e.g. 0.1"
            yield Mistake(("data.curriculum.solved", key), text)
        return
    if batch.group_size == 1:
        found = f"{key} is {curriculum.floor:g}, but batch.group_size is 1"
        text = f"{found}: one response always has equal rewards; use group_size >= 2, or drop the curriculum"
        yield Mistake((key, "batch.group_size"), text)
    elif batch.missing_episodes >= batch.group_size - 1:
        found = f"{key} is {curriculum.floor:g}, but batch.missing_episodes leaves one episode of a group"
        text = f"{found}, whose rewards are always equal; set at most {batch.group_size - 2}"
        yield Mistake((key, "batch.missing_episodes"), f"{text}, or drop the curriculum")
    if store.shards > 1:
        found = f"{key} is {curriculum.floor:g}, but store.shards is {store.shards}"
        text = f"{found}, which reject at different rates; set store.shards: 1, or drop the curriculum"
        yield Mistake((key, "store.shards"), text)


def _one_store(store: StoreConfig) -> Iterator[Mistake]:
    if store.url is not None and store.bind is not None:
        text = "store.bind is for the run's own server, but store.url names another server; drop one"
        yield Mistake(("store.bind", "store.url"), text)


def _sequences_fit(sampling: SamplingConfig, learner: LearnerConfig) -> Iterator[Mistake]:
    if sampling.max_tokens > learner.tokens_per_microbatch:
        yield Mistake(
            ("learner.tokens_per_microbatch", "sampling.max_prompt_tokens", "sampling.max_response_tokens"),
            f"learner.tokens_per_microbatch is {learner.tokens_per_microbatch}, less than the longest "
            f"sequence (sampling.max_prompt_tokens + max_response_tokens = {sampling.max_tokens}); raise it",
        )


def _the_optimizer_can_be_offloaded(learner: LearnerConfig) -> Iterator[Mistake]:
    # DeepSpeed's stages 1 and 2 keep a gradient that is not finite in host memory for all later steps.
    if learner.offload_optimizer and learner.zero_stage != 3:
        found = f"learner.offload_optimizer is true, but learner.zero_stage is {learner.zero_stage}"
        text = f"{found}; set it to 3, with one rank too, or drop offload_optimizer"
        yield Mistake(("learner.offload_optimizer", "learner.zero_stage"), text)
    if learner.offload_optimizer and learner.device == "cpu":
        text = "learner.offload_optimizer is true, but on learner.device cpu all is in host memory; drop it"
        yield Mistake(("learner.offload_optimizer", "learner.device"), text)


def _rates_fall(learner: LearnerConfig, critic: CriticConfig, batch: BatchConfig) -> Iterator[Mistake]:
    """A final share needs a rate that falls, and a rate that falls needs steps after its warm-up."""
    for where, optimizer, batches in (
        ("learner.optimizer", learner.optimizer, learner.steps - critic.warmup_steps),
        ("critic.optimizer", critic.optimizer, learner.steps),
    ):
        falls = optimizer.schedule != "constant"
        if optimizer.final_share and not falls:
            found = f"{where}.final_share is {optimizer.final_share:g}, but schedule is constant"
            text = f"{found}; set {where}.schedule to linear or cosine, or drop final_share"
            yield Mistake((f"{where}.final_share", f"{where}.schedule"), text)
        steps = batches * batch.optimizer_steps
        if falls and optimizer.warmup_steps >= steps:
            keys = (f"{where}.warmup_steps", f"{where}.schedule", "learner.steps")
            formed = f"{steps} optimizer steps ({batches} batches x batch.minibatches x batch.epochs)"
            text = f"{where}.warmup_steps is {optimizer.warmup_steps} of {formed}: the rate would never fall"
            yield Mistake(keys, f"{text}; lower it, or drop schedule")


def _shards_divide(store: StoreConfig, batch: BatchConfig, staleness: StalenessConfig) -> Iterator[Mistake]:
    """Each shard contributes the same number of groups to every step."""
    shards = store.shards
    for key, number in (("batch.groups", batch.groups), ("staleness.window_groups", staleness.window_groups)):
        if number is not None and number % shards:
            found = f"store.shards is {shards}, which does not divide {key} ({number})"
            yield Mistake(("store.shards", key), f"{found}; choose a divisor, or another {key}")


def _an_adapter_is_enough(model: ModelConfig, algorithm: AlgorithmConfig) -> Iterator[Mistake]:
    """An adapter is trained, and nothing else; the policy with it as it began is the reference."""
    if model.lora is None:
        return
    if model.lora.start is not None and model.lora.sync == "merged":
        found = (
            "model.lora.start is set, but model.lora.sync is merged: generators begin with model.path alone"
        )
        text = f"{found}; set sync: adapter, or merge the adapter into the model, and give that as model.path"
        yield Mistake(("model.lora.sync", "model.lora.start"), text)
    key, decay = "algorithm.kl.reference_decay", algorithm.kl.reference_decay
    if decay != 1:
        found = f"{key} is {decay:g}, but with model.lora the reference is the policy as it began"
        yield Mistake((key, "model.lora"), f"{found}, which does not move; drop {key}, or model.lora")
    name = algorithm.advantage.name
    if "values_T" in needs("advantage", name):
        text = f"algorithm.advantage is {name}, whose critic would train all its weights beside model.lora"
        yield Mistake(("algorithm.advantage", "model.lora"), f"{text}; choose one without, such as rloo")


def _pairs_are_of_answers(
    telemetry: TelemetryConfig, batch: BatchConfig, environment: EnvironmentConfig
) -> Iterator[Mistake]:
    """TRL's columns hold one prompt with two answers."""
    key = "telemetry.pairs"
    if telemetry.pairs and environment.is_used:
        text = f"{key} is true, but episodes of an environment are more than an answer to a prompt; drop it"
        yield Mistake((key, "environment.uses"), text)
    if telemetry.pairs and batch.group_size == 1:
        text = f"{key} is true, but batch.group_size is 1: a group has no best and worst; drop it, or set 2"
        yield Mistake((key, "batch.group_size"), text)


RULES: tuple[Callable[..., Iterator[Mistake]], ...] = (
    _a_transfer_is_not_a_hang,
    _a_late_heartbeat_is_not_a_death,
    _a_slot_is_on_this_host,
    _nccl_sends_from_a_gpu,
    _each_generator_has_a_port,
    _samples_differ,
    _a_judge_of_weights_is_measured,
    _system_message_has_a_template,
    _sources_are_no_parts,
    _long_prompts_can_be_cut,
    _images_are_rendered,
    _routing_is_recorded,
    _something_scores,
    _scorers_are_there,
    _a_scorer_can_teach,
    _an_environment_is_used,
    _there_is_one_environment,
    _agents_name_models,
    _tools_are_rendered,
    _a_curriculum_can_judge,
    _one_store,
    _sequences_fit,
    store_holds_what_is_open,
    _the_optimizer_can_be_offloaded,
    _rates_fall,
    _shards_divide,
    _an_adapter_is_enough,
    _pairs_are_of_answers,
    vllm_takes_the_settings,
    transformers_takes_the_settings,
    *ALGORITHM_RULES,
    *HOST_RULES,
)
