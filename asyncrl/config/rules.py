"""The rules between the keys of a run's config, of each of its sources and sets (see `Root.RULES`).

`RUN_RULES` are of the whole run, where a key counts as used if one source or set uses it. A setting that
cannot have the effect which its author expects is a mistake, too.
"""

import math
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from asyncrl.algo.ranges import MOST_KEPT
from asyncrl.config import addresses
from asyncrl.config.addresses import AUTO, CONTROL_PORT, STORE_PORT, filled_in, host_of
from asyncrl.config.algorithm_rules import ALGORITHM_RULES, episodes_can_fail, weighted_parts_exist
from asyncrl.config.base import Mistake, broken
from asyncrl.config.checkpoint_section import METRICS
from asyncrl.config.data_section import drawn, prefix_of
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.reward_section import ModelJudge, OfScorer, reward_parts
from asyncrl.config.run_fields import RunFields
from asyncrl.config.vllm_settings import adapter_fits_its_base, engine_takes_the_settings
from asyncrl.config.wording import did_you_mean, divisors

LAST_PORT = 65535
# Upper bounds of the bytes that a group takes in the store: per token, per rollout and per group. Those of
# tokens are sums over `columns.COLUMNS`, which needs numpy; `preflight` adds those of routed experts.
PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, ROLLOUT_BYTES, GROUP_BYTES = 4, 9, 768, 8192
TEACHER_TOKEN_BYTES = 4  # of a response
KEPT_ID_BYTES = 4  # of a token that one of a response could have been, and of their number
TURN_BYTES = 64  # of an episode's turn: its end, reward and state, and its spans of versions


def _hosts_reach_each_other(run: RunFields) -> Iterator[Mistake]:
    control, transport, kind = run.control, run.weights.transport, run.cluster.kind
    # The key by which generators may be on other hosts: a run with `cluster.kind` sets control.bind itself.
    away = "control.bind" if control.bind is not None else "cluster.kind" if kind is not None else ""
    if transport in ("slot", "disk") and away:
        found = {"control.bind": control.bind, "cluster.kind": kind}[away]
        text = f"weights.transport is {transport}, but {away} is {found}, for generators of "
        text += "other hosts, which cannot read this host's memory and files; leave the transport auto"
        yield broken(f"weights.transport {away}", f"{text}, or drop {away}")
    if transport == "tcp" and not away:
        text = "weights.transport is tcp, but without control.bind the learner listens on no network; set it"
        text += " for generators of other hosts, or leave the transport auto"
        yield broken("weights.transport control.bind", text)
    urls = {"control.bind": control.bind, "store.bind": run.store.bind, "store.url": run.store.url}
    for key, where in urls.items():
        if kind is not None and where is not None and addresses.stays_here(where):
            text = f"{key} is {where}, which only this host reaches, but cluster.kind is {kind}; drop {key}"
            yield broken(f"{key} cluster.kind", f"{text}, or give an address that the other hosts reach")


def _listeners_differ(run: RunFields) -> Iterator[Mistake]:
    """Control plane and store have an address each; with `cluster.kind` they listen in any case."""
    default = None if run.cluster.kind is None else AUTO
    control = filled_in(run.control.bind or default, AUTO, CONTROL_PORT)
    store = filled_in(run.store.bind or (None if run.store.url else default), AUTO, STORE_PORT)
    if control and store:  # `auto` may be the host of the other
        host = host_of(store)
        store = filled_in(store, host_of(control), STORE_PORT)
        control = filled_in(control, host, CONTROL_PORT)
    meeting = addresses.beside(control) if control and run.cluster.learner_hosts > 1 else None
    if meeting and int(meeting.rpartition(":")[2]) > LAST_PORT:
        text = f"control.bind is {control}, and hosts of the learner meet at the next port; choose one below"
        yield broken("control.bind cluster.learner_hosts", f"{text} {LAST_PORT}")
    if store is not None and store in (control, meeting):
        where = "control.bind is the same" if store == control else "hosts of the learner meet there"
        yield broken("store.bind control.bind", f"store.bind is {store}, but {where}; set another port")


