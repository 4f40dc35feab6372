"""One rule from a metric's name in docs/metrics.md to its name in Prometheus.

    asyncrl_ + the name with `_` for every other sign + _ + its unit, unless the name says the unit already

`time/step` is `asyncrl_time_step_seconds`, `completions/truncated_share` stays `asyncrl_completions_truncated_share`, and the bin
`staleness/in_queue/3` is `asyncrl_staleness_in_queue_share{bin="3"}`. What generators measure begins with `asyncrl_generator_`.
"""

import re

from asyncrl.telemetry.histograms import BIN

PREFIX = "asyncrl_"
GENERATOR_PREFIX = "asyncrl_generator_"
UNITS = (
    ("", r"(reward|hook|alarm)/.*"),
    ("tokens_per_second", r".*tokens_per_s"),
    ("seconds", r"time/.*|.*_s"),
    ("share", r"idle/.*|lag/stale|advantage/positive|group/(zero_variance|singleton|majority)|eval/(accuracy|pass@.*|maj@.*)"),
    ("share", r"weight/(zero|truncated|rejected)(/.*)?|critic/(explained_variance|value_clipped)"),
    ("share", r"policy/(left_out|clipped_\w+|dual_clipped)(/.*)?|.*/(ess|tail_high|tail_low)|.*_share(/.*)?"),
    ("nats", r".*/(entropy|logprob|kl_reference|nll|k1|k3|probe_max|abs_log_ratio/max)"),
    ("steps", r"(staleness|lag)/.*"),
    ("tokens", r"(completions|eval|groups)/length_.*"),
)
"""(unit, names that have it); the first that fits counts, and what fits none has no unit that could be told in a word."""


def prometheus_name(name: str, prefix: str = PREFIX) -> tuple[str, dict[str, str]]:
    """(name, labels) of a logged metric."""
    if found := BIN.fullmatch(name):
        return f"{_plain(prefix, found['name'])}_share", {"bin": found["at"]}
    unit = next((unit for unit, names in UNITS if re.fullmatch(names, name)), "")
    plain = re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", _plain(prefix, name)))
    return (plain if not unit or f"_{unit}" in plain else f"{plain}_{unit}"), {}


def _plain(prefix: str, name: str) -> str:
    return prefix + re.sub(r"[^a-zA-Z0-9_]+", "_", name)
