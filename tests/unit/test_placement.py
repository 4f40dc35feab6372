"""Who gets which GPUs: a table, invariants over all small machines, and what a machine rules out."""

import itertools

import pytest

from asyncrl.hosting.placement import (
    MARGIN,
    idle_gpus,
    misplaced,
    overfull,
    place,
    place_slots,
    placement_of,
)
from tests.support.task_config import config_of


@pytest.mark.parametrize(
    ("gpus", "ranks", "width", "generators"),
    [
        (0, 1, 1, [(), ()]),
        (1, 1, 1, [(0,)]),
        (2, 1, 1, [(1,)]),
        (2, 2, 1, [(0,), (1,)]),
        (2, 1, 2, [(1, 0)]),
        (4, 2, 1, [(2,), (3,)]),
        (4, 2, 2, [(2, 3)]),
        (4, 1, 2, [(1, 2)]),
        (8, 4, 1, [(4,), (5,), (6,), (7,)]),
        (8, 4, 2, [(4, 5), (6, 7)]),
        (8, 8, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 0, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_defaults(gpus, ranks, width, generators):
    placement = place(gpus, ranks=ranks, tensor_parallel=width)
    assert [seat.gpus for seat in placement.generators] == generators
    assert [seat.gpus for seat in placement.ranks] == [(rank,) if gpus else () for rank in range(ranks)]


@pytest.mark.parametrize(
    ("gpus", "ranks", "count", "expected", "shares"),
    [
        (1, 1, 2, [(0,), (0,)], [0.2, 0.2]),
        (4, 2, 4, [(2,), (3,), (2,), (3,)], [0.425] * 4),
        (4, 2, 3, [(2,), (3,), (2,)], [0.425, 0.85, 0.425]),
        (8, 4, 2, [(4,), (5,)], [0.85, 0.85]),
        (4, 2, 0, [], []),
    ],
)
def test_more_or_fewer_generators_than_gpus(gpus, ranks, count, expected, shares):
    seats = place(gpus, ranks=ranks, generators=count).generators
    assert [seat.gpus for seat in seats] == expected
    assert [seat.share for seat in seats] == pytest.approx(shares)


@pytest.mark.parametrize(
    ("gpus", "ranks", "width", "taken", "generators"),
    [
        (4, 1, 1, [3], [(1,), (2,)]),
        (4, 1, 1, [2], [(1,), (3,)]),
        (4, 1, 2, [2], [(1, 3)]),
        (4, 2, 1, [0], [(2,), (3,)]),
        (2, 1, 1, [1], [(0,)]),
        (2, 2, 1, [1], [(0,)]),
        (1, 1, 1, [0], [(0,)]),
        (2, 0, 1, [0, 1], [(0,), (1,)]),
    ],
)
def test_generators_leave_the_gpus_of_served_models_free_while_there_are_others(
    gpus, ranks, width, taken, generators
):
    placement = place(gpus, ranks=ranks, tensor_parallel=width, taken=taken)
    assert [seat.gpus for seat in placement.generators] == generators


def judged_on(*gpus, count=1, **sections):
    functions = [{"function": "model_score", "params": {"scorer": "judge"}}]
    judge = {"model": "m", "gpus": gpus, "count": count}
    return config_of(scorers={"judge": judge}, reward={"functions": functions}, **sections)


def test_each_model_that_the_run_serves_keeps_its_gpus():
    teacher = {"path": "t", "scorers": 1, "gpus": [1]}
    config = judged_on(3, algorithm={"advantage": "distill", "reference": teacher})
    assert config.taken_gpus == {1, 3}
    assert [seat.gpus for seat in placement_of(config, 5).generators] == [(2,), (4,)]


@pytest.mark.parametrize(
    ("gpus", "machine", "count", "scorers", "generators", "rank"),
    [
        ((), 1, 1, [0.2], [0.2], 0.57),
        ((0,), 1, 2, [0.4 / 3] * 2, [0.4 / 3], 0.57),
        ((), 2, 1, [0.4], [0.85], 0.57),
        ((1,), 2, 1, [0.85], [0.4], 0.57),
        ((2,), 3, 1, [0.85], [0.85], 1.0),
        ((2,), 3, 2, [0.425, 0.425], [0.85], 1.0),
    ],
)
def test_scorers_and_generators_divide_the_gpus_that_they_share(
    gpus, machine, count, scorers, generators, rank
):
    placement = placement_of(judged_on(*gpus, count=count), machine)
    assert [seat.share for seat in placement.scorers.values()] == pytest.approx(scorers)
    assert list(placement.scorers) == [f"judge.{index}" for index in range(count)]
    assert [seat.share for seat in placement.generators] == pytest.approx(generators)
    assert placement.learner_share == pytest.approx(rank)
    assert not list(misplaced(judged_on(*gpus, count=count), machine))


def test_scorers_are_where_generators_are():
    config = judged_on(1)
    assert not placement_of(config, 2, generators=0).scorers
    assert placement_of(config, 0).scorers["judge.0"].gpus == ()
    command = placement_of(judged_on(), 1, generators=1, has_learner=False)
    assert [seat.share for seat in (*command.generators, *command.scorers.values())] == [0.425, 0.425]


def test_a_teacher_is_as_wide_as_the_policy_and_a_classifier_takes_one_gpu():
    teacher = {"path": "t", "scorers": 1}
    config = judged_on(
        generator={"tensor_parallel": 2}, algorithm={"advantage": "distill", "reference": teacher}
    )
    seats = placement_of(config, 4).scorers
    assert {name: seat.gpus for name, seat in seats.items()} == {"judge.0": (0,), "teacher.0": (0, 1)}


def test_no_gpu_is_given_out_twice_over_and_none_is_shared_without_need():
    """For every machine and run of this size, with the default shares."""
    axes = (1, 2, 4, 8), (0, 1, 2, 4, 8), (None, 1, 3, 9), (1, 2, 4), (0, 1, 3)
    for gpus, ranks, count, width, scorers in itertools.product(*axes):
        if max(ranks, width) > gpus:
            continue
        served = {str(index): (index % gpus,) for index in range(scorers)}
        placement = place(gpus, ranks=ranks, generators=count, tensor_parallel=width, scorers=served)
        seats = [*placement.ranks, *placement.generators, *placement.scorers.values()]
        assert len(placement.generators) == (count or len(placement.generators)) > 0
        for seat in placement.generators:
            assert len(set(seat.gpus)) == width and max(seat.gpus) < gpus
        for gpu in range(gpus):
            there = [seat for seat in seats if gpu in seat.gpus]
            assert sum(seat.share for seat in there) <= 1 + 1e-9
            if len(there) > 1:
                assert all(seat.is_shared for seat in there)
            elif there and there[0].gpus == (gpu,):
                assert not there[0].is_shared
        if placement.beside_learner():
            assert gpus - ranks < width
        if count is None and ranks < gpus and width == 1 and not scorers:
            assert not any(seat.is_shared for seat in seats)


def test_the_readme_s_config_runs_on_one_gpu_without_a_further_key():
    config = config_of()
    placement = placement_of(config, 1)
    (rank,), (generator,) = placement.ranks, placement.generators
    assert rank.gpus == generator.gpus == (0,) and rank.is_shared and generator.is_shared
    assert rank.share + generator.share + MARGIN == pytest.approx(1) and generator.share == 0.4
    assert not list(misplaced(config, 1))
    assert [len(placement_of(config, gpus).generators) for gpus in (0, 1, 2, 4, 8)] == [2, 1, 1, 3, 7]


def test_explicit_shares_are_kept_and_the_learner_gets_the_rest():
    config = config_of(generator={"count": 2, "gpu_memory_utilization": 0.25})
    placement = placement_of(config, 1)
    assert [seat.share for seat in placement.generators] == [0.25, 0.25]
    assert placement.learner_share == pytest.approx(1 - MARGIN - 0.5)
    assert placement_of(config, 4).learner_share == 1.0


@pytest.mark.parametrize(
    ("sections", "gpus", "key", "said"),
    [
        ({"learner": {"ranks": 4}}, 2, "learner.ranks", "found 4 ranks, but this machine shows 2 GPUs"),
        ({"generator": {"tensor_parallel": 4}}, 2, "generator.tensor_parallel", "set 2 or less"),
        (
            {"generator": {"count": 2, "gpu_memory_utilization": 0.85}}, 1,
            "generator.gpu_memory_utilization", "0.85 for each of 2 generators on GPU 0 beside the learner, 170%",
        ),
        (
            {"generator": {"count": 4, "gpu_memory_utilization": 0.85}, "learner": {"ranks": 2}}, 4,
            "generator.gpu_memory_utilization", "allowed is at most 0.5; leave it null",
        ),
        ({"generator": {"gpu_memory_utilization": 0.95}}, 1, "generator.gpu_memory_utilization", "at most 0.87"),
        ({"weights": {"transport": "nccl"}}, 1, "weights.transport", "leave it auto, which is slot here"),
        (
            {
                "scorers": {"judge": {"model": "m", "gpus": [0, 3]}},
                "reward": {"functions": [{"function": "model_score", "params": {"scorer": "judge"}}]},
            }, 2,
            "scorers.judge.gpus", "found 3, but this machine shows 2 GPUs (see CUDA_VISIBLE_DEVICES); allowed is 0 to 1",
        ),
        (
            {
                "generator": {"gpu_memory_utilization": 0.7},
                "algorithm": {"advantage": "distill", "reference": {"path": "t", "scorers": 1}},
            }, 1,
            "generator.gpu_memory_utilization", "beside the learner and scorers (20%), 70% in all; allowed is at most 0.6",
        ),
        (
            {"algorithm": {"advantage": "distill", "reference": {"path": "t", "scorers": 1, "gpus": [1]}}}, 1,
            "algorithm.reference.gpus", "found 1, but this machine shows 1 GPU",
        ),
    ],
)  # fmt: skip
def test_what_a_machine_rules_out_is_named_with_the_way_out(sections, gpus, key, said):
    (mistake,) = misplaced(config_of(**sections), gpus)
    assert mistake.keys[0] == key and said in mistake.text


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"learner": {"ranks": 2}}, "learner.ranks"),
        ({"learner": {"ranks": 4}}, "learner.ranks"),
        ({"generator": {"tensor_parallel": 2}}, "generator.tensor_parallel"),
        ({"generator": {"tensor_parallel": 4}}, "generator.tensor_parallel"),
        ({"weights": {"transport": "nccl"}}, "weights.transport"),
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_instances_of_mig_rule_out_what_needs_two_of_them(sections, key, gpus):
    (mistake,) = misplaced(config_of(**sections), gpus, instances=True)
    assert mistake.keys == (key,)
    assert "instances of MIG (see CUDA_VISIBLE_DEVICES), of which a process can use one; " in mistake.text
    elsewhere = list(misplaced(config_of(**sections), gpus, generators=False, instances=True))
    assert bool(elsewhere) == (not key.startswith("generator"))
    assert not list(misplaced(config_of(), gpus, instances=True))


@pytest.mark.parametrize(
    ("gpus", "ranks", "now", "then", "overfilled"),
    [
        (1, 1, 1, 2, "20% of GPU 0, of which processes that run keep 57% for rank 0, 40% for g0"),
        (2, 1, 1, 2, "42% of GPU 1, of which processes that run keep 85% for g0"),
        (4, 2, 2, 3, "42% of GPU 2, of which processes that run keep 85% for g0"),
        (4, 2, 1, 2, ""),  # GPU 3 is free
        (0, 1, 2, 9, ""),
    ],
)
def test_a_running_process_keeps_its_share(gpus, ranks, now, then, overfilled):
    before, after = (place(gpus, ranks=ranks, generators=count) for count in (now, then))
    others = {f"rank {rank}": seat for rank, seat in enumerate(before.learner_seats)}
    others |= {f"g{index}": seat for index, seat in enumerate(before.generators)}
    assert overfull(after.generators[-1], others) == overfilled
    for index, seat in enumerate(before.generators):
        assert not overfull(seat, {name: other for name, other in others.items() if name != f"g{index}"})


@pytest.mark.parametrize(
    ("gpus", "ranks", "count", "width", "idle"),
    [
        (8, 2, None, 2, ()),
        (8, 1, None, 3, (7,)),
        (8, 3, None, 3, (6, 7)),
        (8, 4, 2, 1, (6, 7)),
        (4, 2, 0, 1, (2, 3)),
        (1, 1, None, 1, ()),
        (0, 1, None, 1, ()),
    ],
)
def test_gpus_without_a_seat(gpus, ranks, count, width, idle):
    assert idle_gpus(place(gpus, ranks=ranks, generators=count, tensor_parallel=width), gpus) == idle


@pytest.mark.parametrize(
    ("sections", "gpus"),
    [
        ({"weights": {"transport": "nccl"}}, 2),
        ({"weights": {"transport": "nccl"}}, 0),
        ({"weights": {"transport": "nccl"}, "learner": {"device": "cpu"}}, 1),
        ({"learner": {"device": "cuda"}}, 0),  # `doubts` says that
        ({"learner": {"ranks": 4}}, 0),
        ({"generator": {"count": 2, "gpu_memory_utilization": 0.4}}, 1),
        ({"generator": {"tensor_parallel": 2}}, 2),
    ],
)
def test_what_fits_is_not_refused(sections, gpus):
    assert not list(misplaced(config_of(**sections), gpus))


def test_generators_on_other_hosts_are_not_judged_by_the_learner_s_gpus():
    config = config_of(generator={"count": 6, "tensor_parallel": 4, "gpu_memory_utilization": 0.9})
    assert list(misplaced(config, 1)) and not list(misplaced(config, 1, generators=False))
    assert placement_of(config, 1, generators=0).learner_share == 1.0


@pytest.mark.parametrize(
    ("gpus", "changes", "peers", "expected"),
    [
        (0, {}, (), "gpu"),
        (1, {}, (), "gpu"),
        (2, {}, {(0, 1)}, "gpu"),
        (2, {}, (), "host"),
        (2, {"learner": {"ranks": 2}}, (), "host"),
        (2, {"weights": {"slots": "gpu"}}, (), "gpu"),
        (1, {"weights": {"slots": "host"}}, (), "host"),
        (2, {"weights": {"transport": "nccl"}}, (), "gpu"),
        (2, {"weights": {"transport": "disk"}}, (), "gpu"),
        (
            2,
            {"control": {"bind": "tcp://10.0.0.1:5555"}, "store": {"bind": "tcp://10.0.0.1:6380"}},
            (),
            "gpu",
        ),
        (4, {}, {(0, 1), (0, 2), (0, 3)}, "gpu"),
        (4, {}, {(0, 1), (0, 2)}, "host"),
        (4, {"learner": {"ranks": 2}}, {(0, 2), (0, 3)}, "gpu"),
        (2, {}, None, "gpu"),
    ],
)
def test_versions_are_published_where_every_generator_can_read_them(gpus, changes, peers, expected):
    """`peers` are the pairs of GPUs that read each other's memory; None: it is not known."""
    config = config_of(**changes)

    def reads(readers, source):
        assert readers, "nvidia-smi is asked for nothing"
        return {reader: None if peers is None else (source, reader) in peers for reader in readers}

    assert place_slots(config, placement_of(config, gpus), reads) == expected