def _processes_reach_each_other(run: RunFields) -> Iterator[Mistake]:
    control, weights, transport = run.control, run.weights, run.weights.transport
    if transport == "nccl" and weights.slots == "host":
        text = "weights.slots is host, but weights.transport is nccl, which sends from the learner's GPU"
        yield broken("weights.slots weights.transport", f"{text}; leave one of them auto")
    if control.hang_s < 2 * weights.deadline_s:
        text = f"control.hang_s is {control.hang_s:g}, but an engine that receives weights is silent for up "
        text += f"to weights.deadline_s ({weights.deadline_s:g} s) and would be killed; use hang_s >= "
        text += f"{2 * weights.deadline_s:g} or lower the deadline"
        yield broken("control.hang_s weights.deadline_s", text)
    if control.timeout_s < 3 * control.heartbeat_s:
        text = f"control.timeout_s is {control.timeout_s:g}, but control.heartbeat_s is "
        text += f"{control.heartbeat_s:g}: a generator would count as dead after one late message; use "
        text += f"timeout_s >= {3 * control.heartbeat_s:g} or a shorter heartbeat"
        yield broken("control.timeout_s control.heartbeat_s", text)
    first, count = run.telemetry.prometheus_port, run.generator.count or 2  # as many on a CPU
    if first and first + count > LAST_PORT:
        text = f"telemetry.prometheus_port is {first}, and {count} generators (generator.count) need ports "
        text += f"up to {first + count}; allowed is <= {LAST_PORT - count}, or 0 for any free ports"
        yield broken("telemetry.prometheus_port generator.count", text)
    url, is_allowed = run.store.url, run.store.insecure
    if url is not None and not is_allowed and (ways := "; ".join(addresses.insecurities(url))):
        text = f"store.url is {url}: {ways}. In a private network set store.insecure: true"
        yield broken("store.url", text)
    if url is not None and run.store.bind is not None:
        text = "store.bind is for the run's own server, but store.url names another server; drop one"
        yield broken("store.bind store.url", text)


def _hosts_divide_the_work(run: RunFields) -> Iterator[Mistake]:
    hosts, ranks, per_sequence = run.cluster.learner_hosts, run.learner.ranks, run.learner.sequence_parallel
    found = f"cluster.learner_hosts is {hosts}"
    if run.cluster.kind is not None and run.generator.count is None:
        text = "cluster.kind is set, but generator.count is not; set it to the generators of each host"
        yield broken("generator.count cluster.kind", text)
    if hosts > 1 and run.cluster.kind is None:
        text = f"{found}, but cluster.kind is not set; set it to what places hosts, or drop learner_hosts"
        yield broken("cluster.learner_hosts cluster.kind", text)
    if ranks % per_sequence:
        text = f"found {per_sequence}, which does not divide learner.ranks ({ranks}); set one of "
        yield broken("learner.sequence_parallel learner.ranks", f"{text}{divisors(ranks)}, or other ranks")
    elif ranks % hosts:
        text = f"{found}, which does not divide learner.ranks ({ranks}); set one of {divisors(ranks)}"
        yield broken("cluster.learner_hosts learner.ranks", text)
    elif ranks // hosts % per_sequence:
        text = f"{found}, with {ranks // hosts} ranks each, of which learner.sequence_parallel "
        text += f"({per_sequence}) would divide a sequence over two hosts; set one of "
        yield broken("learner.sequence_parallel cluster.learner_hosts", f"{text}{divisors(ranks // hosts)}")


