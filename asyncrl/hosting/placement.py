"""Who gets which GPUs, and how much of their memory: a pure function of the machine and the config.

Learner ranks come first, one GPU each, then generators. A generator gets GPUs without a rank while there are
enough for its tensor parallelism; else it shares the learner's.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.config.base import Mistake
from asyncrl.config.schema import Config

CPU_GENERATORS = 2
# Shares of a GPU's memory that its generators divide: without and with the learner on that GPU.
GENERATORS_SHARE, BESIDE_LEARNER_SHARE = 0.85, 0.4
# Left free on the learner's GPU: vLLM needs its whole share free next to its CUDA context, of half a GiB.
MARGIN = 0.03
# By how much a sum of shares that make up a whole GPU may exceed 1.
ROUNDING = 1e-9
# Why MIG rules a setting out: CUDA shows each process one instance, and NCCL works with none.
INSTANCES = "the GPUs are instances of MIG (see CUDA_VISIBLE_DEVICES), of which a process can use one"
WHOLE_GPUS = "use GPUs without MIG"
# Least share of a GPU with which a learner is worth a try.
LEAST_LEARNER_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank, generator or scorer on this host."""

    gpus: tuple[int, ...] = ()  # none on a CPU
    share: float = 1.0  # of the memory of each of these GPUs
    is_shared: bool = False  # with another process of the run, on any of them

    @property
    def options(self) -> list[str]:
        """Return the options of a generator or scorer that runs there."""
        if not self.gpus:
            return []
        return ["--memory-share", f"{self.share:g}", *(["--shared-gpu"] if self.is_shared else [])]

    def meets(self, other: "Seat") -> bool:
        return not set(self.gpus).isdisjoint(other.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The seats of the ranks, generators and scorers of this host."""

    ranks: tuple[Seat, ...]
    generators: tuple[Seat, ...]
    scorers: Mapping[str, Seat]  # by the name of the process

    @property
    def learner_gpus(self) -> tuple[int, ...]:
        """The GPUs of all ranks, in the order of ranks."""
        return tuple(gpu for seat in self.ranks for gpu in seat.gpus)

    @property
    def learner_share(self) -> float:
        """The share that every rank keeps to."""
        return min((seat.share for seat in self.ranks), default=1.0)

    @property
    def learner_seats(self) -> tuple[Seat, ...]:
        """The seats of all ranks, with the share that every rank keeps to."""
        return tuple(replace(seat, share=self.learner_share) for seat in self.ranks)

    def beside_learner(self) -> tuple[Seat, ...]:
        """The generators that share a GPU with the learner."""
        return tuple(seat for seat in self.generators if any(map(seat.meets, self.ranks)))


def choose_transport(wanted: str, *, one_host: bool) -> str:
    """Return the transport of `wanted`. `auto` is slot on one host, else tcp."""
    if wanted != "auto":
        return wanted
    return "slot" if one_host else "tcp"


def place(
    gpus: int,
    *,
    ranks: int,
    generators: int | None = None,
    tensor_parallel: int = 1,
    share: float | None = None,
    taken: Collection[int] = (),
    scorers: Mapping[str, tuple[int, ...]] = {},
) -> Placement:
    """Seat ranks and generators; without `gpus`, all use CPUs. Generators get a GPU of `taken` only in need.

    `generators` None means as many as there are GPUs for, `share` None an equal part of what they may use. It
    also seats what does not fit; `misplaced` says so. `scorers` divide the share of generators on their GPUs.
    """
    if not gpus:
        count = CPU_GENERATORS if generators is None else generators
        on_cpus = dict.fromkeys(scorers, Seat())
        return Placement(ranks=(Seat(),) * ranks, generators=(Seat(),) * count, scorers=on_cpus)
    learners = range(min(ranks, gpus))
    groups = _groups(gpus, len(learners), tensor_parallel, taken)
    count = len(groups) if generators is None else generators
    chosen = [groups[index % len(groups)] for index in range(count)]
    tenants = Counter(gpu for group in (*chosen, *scorers.values()) for gpu in group)
    seats = tuple(_tenant_seat(group, tenants, learners, share) for group in chosen)
    others = {name: _tenant_seat(group, tenants, learners, None) for name, group in scorers.items()}

    def rank_seat(rank: int) -> Seat:
        taken = [seat.share for seat in (*seats, *others.values()) if rank in seat.gpus]
        left = max(0.0, 1 - MARGIN - sum(taken)) if taken else 1.0
        return Seat(gpus=(rank,), share=left, is_shared=bool(taken))

    return Placement(ranks=tuple(map(rank_seat, learners)), generators=seats, scorers=others)


def _groups(gpus: int, learners: int, width: int, taken: Collection[int]) -> list[tuple[int, ...]]:
    """Return groups of `width` GPUs, without the learner's and those taken if there are any such groups."""
    every = [*range(learners, gpus), *range(learners)]
    own = [gpu for gpu in every if gpu not in taken]
    for among in ([gpu for gpu in own if gpu >= learners], own, every):
        starts = range(0, len(among) - width + 1, width)
        if groups := [tuple(among[start : start + width]) for start in starts]:
            return groups
    return [tuple(range(gpus))]


def _tenant_seat(
    group: tuple[int, ...], tenants: Counter[int], learners: Collection[int], share: float | None
) -> Seat:
    most, beside = max(tenants[gpu] for gpu in group), any(gpu in learners for gpu in group)
    default = (BESIDE_LEARNER_SHARE if beside else GENERATORS_SHARE) / most
    return Seat(gpus=group, share=default if share is None else share, is_shared=beside or most > 1)


def placement_of(
    config: Config, gpus: int, *, generators: int | None = None, has_learner: bool = True
) -> Placement:
    """Seat the part of a run on this host, which has `gpus` GPUs.

    `generators` replaces the config's number; scorers are where generators are. Without `has_learner` the
    ranks are on another host.
    """
    scorers, engines = dict[str, tuple[int, ...]](), {*config.judges, *config.teacher}
    for name, one in config.served.items() if generators != 0 else ():
        # Without `gpus` in its section it has the first ones, as vLLM takes them.
        width = config.generator.tensor_parallel if name in engines else 1
        for index in range(one.count):
            scorers[f"{name}.{index}"] = one.gpus_of(index) or tuple(range(min(width, gpus)))
    return place(
        gpus if config.learner.device != "cpu" else 0,
        ranks=config.ranks_per_host if has_learner else 0,
        generators=config.generator.count if generators is None else generators,
        tensor_parallel=config.generator.tensor_parallel,
        share=config.generator.gpu_memory_utilization,
        taken=config.taken_gpus,
        scorers=scorers,
    )


def place_slots(
    config: Config, placement: Placement, reads: Callable[[Collection[int], int], Mapping[int, bool | None]]
) -> Literal["gpu", "host"]:
    """Return what `weights.slots` means. `reads` says which GPUs can read the memory of another one."""
    if config.weights.slots != "auto":
        return config.weights.slots
    if config.weights.transport not in ("auto", "slot") or config.control.bind or not placement.learner_gpus:
        return "gpu"
    source = placement.learner_gpus[0]
    readers = {gpu for seat in placement.generators for gpu in seat.gpus} - {source}
    return "host" if readers and False in reads(readers, source).values() else "gpu"


def overfull(seat: Seat, others: Mapping[str, Seat]) -> str:
    """Say which GPU a new process would overfill, where `others` keep their shares; empty if none."""
    for gpu in seat.gpus:
        shares = {name: other.share for name, other in others.items() if gpu in other.gpus}
        if seat.share + sum(shares.values()) > 1 + ROUNDING:
            kept = ", ".join(f"{share:.0%} for {name}" for name, share in shares.items())
            return f"{seat.share:.0%} of GPU {gpu}, of which processes that run keep {kept}"
    return ""


def idle_gpus(placement: Placement, gpus: int) -> tuple[int, ...]:
    """Return the GPUs that `placement` leaves unused."""
    used = {gpu for seat in (*placement.ranks, *placement.generators) for gpu in seat.gpus}
    return tuple(gpu for gpu in range(gpus) if gpu not in used)


def misplaced(
    config: Config, gpus: int, *, generators: bool = True, instances: bool = False
) -> Iterator[Mistake]:
    """Find what our GPUs, or MIG `instances`, rule out; without `generators`, these are on other hosts."""
    if config.learner.device == "cpu" or not gpus:
        return
    shown = _shown(gpus)
    if (ranks := config.learner.ranks) > 1 and instances:
        yield Mistake(("learner.ranks",), f"found {ranks} ranks, but {INSTANCES}; set 1, or {WHOLE_GPUS}")
    elif (ranks := config.ranks_per_host) > gpus:
        yield Mistake(("learner.ranks",), f"found {ranks} ranks, but {shown}; allowed is one rank per GPU")
    if not generators:
        yield from _nccl_with_instances(config, instances=instances)
        return
    placement = placement_of(config, gpus)
    yield from misplaced_generators(config, gpus, placement, instances=instances)
    beside = placement.beside_learner()
    judged = config.generator.tensor_parallel > gpus or instances
    if not judged and config.weights.transport == "nccl" and any(map(placement.ranks[0].meets, beside)):
        text = (
            "found nccl, which refuses two processes on one GPU, but generators share a GPU with the learner "
            f"({shown}); leave it auto, which is {choose_transport('auto', one_host=True)} here"
        )
        yield Mistake(("weights.transport",), text)


def misplaced_generators(
    config: Config, gpus: int, placement: Placement, *, instances: bool = False
) -> Iterator[Mistake]:
    """Find what this host's GPUs rule out of its generators, which are in `placement`."""
    yield from _nccl_with_instances(config, instances=instances)
    for name, scorer in config.served.items():
        if (gpu := max(scorer.gpus, default=-1)) >= gpus:
            key = "algorithm.reference.gpus" if name in config.teacher else f"scorers.{name}.gpus"
            yield Mistake((key,), f"found {gpu}, but {_shown(gpus)}; allowed is 0 to {gpus - 1}")
    if (width := config.generator.tensor_parallel) > 1 and instances:
        found = f"found {width} GPUs per generator, but {INSTANCES}"
        yield Mistake(("generator.tensor_parallel",), f"{found}; set 1, or {WHOLE_GPUS}")
    elif width > gpus:
        found = f"found {width} GPUs per generator, but {_shown(gpus)}"
        yield Mistake(("generator.tensor_parallel",), f"{found}; set {gpus} or less, with a smaller model")
    else:
        yield from _shares_too_large(config, placement)


def _nccl_with_instances(config: Config, *, instances: bool) -> Iterator[Mistake]:
    if instances and config.weights.transport == "nccl":
        text = f"found nccl, which does not support MIG, but {INSTANCES}; leave it auto, or {WHOLE_GPUS}"
        yield Mistake(("weights.transport",), text)


def _shown(gpus: int) -> str:
    return f"this machine shows {gpus} GPU{'s' * (gpus > 1)} (see CUDA_VISIBLE_DEVICES)"


def _shares_too_large(config: Config, placement: Placement) -> Iterator[Mistake]:
    share = config.generator.gpu_memory_utilization
    if share is None:
        return
    tenants = Counter(gpu for seat in placement.generators for gpu in seat.gpus)
    for gpu, count in sorted(tenants.items()):
        has_learner = gpu in placement.learner_gpus
        scorers = sum(seat.share for seat in placement.scorers.values() if gpu in seat.gpus)
        allowed = (1 - MARGIN - LEAST_LEARNER_SHARE if has_learner else 1.0) - scorers
        if count * share > allowed:
            users = ["the learner"] if has_learner else []
            users += [f"scorers ({scorers:.0%})"] if scorers else []
            beside = f" beside {' and '.join(users)}" if users else ""
            yield Mistake(
                ("generator.gpu_memory_utilization", "generator.count", "learner.ranks"),
                f"found {share:g} for each of {count} generators on GPU {gpu}{beside}, {count * share:.0%} "
                f"in all; allowed is at most {int(100 * allowed / count) / 100:g}; leave it null, which "
                "divides the GPU, or lower generator.count",
            )
            return
