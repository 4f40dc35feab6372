"""Which keys of the config may change when a run is resumed, and why the others may not.

A checkpoint holds `fixed_values`, which are compared with the config before anything is written or started.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.base import Mistake
from asyncrl.config.registry import needs
from asyncrl.config.schema import Config
from asyncrl.config.wording import shown

# The key defines the run: with another value it is another run.
OTHER_RUN = "another run"
# The weights would fit the new value, but other parts of the checkpoint would not.
REFUSED = "refused"
MAY_CHANGE = "may change"


class Bound(NamedTuple):
    """A key that must not change: how strictly, and why."""

    kind: str
    why: str


_TICKET = Bound(OTHER_RUN, "it decides which prompt a ticket means")
_PROMPT = Bound(OTHER_RUN, "it is part of every prompt, so the run would have two tasks")
_MODEL = Bound(
    OTHER_RUN,
    "it decides the tokens of every prompt and the reference; a moved model can be linked to its old path",
)

BOUND: dict[str, Bound] = {
    "run.name": Bound(OTHER_RUN, "it names the run directory and the keys in the store"),
    "run.seed": _TICKET,
    "model.path": _MODEL,
    "model.revision": _MODEL,
    "model.dtype": Bound(REFUSED, "parameters and optimizer state are stored in it"),
    "model.chat_template": _PROMPT,
    "data.train": Bound(
        OTHER_RUN,
        "its rows and their order decide which prompt a ticket means, so none may be appended either",
    ),
    "data.prompt_field": _PROMPT,
    "data.template": _PROMPT,
    "data.system": _PROMPT,
    "data.split": _TICKET,
    "data.shuffle": _TICKET,
    "data.curriculum.floor": Bound(REFUSED, "it decides which prompt a ticket means"),
    "algorithm.advantage": Bound(
        REFUSED, "a critic is stored with its optimizer state; both advantages must have one, or neither"
    ),
    "learner.ranks": Bound(REFUSED, "the optimizer state is stored in one part for each rank"),
    "learner.zero_stage": Bound(REFUSED, "it decides how parameters and optimizer state are stored"),
    "learner.offload_optimizer": Bound(REFUSED, "it decides how the optimizer state is stored"),
    "store.shards": Bound(REFUSED, "each shard counts its own ids, which would be others"),
}

# Groups that were sampled before a change are trained as they are. If they no longer fit (too long, too old,
# without the greedy reward), they are rejected, counted with the reason, and their credit is returned.
FREE: dict[str, str] = {
    "run": "root environment",
    "model": "trust_remote_code tool_parser",
    "data": "eval eval_split",
    "data.curriculum": "solved",
    "reward": "functions timeout_s workers attempts sandbox memory_gib",
    "reward.functions": "function weight name",
    "environment": "uses command address frozen python max_turns step_s episode_s "
    "episodes_per_slot replays weight workers memory_gib max_observation_characters history",
    "batch": "groups group_size minibatches epochs missing_episodes",
    "sampling": "temperature max_prompt_tokens max_response_tokens stop top_p top_k min_p",
    "staleness": "max_lag window_groups policy",
    "algorithm": "policy_loss correction rejections proximal aggregation filters max_refills shaping "
    "mask_truncated",
    "algorithm.kl": "coefficient estimator bias_corrected placement target horizon reference_decay",
    "algorithm.entropy": "coefficient target step maximum",
    "critic": "clip warmup_steps",
    "critic.optimizer": "lr betas eps weight_decay warmup_steps schedule final_share max_grad_norm",
    "learner": "steps sequence_parallel device tokens_per_microbatch logprob_chunk_tokens "
    "gradient_checkpointing threads hooks",
    "learner.optimizer": "lr betas eps weight_decay warmup_steps schedule final_share max_grad_norm",
    "generator": "count tensor_parallel max_running gpu_memory_utilization kv_cache_gib enforce_eager "
    "threads recompute_kv lease_s vllm engine",
    "weights": "transport slots deadline_s bucket_mib probe_tokens probe_limit",
    "store": "url bind password_env insecure fsync max_gib isolate_decoding",
    "control": "bind heartbeat_s timeout_s stall_s hang_s slow_s max_restarts",
    "eval": "every prompts samples temperature",
    "checkpoint": "every keep",
    "telemetry": "wandb wandb_project tensorboard trackio trackio_project trace prometheus_port "
    "prometheus_host samples_per_step",
}


def on_resume(key: str) -> str:
    """Say whether a key may change, and if not, why. Raises KeyError for a key without an entry."""
    if key in BOUND:
        return f"{BOUND[key].kind}: {BOUND[key].why}"
    section, _, name = key.rpartition(".")
    if name not in FREE[section].split():
        raise KeyError(key)
    return MAY_CHANGE


def fixed_values(config: Config, *, rows: str) -> dict[str, Any]:
    """Return the values of the keys in `BOUND` for the checkpoint.

    `rows` is the fingerprint of `data.train`: the file may be moved, but its rows may not change.
    """
    found: dict[str, Any] = {}
    for key in BOUND:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        found[key] = value
    has_critic = "values_T" in needs("advantage", config.algorithm.advantage.name)
    return found | {
        "data.train": rows,
        "algorithm.advantage": f"one {'with' if has_critic else 'without'} a critic",
    }


def resume_findings(
    saved: Mapping[str, Any], values: Mapping[str, Any], *, weights: Path
) -> Iterator[Mistake]:
    """Find every key of `BOUND` that `values` changes. `weights` is the run's newest model directory."""
    for key, (kind, why) in BOUND.items():
        new = values[key]
        old = saved.get(key, new)  # an earlier release did not record every key
        # Two spellings of one path are the same model.
        if old == new or (
            key == "model.path" and Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
        ):
            continue
        cure = "begin another run (another run.name; or --fresh, which deletes this one)"
        if kind == REFUSED:
            cure = f"begin another run from its weights (another run.name, and model.path={weights})"
        allowed = f"{shown(old)}, with which this run was begun: {why}"
        yield Mistake((key,), f"found {shown(new)}; allowed is {allowed}; set it back, or {cure}")
