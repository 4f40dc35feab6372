"""The runs of a sweep: every combination once, with a directory of its own."""

import itertools
import math
import statistics
from pathlib import Path

import pytest
import yaml

from asyncrl.commands.sweep import page_of, swept
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.results.archive import read_archive
from asyncrl.results.compare import compare_runs, over_seeds
from asyncrl.run.directory import RunDirectory
from tests.support.synthetic_run import SyntheticRun
from tests.support.task_config import README


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(README | {"run": {"name": "t", "root": str(tmp_path / "runs")}}))
    return path


def test_every_combination_is_a_run_with_its_values_and_its_name(file):
    keys = ["learner.optimizer.lr=1e-4,2e-4", "batch.groups=4", "staleness.max_lag=1,2,3"]
    trials = swept(file, keys, seeds=2)
    found = [load_config(file, trial.overrides) for trial in trials]
    values = [(one.learner.optimizer.lr, one.staleness.max_lag, one.run.seed) for one in found]
    assert values == list(itertools.product((1e-4, 2e-4), (1, 2, 3), (0, 1)))
    assert {one.batch.groups for one in found} == {4}
    assert [one.run.directory for one in found] == [trial.directory.path for trial in trials]
    assert len({one.run.directory for one in found}) == 12
    assert found[0].run.name == "t-learner.optimizer.lr-1e-4-staleness.max_lag-1-run.seed-0"
    assert page_of(trials) == file.parent / "runs" / "t-learner.optimizer.lr-sweep.html"


def test_commas_in_brackets_and_quotes_divide_nothing(file):
    lists = "reward.functions=[math, {function: length, params: {target: 4}}],[gsm8k]"
    trials = swept(file, [lists, "sampling.stop=['a,b','c']"], seeds=1)
    found = [load_config(file, trial.overrides) for trial in trials]
    functions = [[part.function for part in one.reward.functions] for one in found]
    assert functions == [["math", "length"], ["gsm8k"]]
    assert {one.sampling.stop for one in found} == {("a,b", "c")}
    assert all(len(one.run.name) <= 64 for one in found)


def test_values_with_options_of_adapters_are_divided(file):
    names = ["gymnasium:A?x=1", "gymnasium:B?x=2&y=?"]
    trials = swept(file, [f"environment.uses={','.join(names)}", "generator.engine=vllm"], seeds=1)
    assert [trial.overrides[0] for trial in trials] == [f"environment.uses={name}" for name in names]


def test_long_names_stay_different(file):
    texts = ["x" * 90 + end for end in "ab"]
    names = [trial.directory.path.name for trial in swept(file, [f"data.train={','.join(texts)}"], seeds=1)]
    assert len({*names}) == 2 and {len(name) for name in names} == {64}


def test_sweeps_over_other_keys_or_values_share_no_run(file):
    sweeps = [
        *(f"algorithm.{part}.coefficient=0.1,0.2" for part in ("kl", "entropy")),
        *(f"{part}.temperature=0.5,1.0" for part in ("sampling", "eval")),
        *(["data.train=a/b,a_b", "data.train=a:b,ä.jsonl,ö.jsonl"]),
    ]
    paths = [trial.directory.path for one in sweeps for trial in swept(file, [one], seeds=1)]
    assert len({*paths}) == len(paths) == 13


@pytest.mark.parametrize(
    ("overrides", "seeds", "text"),
    [
        (["learner.steps=5"], 1, "found no key with several values; give KEY=A,B, or --seeds 3"),
        (["run.name=a,b"], 1, "several values of run.name"),
        (["run.seed=1,2"], 3, "run.seed and --seeds"),
        (["learner.steps=1,1"], 1, "two runs would have the directory"),
        (["learner.steps=1,two"], 1, "found 'two'"),
        (["learner.stepz=1,2"], 1, "did you mean `steps`"),
        (["learner.steps=1,["], 1, "learner.steps"),
        (["learner.steps=1,2", "generator.count=1", "cluster.kind=slurm"], 1, "waits for no run"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides, seeds, text, file):
    with pytest.raises(ConfigError, match=text):
        swept(file, overrides, seeds)


def test_seeds_are_summed_up_with_their_error(tmp_path):
    runs = []
    for seed, steps in enumerate((3, 5, 8)):
        run = SyntheticRun(tmp_path / f"seed-{seed}", generators=1)
        for _ in range(steps):
            run.advance()
        run.finish()
        (run.directory / "config.yaml").write_text("run: {name: t}\n")
        runs.append(("learner.steps=9", RunDirectory(run.directory)))
    table = over_seeds([*runs, ("learner.steps=1", runs[0][1])])
    last = [read_archive(directory).history.series("reward/mean")[-1][1] for _, directory in runs]
    error = statistics.stdev(last) / math.sqrt(3)
    (values, count, *cells), (_, one, *single) = table.rows
    assert (values, count, one) == ("learner.steps=9", "3", "1")
    assert cells[-1] == f"{statistics.fmean(last):.3g} ± {error:.3g}" and single[-1] == f"{last[0]:.3g} ± -"
    run.finish("failed")
    never = ("learner.steps=9", RunDirectory(tmp_path / "never"))
    (_, count, *_, both), (_, one, *_, none) = over_seeds([*runs, never, ("b", runs[2][1])]).rows
    assert (count, one, none) == ("2 of 4", "0 of 1", "-") and both.startswith(
        f"{statistics.fmean(last[:2]):.3g} ±"
    )
    page = tmp_path / "page.html"
    assert compare_runs([directory.path for _, directory in runs], page, [table])[-1] is table
    assert cells[-1] in page.read_text()
