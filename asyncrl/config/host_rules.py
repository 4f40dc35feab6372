"""The rules between the hosts of a run and what they have."""

from collections.abc import Callable, Iterator

from asyncrl.config.base import Mistake
from asyncrl.config.sections import ClusterConfig, GeneratorConfig, LearnerConfig
from asyncrl.config.wording import divisors


def _hosts_have_generators(cluster: ClusterConfig, generator: GeneratorConfig) -> Iterator[Mistake]:
    if cluster.kind is not None and generator.count is None:
        text = "cluster.kind is set, but generator.count is not; set it to the generators of each host"
        yield Mistake(("generator.count", "cluster.kind"), text)


def _hosts_divide_the_learner(cluster: ClusterConfig, learner: LearnerConfig) -> Iterator[Mistake]:
    hosts, ranks, per_sequence = cluster.learner_hosts, learner.ranks, learner.sequence_parallel
    found = f"cluster.learner_hosts is {hosts}"
    if hosts > 1 and cluster.kind is None:
        text = f"{found}, but cluster.kind is not set; set it to what places hosts, or drop learner_hosts"
        yield Mistake(("cluster.learner_hosts", "cluster.kind"), text)
    if ranks % hosts:
        text = f"{found}, which does not divide learner.ranks ({ranks}); set one of {divisors(ranks)}"
        yield Mistake(("cluster.learner_hosts", "learner.ranks"), text)
    elif ranks // hosts % per_sequence:
        text = f"{found}, with {ranks // hosts} ranks each, of which learner.sequence_parallel "
        text += (
            f"({per_sequence}) would divide a sequence over two hosts; set one of {divisors(ranks // hosts)}"
        )
        yield Mistake(("learner.sequence_parallel", "cluster.learner_hosts"), text)


HOST_RULES: tuple[Callable[..., Iterator[Mistake]], ...] = (
    _hosts_have_generators,
    _hosts_divide_the_learner,
)
