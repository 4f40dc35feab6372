"""Warnings about valid configs: settings that may be intended, but are usually mistakes."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from string import Formatter

from asyncrl.builds import CPU, build_of
from asyncrl.config.algorithm_rules import optimizers
from asyncrl.config.data_section import EvalSet
from asyncrl.config.document import Node
from asyncrl.config.load import read_draft
from asyncrl.config.model_files import ends_no_response
from asyncrl.config.named_files import local_files
from asyncrl.config.schema import Config
from asyncrl.config.sections import EvalConfig
from asyncrl.data.dataset import Rows, load_rows
from asyncrl.data.reader import taken_answers, with_messages
from asyncrl.errors import DataError
from asyncrl.hosting.gpus import count_gpus, has_instances
from asyncrl.hosting.machine import share_of_cores, this_machine
from asyncrl.hosting.placement import idle_gpus, placement_of
from asyncrl.preflight.definitions import absent_imports
from asyncrl.preflight.idle_keys import idle_keys
from asyncrl.preflight.row_problems import places
from asyncrl.rewards.builtin import BUILTINS

LIMITS = ("max_prompt_tokens", "max_response_tokens")
LOWEST_LR = 1e-10  # in a million steps, a weight moves by at most 0.0001
LEAST_TOP_P = 0.01  # of a vocabulary, the most probable token has more
LEAST_STALL_S = 60.0
HIGHEST_PROBE_LIMIT = 10.0  # about ln of a vocabulary
HIGHEST_LR = 0.01  # Adam moves each weight by about the rate: models are fine-tuned with 1e-6 to 1e-4
REPEATED = 0.2  # share of rows that are repetitions of others
LONG_ANSWER = 5  # characters; shorter answers are in a prompt by chance
ODD = 0.1  # share of rows whose value in a column may be of another type by mistake


def doubts(config: Config, path: Path, overrides: Sequence[str], *, generators: bool = True) -> list[str]:
    """Return warnings about a valid config, one line each.

    Without `generators`, these are on other hosts, and this is the learner's. With `cluster.kind` they are on
    other hosts, too, but which one this is, is not known.
    """
    root = read_draft(Config, path, overrides).root
    has_all = generators and config.cluster.kind is None
    found = [*_evaluation(config, root), *_limits(config, root, path), *_rates(config), *_weights(config)]
    model = Path(config.model.path)
    if not config.sampling.stop and model.is_dir() and ends_no_response(model):
        text = f"no file in {model} names an end token, so every response is as long as the limit allows"
        found.append(f"{text}; set eos_token_id in its generation_config.json, or give sampling.stop")
    found += [*_numbers(config), *_rows(config), *_prompts(config, root, path)]
    named = [one.function for one in config.reward_functions.values()]
    named += [name for _, name, one in config.environment_names if one.python is None]
    for name in dict.fromkeys(named) if has_all else ():
        found += absent_imports(name)
    found += [*missing_device(config), *idle_keys(config), *_too_much(config, generators=has_all)]
    if has_all or not generators:
        found += _idle(config, generators=generators)
    return found


def missing_device(config: Config) -> Iterator[str]:
    """Warn if the config asks for a GPU that this machine or its torch does not have."""
    if config.learner.device == "cuda" and not count_gpus():
        cure = "set learner.device=auto or cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield f"learner.device is cuda, but this machine shows no GPU; {cure}"
    if config.learner.device != "cpu" and count_gpus() and build_of("torch") == CPU:
        cure = "install asyncrl[gpu], or set learner.device=cpu"
        yield f"this machine shows {count_gpus()} GPUs, but torch is built for CPUs only; {cure}"


def _idle(config: Config, *, generators: bool) -> Iterator[str]:
    """Warn of GPUs that no process of the run would use."""
    gpus = count_gpus() if config.learner.device != "cpu" else 0
    placement = placement_of(config, gpus, generators=None if generators else 0)
    width, taken = config.generator.tensor_parallel, config.taken_gpus if generators else frozenset()
    idle = sorted({*idle_gpus(placement, gpus)} - taken)
    if not idle:
        return
    free = len({*range(config.ranks_per_host, gpus)} - taken)
    ranks = config.learner.ranks + len(idle) * config.cluster.learner_hosts
    cures = []
    if generators and len(placement.generators) < free // width:
        cures.append(f"leave generator.count null, which means {free // width}")
    else:
        divides = ranks % config.learner.sequence_parallel == 0
        if divides and taken.isdisjoint(range(ranks)) and not has_instances():
            cures.append(f"set learner.ranks={ranks} (a resumed run keeps its number)")
        if generators:
            cures.append(f"choose a generator.tensor_parallel that divides {free}")
    named = f"GPU{'s' * (len(idle) > 1)} {', '.join(map(str, idle))} of {gpus}"
    cures.append("hide what another program is to use with CUDA_VISIBLE_DEVICES")
    yield f"no process would use {named}: {', or '.join(cures)}"


def _too_much(config: Config, *, generators: bool) -> Iterator[str]:
    """Warn of limits above this machine's memory, and of more processes or threads than it has cores.

    Without `generators`, these are on other hosts. With GPUs, processes wait for these and not for cores.
    """
    memory_gib = this_machine("cpu").total_bytes / 2**30
    has_gpus = count_gpus() and config.learner.device != "cpu"
    has_store = config.store.url is None and config.cluster.kind is None
    limits = {"store.max_gib": config.store.max_gib if has_store else 0.0}
    if generators and not has_gpus:
        limits["generator.kv_cache_gib"] = config.generator.kv_cache_gib or 0.0
    for key, limit_gib in limits.items():
        if limit_gib > memory_gib:
            found = f"{key} is {limit_gib:g}, but this machine has {memory_gib:.1f} GiB of memory, and the"
            cure = f"set at most {math.ceil(memory_gib / 2)}"
            cure += ", with a lower checkpoint.every if it needs more" if key == "store.max_gib" else ""
            yield f"{found} system ends processes that want more; {cure}"
    cores = share_of_cores()
    counts = {"learner.ranks": config.ranks_per_host, "learner.threads": config.learner.threads or 0}
    if generators:
        number, threads = config.generator.count or 0, config.generator.threads or 0
        counts |= {"generator.count": number, "generator.threads": threads}
    for key, count in counts.items() if not has_gpus else ():
        if count > cores:
            yield f"{key} is {count} on {cores} cores, so each slows the others; set at most {cores}"


def _rates(config: Config) -> Iterator[str]:
    """Warn of learning rates that destroy a model, and of those that a run never reaches."""
    for where, optimizer, steps, _ in optimizers(config.learner, config.critic, config.batch):
        if optimizer.lr > HIGHEST_LR:
            found = f"{where}.lr is {optimizer.lr:g}, by about which Adam moves every weight in every step"
            yield f"{found}: that destroys a model; set 1e-6 to 1e-4 (a tiny model takes 1e-3)"
        if optimizer.lr < LOWEST_LR:
            found = f"{where}.lr is {optimizer.lr:g}, with which no weight moves; set 1e-6 to 1e-4"
            yield found
        if optimizer.warmup_of(steps) > steps:
            found = f"{where}.warmup_steps is {optimizer.warmup_steps}, but the run has {steps} optimizer"
            yield f"{found} steps: the rate stays below {where}.lr; set warmup_steps lower"


def _numbers(config: Config) -> Iterator[str]:
    """Warn of numbers with which nothing is learned or noticed, or that do not go together."""
    sampling, stop = config.sampling, config.learner.stop_when
    if sampling.top_k == 1 or (sampling.top_k > 1 and (sampling.min_p == 1 or sampling.top_p < LEAST_TOP_P)):
        found = f"sampling.top_k is {sampling.top_k}, top_p {sampling.top_p:g} and min_p {sampling.min_p:g}"
        yield f"{found}: one token is left, so all answers to a prompt are equal; set top_k=50 or drop them"
    shards, period = config.store.shards, math.lcm(*(share.denominator for share in config.data.shares))
    # The sources of tickets repeat with the period, and shards take tickets by turns.
    if config.algorithm.filters and math.gcd(shards, period) > 1:
        found = f"store.shards is {shards}, and some shards have more tickets of a source of data.train than"
        cure = "change what is trained from the shares of the sources; set store.shards=1, or drop filters"
        yield f"{found} others: algorithm.filters {cure}"
    if stop is not None and _counts_solved(stop.metric) and (stop.reaches or 0.0) > 1:
        found = f"learner.stop_when.reaches is {stop.reaches:g}, but {stop.metric} is at most 1"
        yield f"{found}, so nothing ends the training; set a share such as 0.9"
    if config.weights.probe_limit > HIGHEST_PROBE_LIMIT:
        found = (
            f"weights.probe_limit is {config.weights.probe_limit:g} nats, which an engine with wrong weights"
        )
        yield f"{found} does not reach; set it below 1"
    if config.control.stall_s < LEAST_STALL_S:
        found = (
            f"control.stall_s is {config.control.stall_s:g}, and a run without a new group for so long ends"
        )
        yield f"{found}, as while engines start; set at least {LEAST_STALL_S:g}"
    if config.model.lora and config.model.lora.sync == "merged" and config.model.dtype == "bfloat16":
        found = "model.lora.sync is merged, and bfloat16 rounds away what the first steps add to weights"
        yield f"{found}; set sync: adapter, or model.dtype: float32"
    for key, one in config.environments.items():
        if one.is_used and one.step_s > one.episode_s:
            text = f"{key}.step_s is {one.step_s:g}, but {key}.episode_s, which ends the whole episode, is"
            yield f"{text} {one.episode_s:g}; set step_s lower"


def _weights(config: Config) -> Iterator[str]:
    """Warn of a sum of rewards that is always 0, or never reaches what counts as solved."""
    lists = {tuple(config.functions_of(key)): config.of(task) for key, task in config.data.tasks.items()}
    for keys, one in lists.items():
        weights = {f"{key}.weight": config.reward_functions[key].weight for key in keys}
        if one.environment.is_used:
            weights["environment.weight"] = one.environment.weight
        if weights and not any(weights.values()):
            found = f"{', '.join(weights)} {'is' if len(weights) == 1 else 'are all'} 0"
            yield f"{found}: every response earns 0, so nothing is learned; set one to 1"
    stop, solved = config.learner.stop_when, config.data.curriculum
    metrics = {"checkpoint.best": config.checkpoint.best, "learner.stop_when.metric": stop and stop.metric}
    for key, metric in metrics.items():
        held_out = config.data.set_of(metric or "")
        if metric and held_out and _counts_solved(metric) and 0 < (most := _most(config.of(held_out))) < 1:
            found = f"{key} is {metric}, which counts rewards from 1 on, but the reward is at most {most:g}"
            yield f"{found}: it stays 0; set {metric.rpartition('/')[0]}/reward_mean, or higher weights"
    for one in config.training if solved.floor is not None else ():
        if 0 < (most := _most(one)) < solved.solved:
            found = f"data.curriculum.solved is {solved.solved:g}, but the reward is at most {most:g}"
            yield f"{found}: no prompt ever counts as solved; set at most {most:g}"
            return


def _counts_solved(metric: str) -> bool:
    return metric.rpartition("/")[2].partition("@")[0] in ("accuracy", "pass", "maj")


def _most(config: Config) -> float:
    """Return the highest reward of built-in functions, which give at most 1; infinity if others score."""
    functions = config.reward.functions
    if config.environment.is_used or any(part.function not in BUILTINS for part in functions):
        return math.inf
    return round(sum(max(part.weight, 0.0) for part in functions), 6)


def _prompts(config: Config, root: Node, path: Path) -> Iterator[str]:
    """Warn of a template that makes equal prompts, and of fewer prompts than are to be evaluated."""
    template = config.data.template
    try:
        names = [name for _, name, _, _ in Formatter().parse(template or "")]
        if template is not None and not config.plays and not any(names):
            yield "data.template names no column, so all prompts are equal; write one as {column}"
    except ValueError as error:  # of rows on the hub, which `validate` does not read
        yield f"data.template is not a valid template ({error}); set {{column}} for a column, {{{{ for {{"
    number = ("eval", "prompts")
    own = root.has(number) and root.nearest(number).place.rpartition(":")[0] in ("", str(path))
    for key, task in config.data.tasks.items():
        if not isinstance(task, EvalSet) or not local_files(task.path):
            continue
        wanted = task.limit or (config.eval.prompts if own else 0)
        with suppress(DataError):  # `validate` reports it
            if (count := len(load_rows(task.path))) < wanted:
                found = f"{wanted} prompts are to be evaluated, but {key} ({task.path}) has {count}"
                yield f"{found}; set eval.prompts lower, or give it more rows"


def _rows(config: Config) -> Iterator[str]:
    """Warn of rows that repeat others, and of values unlike those of the other rows."""
    for key, task in config.data.tasks.items():
        if not local_files(source := task.path):
            continue
        try:
            every = load_rows(source)
            rows = every.only(every.checked, [every[index] for index in every.checked])
        except DataError:  # `validate` reports it
            continue
        distinct = len({repr(sorted(row.items())) for row in rows})
        if len(rows) - distinct > REPEATED * len(rows) and not config.of(task).environment.is_used:
            which = "which" if len(rows) == len(every) else f"the {len(rows)} that were looked at"
            found = f"{key} ({source}) has {len(every)} rows, of {which} {distinct} are different"
            yield f"{found}; remove the repetitions, or give it rows of its own"
        data, taken = config.data.of(task), Counter[str]()
        for row in rows if data.map is None else ():
            with_messages(row, data, taken)
        if said := taken_answers(taken, len(rows)):
            yield f"{key} ({source}): {said}; set data.last_answer: continue to have it continued"
        answers = [(str(row.get("answer", "")), str(row.get(data.prompt_field, ""))) for row in rows]
        shown = sum(len(answer) >= LONG_ANSWER and answer in prompt for answer, prompt in answers)
        if shown > REPEATED * len(rows) and data.map is None and data.template is None:
            found = f"{key} ({source}) has its `answer` in the text of the prompt in {shown / len(rows):.0%}"
            yield f"{found} of the rows: copying it earns the reward; leave it out, unless that is the task"
        for column in dict.fromkeys(name for row in rows for name in row):
            yield from _odd_values(rows, column, key)


def _odd_values(rows: Rows, column: str, key: str) -> Iterator[str]:
    values = {index: row[column] for index, row in enumerate(rows) if row.get(column) is not None}
    null = [index for index, row in enumerate(rows) if column in row and row[column] is None]
    if len(rows) > 1 and all(row.get(column) in (None, "") for row in rows):
        yield f"{key}: column `{column}` is null or empty in every row; give it values, or drop it"
    elif 0 < len(null) <= ODD * len(rows):
        yield f"{key}: column `{column}` is null in {places(rows, null)}; give it a value, or drop the rows"
    nan = [index for index, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if nan:
        found = f"column `{column}` is {'infinite' if math.isinf(values[nan[0]]) else 'NaN'} in"
        yield f"{key}: {found} {places(rows, nan)}; give it a number, or remove the rows"
    named = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
    named |= {list: "a list", tuple: "a list"}
    kinds = {index: named.get(type(one), type(one).__name__) for index, one in values.items()}
    (usual, count), *others = Counter(kinds.values()).most_common() or [("", 0)]
    odd = [index for index, kind in kinds.items() if kind != usual]
    if others and len(odd) <= ODD * len(rows):
        found = f"{key}: column `{column}` holds {usual} in {count} rows and {kinds[odd[0]]} in"
        yield f"{found} {places(rows, odd)}; give all rows one type"


def _evaluation(config: Config, root: Node) -> Iterator[str]:
    data, every = config.data, config.eval.every
    if data.eval and every > config.learner.steps and root.has(("eval", "every")):
        found = f"eval.every is {every}, but learner.steps is {config.learner.steps}"
        yield f"{found}: only the first and the last weights are evaluated; set eval.every lower"
    for name, one in data.sets.items():
        is_held_out = one.path not in [source.path for source in data.train]
        if not is_held_out and (local_files(one.path) or data.split_of(one) == data.split):
            where = f"set {name} of data.eval" if name else "data.eval"
            yield f"{where} is data.train ({one.path}): the evaluation is not held out; give it its own rows"
    for key, task in config.data.tasks.items():
        if isinstance(task, EvalSet) and (task.every or 0) > config.learner.steps:
            found = f"{key}.every is {task.every}, but learner.steps is {config.learner.steps}"
            yield f"{found}: only the first and the last weights are evaluated; set it lower"
    if not data.eval and config.eval != EvalConfig():
        yield "eval is set, but data.eval is not: nothing is evaluated; set data.eval, or drop the section"


def _limits(config: Config, root: Node, path: Path) -> Iterator[str]:
    scale, limit = config.algorithm.aggregation.params.get("scale"), config.sampling.max_response_tokens
    if isinstance(scale, int | float) and 0 < scale != limit:
        yield (
            f"algorithm.aggregation.scale, which divides losses, is {scale:g}, but "
            f"sampling.max_response_tokens is {limit}: the learning rate acts as if it were "
            f"{limit / scale:.2g} times as high; set scale to {limit}"
        )
    if root.nearest(("data", "train")).place.rpartition(":")[0] != str(path):
        return
    # New data with the limits of an extended example: answers might be cut off after a few tokens.
    for key in LIMITS:
        place = root.nearest(("sampling", key)).place if root.has(("sampling", key)) else ""
        if place.rpartition(":")[0] not in ("", str(path)):
            found = f"sampling.{key} is {getattr(config.sampling, key)} from {place}"
            yield f"{found}, but {path} names other data; set there what your texts need"
