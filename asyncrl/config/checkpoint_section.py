"""The sections about the weights of a run: which checkpoints stay, and which weights end the training."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.algo.ranges import PositiveInt
from asyncrl.config.base import Part, marked

# As the learner logs it; the pattern refuses a name without its kind.
Metric = Annotated[str, Field(pattern=r"^\w+/\S+$", examples=["eval/accuracy"])]

# Kinds of metrics of steps and evaluations, and the names of each kind; `*` stands for any text. Alarms
# are not among them: they arise from metrics when these have been judged.
_NAMES = """
reward: mean std min max */mean
group: reward_std zero_variance majority singleton
advantage: mean abs std min max positive
preference: pairs margin accuracy chosen_logprob rejected_logprob
eval: accuracy pass@* best@* maj@* answered_share reward_mean se/* prompts length_mean dead_groups
eval: newest_version
completions: length_mean length_max truncated_share answered_share masked_share
groups: trained takes rejected_* rejected_untrainable rejected_deadly length_rejected_*
groups: collapsed_at_0 collapsed_at_1 collapsed_below_0
groups: collapsed_between collapsed_above_1
episodes: turns_mean turns_max sequences_mean ended_share/* missing/* stateless_turn_share
sequences: duplicate_share
environment: *
mismatch: turn/first turn/middle turn/last
tokens: first middle last short medium long solved
staleness: mean max in_flight in_queue in_flight/* in_queue/* masked_share masked_share/short
staleness: masked_share/medium masked_share/long masked_share/turn/first masked_share/turn/middle
staleness: masked_share/turn/last
policy: loss entropy logprob grad_norm lr skipped_steps empty_steps kl_reference kl_coefficient
policy: entropy_coefficient clipped_low clipped_high dual_clipped left_out capped penalised
policy: left_out/short left_out/medium left_out/long nll/solved
mismatch policy drift: k1 k3 ratio ratio/max ratio/min abs_log_ratio/max ess tail_high tail_low chi2_token
mismatch policy drift: chi2_sequence perplexity_ratio
reference: k3 nll
perplexity: behaviour proximal current
weight: mean max zero zero/short zero/medium zero/long truncated rejected
critic: loss explained_variance value_mean value_min value_max return_mean return_min return_max
critic: value_clipped grad_norm lr skipped_steps
baseline: explained_variance
hook: *
lag: mean max stale
buffer: audit_mismatch recoveries
curriculum: always never
weights: version updates updates_failed moved probe_max probe_mean floor_max floor_mean probe_limit
weights: transfer_gb_per_s paused_s joined left died messages_rejected
time: wait_groups plan measure critic hooks train publish checkpoint step sampling_s reward_s
telemetry: failed
checkpoint: failed
perf: learner_tokens_per_s learner_tflops_per_s mfu
idle: learner
memory: allocated_bytes/rank* reserved_bytes/rank* planned_bytes/rank*
"""
METRICS = frozenset(
    f"{kind}/{name}"
    for kinds, _, names in (line.partition(":") for line in _NAMES.strip().splitlines())
    for kind in kinds.split()
    for name in names.split()
)


class HubConfig(Part):
    """Where the model of checkpoints is pushed on the Hugging Face hub, next to training."""

    repo: Annotated[
        str, Field(pattern=r"^[\w.-]+/[\w.-]+$", examples=["you/model"]), marked(stand_in="no/repository")
    ]
    """Repository `OWNER/NAME`; the token is that of `hf auth login`, or HF_TOKEN."""
    every: PositiveInt | None = None
    """Steps between pushes, among those with a checkpoint; null: only the last one."""
    private: bool = True
    """Whether a new repository is private."""


class CheckpointConfig(Part):
    """Saving and resuming of runs."""

    every: PositiveInt = 50
    """Steps between checkpoints; the last step saves one."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept; a damaged one then costs steps but no group."""
    keep_every: PositiveInt | None = None
    """N: every Nth checkpoint is kept for good; after a change of this or `every`, by the new numbers."""
    best: Metric | None = None
    """Metric whose best checkpoint is kept, for `asyncrl export RUN --best` and `asyncrl eval RUN --best`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """The best value of that metric."""
    hub: HubConfig | None = None
    """Push of the model to the Hugging Face hub."""

    def kept(self, steps: int) -> dict[str, int]:
        """Return how many checkpoints are left after so many steps, at most, by the key that keeps them."""
        lasting = steps // (self.every * self.keep_every) if self.keep_every else 0
        return {"keep": self.keep, "keep_every": lasting, "best": int(self.best is not None)}


class StopConfig(Part):
    """End of the training before `learner.steps`, by a metric."""

    metric: Annotated[Metric, marked(stand_in="eval/accuracy")]
    """Metric such as `eval/accuracy`, of evaluations or of steps."""
    reaches: float | None = None
    """Value at which the training ends."""
    patience: PositiveInt | None = None
    """Values in a row without a new best that end the training."""
    best_is: Literal["highest", "lowest"] = "highest"
    """The best value; with `lowest`, `reaches` is met from above."""