def _steps_take_whole_groups(run: RunFields) -> Iterator[Mistake]:
    batch, sampling, shards = run.batch, run.sampling, run.store.shards
    if batch.groups % batch.minibatches:
        text = f"groups ({batch.groups}) must divide into minibatches ({batch.minibatches}); use one of "
        yield broken("batch.minibatches batch.groups", f"{text}{divisors(batch.groups)}")
    window = run.staleness.window_groups
    # Each shard contributes the same number of groups to every step.
    for key, number in (("batch.groups", batch.groups), ("staleness.window_groups", window)):
        if number is not None and number % shards:
            text = f"store.shards is {shards}, which does not divide {key} ({number}); choose a divisor"
            yield broken(f"store.shards {key}", f"{text}, or another {key}")
    if sampling.top_k < 0 and (sampling.top_p < 1.0 or sampling.min_p > 0.0):
        text = f"top_p={sampling.top_p:g}, min_p={sampling.min_p:g} without top_k may leave any number of "
        text += f"tokens, and each is recorded; set sampling.top_k, 1 to {MOST_KEPT}, such as 50"
        yield broken("sampling.top_p sampling.min_p sampling.top_k", text)
    if sampling.max_tokens > run.learner.tokens_per_microbatch:
        keys = "learner.tokens_per_microbatch sampling.max_prompt_tokens sampling.max_response_tokens"
        text = f"learner.tokens_per_microbatch is {run.learner.tokens_per_microbatch}, less than the longest "
        text += "sequence (sampling.max_prompt_tokens + max_response_tokens = "
        yield broken(keys, f"{text}{sampling.max_tokens}); raise it")


def _samples_differ(run: RunFields) -> Iterator[Mistake]:
    if run.eval.samples > 1 and run.eval.temperature == 0:
        text = f"eval.samples is {run.eval.samples} at eval.temperature 0: all would be equal"
        yield broken("eval.samples eval.temperature", f"{text}; set a temperature")


def _weights_can_be_judged(run: RunFields) -> Iterator[Mistake]:
    checkpoint, stop, data = run.checkpoint, run.learner.stop_when, run.data
    if stop is not None and stop.reaches is None and stop.patience is None:
        text = "found neither reaches nor patience; set a value that ends the training, or a patience"
        yield broken("learner.stop_when.reaches learner.stop_when.patience", text)
    metrics = {"checkpoint.best": checkpoint.best, "learner.stop_when.metric": stop and stop.metric}
    for key, metric in metrics.items():
        names = _metrics(run, metric or "")
        if metric and metric.startswith("eval/") and data.set_of(metric) is None:
            text = "but without data.eval nothing is evaluated; set data.eval"
            if known := ", ".join(map(prefix_of, data.sets)):
                text = f"and metrics of the sets of data.eval begin with {known}; name one of these"
            yield broken(f"{key} data.eval", f"{key} is {metric}, {text}")
        elif metric and ("*" in metric or not any(fnmatchcase(metric, name) for name in names)):
            whole = [name for name in names if "*" not in name]
            hint = did_you_mean(metric, whole, "name one of docs/metrics.md")
            yield broken(key, f"{key} is {metric}, which this run will not have{hint}")
    best = data.set_of(checkpoint.best or "")
    saved, steps, key = checkpoint.every, run.learner.steps, "eval.every"
    if best and best.every:
        key = next(f"{place}.every" for place, one in data.tasks.items() if one is best)
    every = best.every if best and best.every else run.eval.every
    if best and math.lcm(saved, every) > steps:
        text = f"checkpoint.best is {checkpoint.best}, but of {steps} steps none but the last is both saved "
        text += f"(every {saved}) and evaluated (every {every}); set "
        text += f"checkpoint.every: {every}" if every <= steps else f"{key}: {min(saved, steps)}"
        text += f", and checkpoint.every: {steps}" if saved > steps < every else ""
        yield broken(f"checkpoint.best checkpoint.every {key} learner.steps", text)
    hub = checkpoint.hub
    if hub is not None and hub.every is not None and hub.every % checkpoint.every:
        text = f"checkpoint.hub.every is {hub.every}, and checkpoint.every is {checkpoint.every}: not every "
        text += "such step has a checkpoint; set a multiple of checkpoint.every"
        yield broken("checkpoint.hub.every checkpoint.every", text)


def _metrics(run: RunFields, metric: str) -> list[str]:
    """Return the metrics, or patterns of them, of the set to which `metric` belongs, or else of steps."""
    if held_out := run.data.set_of(metric):
        prefix = next(prefix_of(name) for name, one in run.data.sets.items() if one is held_out)
        counts = drawn(held_out.samples or run.eval.samples)
        named = {one.removeprefix("eval/") for one in METRICS if one.startswith("eval/")}
        named -= {f"{kind}@*" for kind in counts}
        named |= {f"{kind}@{k}" for kind, ks in counts.items() for k in ks}
        return [prefix + one for one in sorted(named)]
    algorithm = run.algorithm
    own = {"policy/*": [algorithm.policy_loss], "weight/*": [algorithm.correction, *algorithm.rejections]}
    own["hook/*"] = [*run.learner.hooks]
    found = [kind for kind, choices in own.items() if any(":" in choice.name for choice in choices)]
    return [*sorted(METRICS - own.keys()), *found]


def _prompts_are_rendered(run: RunFields) -> Iterator[Mistake]:
    data, how, plays = run.data, run.data.long_prompts, run.environment.is_used
    systems = {"data.system": data.system} | {f"{at}.system": one.system for at, one in data.tasks.items()}
    for key, value in systems.items():
        if value is not None and not run.model.chat_template:
            text = f"{key} is set, but model.chat_template is false; set it to true, or drop {key}"
            yield broken(f"{key} model.chat_template", text)
    if how != "refuse" and data.images_key is not None:
        text = f"data.long_prompts is {how}, but data.images_key is set, and the rows of images are read "
        text += "without their prompts; set it to refuse, and remove the long rows"
        yield broken("data.long_prompts data.images_key", text)
    elif how == "truncate" and plays:
        text = "data.long_prompts is truncate, but episodes render their messages again in each turn"
        yield broken("data.long_prompts environment.uses", f"{text}; set it to drop or refuse")
    # Images of rows are for prompts of single answers, whose row the sample plan alone decides.
    for is_wrong, key, found in (
        (not run.model.chat_template, "model.chat_template", "false, and only a template places images"),
        (plays, "environment.uses", "set, and episodes have text only"),
        (data.curriculum.floor is not None, "data.curriculum.floor", "set, and not every rank follows it"),
        (run.learner.sequence_parallel > 1, "learner.sequence_parallel", "over 1, and ranks divide text"),
    ):
        if data.images_key is not None and is_wrong:
            text = f"data.images_key is set, but {key} is {found}; change it, or drop data.images_key"
            yield broken(f"data.images_key {key}", text)


def _scores_have_names(run: RunFields) -> Iterator[Mistake]:
    reward, train = run.reward, run.data.train
    if not reward.functions and not run.environment.is_used:
        text = "reward.functions is [] and there is no environment: nothing scores a response; name a "
        yield broken("reward.functions environment.uses", f"{text}function")
    if reward.sandbox != "none" and reward.memory_gib is None:
        text = "a sandbox needs a memory limit; set reward.memory_gib, 4 is enough for short programs"
        yield broken("reward.sandbox", text)
    for key, kind, tasks in (("data.train", "sources", train), ("data.eval", "sets", run.data.eval)):
        names = [one.label for one in tasks]
        if len({*names}) < len(names):
            text = f"the {kind} have the names {', '.join(names)}, which must differ; set `name` on one"
            yield broken(key, f"{text} of them")
    if "se" in run.data.sets:
        text = "a set has the name se, and eval/se/ begins the names of errors; set another `name`"
        yield broken("data.eval", text)
    parts = reward_parts(reward, run.environment)
    for index, source in enumerate(train if len(train) > 1 else ()):
        if source.label in parts:
            text = f"{source.label} is also the name of a part of the reward, and both would be "
            yield broken(f"data.train.{index}", f"{text}reward/{source.label}/mean; set another `name` here")


def _scorers_are_asked(run: RunFields) -> Iterator[Mistake]:
    scorers = run.scorers
    for name in scorers:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,31}", name):
            text = f"scorers has the name {name!r}; allowed are letters, digits, `_` and `-`; write another"
            yield broken("scorers", text)
    asked = [_scorers_of(task) for task in run.tasks.values()]
    for name in sorted(scorers):
        kinds = set[str]().union(*(one.get(name, set()) for one in asked))
        if len(kinds) != 1:
            found = "is set, but no `model_score` and no `model_judge` asks it; drop it, or add one"
            if kinds:
                found = f"is asked by {' and '.join(sorted(kinds))}; give each its own scorer"
            keys = (f"scorers.{name}", "scorers", "reward.functions", "data.train")
            yield Mistake(keys, f"scorers.{name} {found}")


def _scorers_of(run: RunFields) -> dict[str, set[str]]:
    """The scorers of a task, and the kinds of functions that ask each."""
    found: dict[str, set[str]] = {}
    for one in run.reward.functions:
        if isinstance(one.remote, OfScorer):
            found.setdefault(one.remote.scorer, set()).add(one.function)
    return found


def _asked_scorers_answer(run: RunFields) -> Iterator[Mistake]:
    used, scorers = _scorers_of(run), run.scorers
    for name in sorted(used.keys() - scorers.keys()):
        found = f"scorers has {', '.join(scorers) or 'none'}"
        text = f"`{min(used[name])}` asks the scorer `{name}`; {found}; add it"
        yield broken("reward.functions scorers", text)
    for one in (function.remote for function in run.reward.functions):
        if isinstance(one, ModelJudge) and one.scorer in scorers:
            most = scorers[one.scorer].max_tokens
            if one.max_tokens >= most:
                text = f"max_tokens of `model_judge` is {one.max_tokens}, and with its question it is at most"
                cure = f"{most} (scorers.{one.scorer}.max_tokens); lower one, or raise the other"
                yield broken(f"reward.functions scorers.{one.scorer}.max_tokens", f"{text} {cure}")


def _episodes_can_be_played(run: RunFields) -> Iterator[Mistake]:
    environment, model, router = run.environment, run.model, "model.router_replay"
    own = [one.environment for one in run.data.tasks.values() if one.environment is not None]
    plays = any(one.is_used for one in (environment, *own))
    for key in sorted(environment.model_fields_set - {"uses"}) if not plays else ():
        if getattr(environment, key) != getattr(EnvironmentConfig(), key):
            text = f"environment.{key} is set, but environment.uses is not; name the environment, or drop it"
            yield broken(f"environment.{key} environment.uses data.train", text)
    if environment.uses and environment.command:
        text = "environment.uses and environment.command are both set, and an episode has one environment"
        yield broken("environment.uses environment.command", f"{text}; drop one of them")
    # Only a chat template says how a model is shown tools.
    if isinstance(environment.uses, tuple) and environment.uses and not model.chat_template:
        text = "environment.uses is a list of tools, but model.chat_template is false; set it to true, or "
        text += "name a class with `reset` and `step` for plain text"
        yield broken("environment.uses model.chat_template", text)
    is_vllm = run.generator.engine == "vllm"
    for is_wrong, key in ((is_vllm, "generator.engine"), (environment.is_used, "environment.uses")):
        if model.router_replay and is_wrong:
            text = f"{router} needs the engine transformers and no environment; change {key}"
            yield broken(f"{router} {key}", text)


def _groups_tell_something(run: RunFields) -> Iterator[Mistake]:
    batch, shards, pairs, floor = run.batch, run.store.shards, "telemetry.pairs", run.data.curriculum.floor
    key = "data.curriculum.floor"
    # TRL's columns hold one prompt with two answers.
    if run.telemetry.pairs and run.environment.is_used:
        text = f"{pairs} is true, but episodes of an environment are more than an answer to a prompt; drop it"
        yield broken(f"{pairs} environment.uses", text)
    if run.telemetry.pairs and run.data.images_key is not None:
        text = f"{pairs} is true, but data.images_key is set, and TRL's columns hold no image; drop one"
        yield broken(f"{pairs} data.images_key", text)
    if run.telemetry.pairs and batch.group_size == 1:
        text = f"{pairs} is true, but batch.group_size is 1: a group has no best and worst; drop it, or set 2"
        yield broken(f"{pairs} batch.group_size", text)
    if floor is None:
        return
    if batch.group_size == 1:
        text = f"{key} is {floor:g}, but batch.group_size is 1: one response always has equal rewards; use "
        yield broken(f"{key} batch.group_size", f"{text}group_size >= 2, or drop the curriculum")
    elif batch.missing_episodes >= batch.group_size - 1:
        text = f"{key} is {floor:g}, but batch.missing_episodes leaves one episode of a group, whose rewards "
        text += f"are always equal; set at most {batch.group_size - 2}, or drop the curriculum"
        yield broken(f"{key} batch.missing_episodes", text)
    if shards > 1:
        text = f"{key} is {floor:g}, but store.shards is {shards}, which reject at different rates; set "
        yield broken(f"{key} store.shards", f"{text}store.shards: 1, or drop the curriculum")


def lacking_room(run: RunFields, group_bytes: int = 0, held_out: int = 0) -> Iterator[Mistake]:
    """Find a store that is too small for the groups and the `held_out` answers that can be open together.

    A full store of groups that no checkpoint holds admits no group, so no checkpoint is ever written. With
    `group_bytes` that is the size of a group.
    """
    sampling, group_size, environment = run.sampling, run.batch.group_size, run.environment
    has_teacher = run.algorithm.reference is not None and run.algorithm.reference.scorers
    token_bytes = RESPONSE_TOKEN_BYTES + (TEACHER_TOKEN_BYTES if has_teacher else 0)
    token_bytes += KEPT_ID_BYTES * (sampling.top_k + 1)  # -1: none
    rollout_bytes = ROLLOUT_BYTES + PROMPT_TOKEN_BYTES * sampling.max_prompt_tokens
    rollout_bytes += token_bytes * sampling.max_response_tokens
    rollout_bytes += TURN_BYTES * environment.max_turns if environment.is_used else 0
    rest_bytes = GROUP_BYTES + group_size * run.reward.judgement_bytes
    group_bytes = group_bytes or rest_bytes + group_size * environment.sequences * rollout_bytes
    batch, steps, saved = run.batch, run.staleness.max_lag + 1, run.unsaved_steps
    groups = run.open_groups + saved * batch.groups + math.ceil(held_out / batch.group_size)
    needed_gib = groups * group_bytes / 2**30
    if needed_gib > run.store.max_gib:
        keys = "store.max_gib staleness.max_lag checkpoint.keep checkpoint.every batch.groups learner.steps "
        keys += "batch.group_size sampling.max_prompt_tokens sampling.max_response_tokens eval.prompts"
        also = f", and {held_out} held-out answers (prompts * samples)" if held_out else ""
        yield broken(
            keys,
            f"store.max_gib is {run.store.max_gib:g}, but {groups} groups of up to {group_bytes / 2**20:.3g} "
            f"MiB can be open, {needed_gib:.3g} GiB: {steps} steps under way (staleness.max_lag + 1) and "
            f"{saved} that the oldest checkpoint lacks (checkpoint.keep * every), of {batch.groups} groups "
            f"(batch.groups) with {batch.group_size * run.environment.sequences} sequences of "
            f"sampling.max_prompt_tokens and max_response_tokens{also}; a full store would stop the run for "
            f"good; set store.max_gib: {math.ceil(needed_gib)}, or checkpoint more often",
        )


RULES: tuple[Callable[[RunFields], Iterator[Mistake]], ...] = (
    _hosts_reach_each_other,
    _listeners_differ,
    _processes_reach_each_other,
    _hosts_divide_the_work,
    _steps_take_whole_groups,
    _samples_differ,
    _prompts_are_rendered,
    _scores_have_names,
    _asked_scorers_answer,
    _episodes_can_be_played,
    _groups_tell_something,
    lacking_room,
    engine_takes_the_settings,
    adapter_fits_its_base,
    *ALGORITHM_RULES,
)
RUN_RULES = (_weights_can_be_judged, _scorers_are_asked, episodes_can_fail, weighted_parts_exist)
