"""What a person needs is on the picture, at every size, and nothing a model wrote can leave its line."""

import io
import json
import re
import time
import unicodedata
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from asyncrl.buffer.base import Audit
from asyncrl.cli.foreground import show_result
from asyncrl.control.base import MemberStatus
from asyncrl.lora import SETTINGS
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.record import write_stage
from asyncrl.telemetry import jsonl
from asyncrl.telemetry.advice import bottleneck, waiting_for
from asyncrl.telemetry.dashboard import curve, render, sample_lines
from asyncrl.telemetry.history import History
from asyncrl.telemetry.live import PlainReporter, step_line, viewer, watch
from asyncrl.telemetry.state import NEWEST_BYTES, RECENT_ROWS, RECENT_STEPS, RunReader, RunView, read_state
from asyncrl.telemetry.status import StatusSnapshot, read_status, write_status
from asyncrl.telemetry.text import data_size, duration, number, share, visible
from tests.support.synthetic_run import NASTY, SyntheticRun


def picture(state: RunView, width: int, height: int | None = None) -> list[str]:
    """As the terminal gets it: lines without colours, not cut by the console itself."""
    console = Console(width=width + 50, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(render(state, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").split("\n")


def run_with(directory: Path, *, steps: int = 100, generators: int = 4) -> SyntheticRun:
    run = SyntheticRun(directory / "quickstart", generators=generators)
    for _ in range(steps):
        run.advance()
    return run


def test_at_80_by_24_the_key_figures_are_there_and_nothing_is_cut(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    lines = picture(read_state(run.directory), 80, 24)
    text = "\n".join(lines)
    assert len(lines) == 24 and max(map(cell_len, lines)) <= 80
    for figure in [
        "quickstart", "training", "step 100/400", "25%", "v100", "12m0", "s left", "± 0.31", "held-out 0.626 ± 0.014 (n 1,319)",
        "1.31  max 4 of 6", "0.91 in flight + 0.4 in queue", "masked 0.2%", "1,208 tok/s", "1,380 tok/s", "5.12 s/step",
        "lrn 12%  gen 40%  stall 3.0%", "k3 0.0011  ess 0.98", "probe 0.013  1.3 GB/s", "0.0213 TFLOP/s", "entropy 1.21  grad 0.314", "cut 3.1%",
        "3,308 = 64 leased + 12 ready + 32 taken + 3,200 done  0 missing", "zero_variance 300", "lease_expired 3", "died 1",
        "updates_failed 2", "generators wait 40%: 3 of 4 would do, or add learner.ranks in a new run", "reward/mean",
        "eval/reward_mean",
        "g0           sampling             v100      0      302      64", "g3", "exact_match", "v97-99",
        "How many apples does Tom have?",
    ]:  # fmt: skip
        assert figure in text, figure
    assert not [line for line in lines[:-3] if line.rstrip().endswith("…")]
    wider = "\n".join(picture(read_state(run.directory), 120, 24))
    assert "held-out 0.626 ± 0.014 (n 1,319)  best 0.626 at step 100  " in wider


def test_a_stage_shows_what_trl_reports_and_nothing_of_generators(tmp_path: Path) -> None:
    now = time.time()
    status = StatusSnapshot(
        run="pairs", state="training", step=4, total_steps=8, version=0, started_at=now - 9, updated_at=now,
        pid=0, ranks=1, doing="train",
    )  # fmt: skip
    write_status(tmp_path / "status.json", status)
    rows = [
        {"train/loss": 0.5 - 0.1 * step, "train/rewards/accuracies": 0.75, "time/step": 1.0}
        for step in range(4)
    ]
    (tmp_path / "metrics").mkdir()
    lines = [json.dumps({"step": step, "time": now, **row}) for step, row in enumerate(rows, start=1)]
    lines.append(json.dumps({"step": 4, "time": now, "eval/loss": 0.25, "train/grad_norm": 1.5}))
    (tmp_path / "metrics" / "learner.jsonl").write_text("\n".join(lines) + "\n")
    text = "\n".join(picture(read_state(tmp_path), 80, 24))
    for shown in (
        "training  step 4/8",
        "0.2  held-out 0.25",
        "rewards/accuracies",
        "grad_norm",
        "train/loss",
    ):
        assert shown in text, (shown, text)
    for empty in ("generator", "staleness", "reward  ", "dropped", "v0", " -"):
        assert empty not in text, (empty, text)


def test_with_64_generators_those_in_trouble_are_shown_and_all_counted(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=3, generators=64)
    state = read_state(run.directory)
    for width, height in ((80, 24), (120, 40), (200, None)):
        lines = picture(state, width, height)
        assert max(map(cell_len, lines)) <= width
        rows = [line for line in lines if re.match(r"g\d+ ", line)]
        (summary,) = [line for line in lines if line.startswith("all 64: ")]
        assert "1 silent, 12 dirty, 26 sampling, 13 " in summary and 3 <= len(rows) < 64
        assert all("dirty" in row or "silent 31s" in row for row in rows[:13])
        assert all(row.split()[3] == "2" for row in rows[:3]), "those farthest behind first"


@given(
    width=st.integers(40, 220),
    height=st.integers(5, 70) | st.none(),
    steps=st.integers(0, 12),
    generators=st.integers(0, 20),
)
def test_it_fits_every_terminal(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int | None, steps: int, generators: int
) -> None:
    run = run_with(tmp_path_factory.mktemp("run"), steps=steps, generators=generators)
    lines = picture(read_state(run.directory), width, height)
    assert max(map(cell_len, lines)) <= width
    assert height is None or len(lines) <= height


def test_an_empty_directory_is_a_picture_too(tmp_path: Path) -> None:
    text = "\n".join(picture(read_state(tmp_path / "none"), 80, 24))
    assert "no status yet" in text and "no generators have joined" in text and "no step yet" in text


def test_model_text_is_neither_markup_nor_control(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=1)
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(read_state(run.directory), 120))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "[red]<think>␛[31m 12 + 7↵= 19\\u202e\\u200b</think>" in printed and "␇\\u009b2J" in printed
    codes = set(re.findall(r"\x1b\[[0-9;]*([A-Za-z])", printed))
    assert codes <= {"m"}, "only colours of our own"
    assert not set(re.sub(r"\x1b\[[0-9;]*m", "", printed)) & set("\x1b\x07\x9b\u202e\u200b")


@given(st.text())
def test_visible_text_has_no_control_characters_and_keeps_the_rest(text: str) -> None:
    shown = visible(text)
    assert all(character.isprintable() or unicodedata.category(character) == "Zs" for character in shown)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", shown)
    escaped = "".join(character if character.isalnum() else " " for character in text).split()
    assert all(word in shown for word in escaped)


def test_the_result_of_a_run_shows_what_was_asked_and_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SyntheticRun(tmp_path)
    run.advance()
    run.learner.samples([replace(run.sample(0), kind="eval")])
    show_result(RunDirectory(tmp_path), finished=True)
    shown = capsys.readouterr().out
    assert "How many apples does Tom have?" in shown and "> Tom starts with 12 apples" in shown


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(("stage", "keys"), [("sft", ("model.path", "model.lora.start")), ("rm", ())])
def test_the_result_of_a_stage_names_what_takes_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, keys: tuple[str, ...], is_adapter: bool
) -> None:
    directory = RunDirectory(tmp_path)
    write_stage(directory, stage=stage)
    directory.model.mkdir()
    if is_adapter:
        (directory.model / SETTINGS).touch()
    show_result(directory, finished=True)
    shown, merges = capsys.readouterr().out, is_adapter and not keys
    key, made = keys[is_adapter] if keys else "scorers.NAME.model", "model" if merges else directory.model
    assert f"{'--merge ' if merges else ''}--to model`; what follows begins with {key}: {made}\n" in shown
    assert merges == ("--merge" in shown)


def test_the_result_says_a_reward_that_equals_the_accuracy_of_its_set_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, kinds = RunDirectory(tmp_path), ("a/accuracy", "b/accuracy", "a/reward_mean", "c/reward_mean")
    directory.metrics.mkdir()
    rows = [{"step": step, "time": 0.0} | {f"eval/{kind}": step / 2 for kind in kinds} for step in (0, 1)]
    (directory.metrics / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show_result(directory, finished=True)
    said = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert said == ["eval/a/accuracy", "eval/b/accuracy", "eval/c/reward_mean"]


def test_a_rollout_without_a_number_is_shown(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path)
    run.learner.samples([replace(run.sample(0), reward=float("nan"), parts={"a": float("nan"), "b": 1.0})])
    text = "\n".join(picture(read_state(tmp_path), 80, 24))
    assert "reward - (a -, b 1)" in text


@pytest.mark.parametrize("height", [2, 3, 4, 40])
def test_a_rollout_takes_no_more_lines_than_it_may_and_says_when_it_is_cut(
    tmp_path: Path, height: int
) -> None:
    lines = [line.plain for line in sample_lines(SyntheticRun(tmp_path).sample(0), 60, height)]
    assert len(lines) <= height and max(map(cell_len, lines)) <= 60
    assert lines[-1].endswith("…") == (height < 40)
    assert ("How many apples" in "".join(lines)) == (height > 2)
    assert any("Tom starts with 12 apples" in line for line in lines)


@pytest.mark.parametrize("width", [0, 1, 4, 19])
def test_a_terminal_that_is_too_narrow_gets_its_lines_all_the_same(tmp_path: Path, width: int) -> None:
    assert picture(read_state(run_with(tmp_path, steps=3).directory), width, 40)
    assert [line.plain for line in sample_lines(SyntheticRun(tmp_path).sample(0), width, 3)][1].startswith(
        "  ? "
    )
    assert curve("reward/mean", ((0, 1.0), (1, 2.0)), width=width, height=8, style="cyan")


def test_the_end_of_a_run_shows_what_was_asked_also_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, steps=3)
    run.learner.samples([replace(run.sample(0), kind="eval")])
    show_result(RunDirectory(run.directory), finished=True)
    assert "How many apples" in capsys.readouterr().out


def test_a_silent_learner_and_a_failed_run_are_said_first(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=3)
    path = run.directory / "status.json"
    status = read_status(path)
    assert status
    write_status(path, replace(status, updated_at=time.time() - 95))
    assert "silent for 1m3" in picture(read_state(run.directory), 80, 24)[1]
    run.finish("failed", "CUDA out of memory\nin rank 0")
    lines = picture(read_state(run.directory), 80, 24)
    assert "failed" in lines[0] and "left" not in lines[0]
    assert lines[1].startswith("CUDA out of memory↵in rank 0")
    run.finish("failed", "word " * 40 + "end")
    assert "end" in "".join(picture(read_state(run.directory), 80, 24)[1:4]), "a reason is not cut"
    run.finish()
    assert picture(read_state(run.directory), 80, 24)[1] == "the run has finished"


def test_on_gpus_the_fullest_one_is_shown_against_its_plan(tmp_path: Path) -> None:
    run, gib = run_with(tmp_path, steps=3), float(1 << 30)
    assert read_state(run.directory).fullest_gpu is None
    memory = {
        "allocated_bytes/rank0": 30 * gib,
        "planned_bytes/rank0": 48 * gib,
        "reserved_bytes/rank0": 50 * gib,
    }
    memory |= {"allocated_bytes/rank1": 41 * gib, "planned_bytes/rank1": 40 * gib}
    of_step = {"time/step": 5.0, "perf/mfu": 0.31} | {f"memory/{name}": size for name, size in memory.items()}
    run.learner.log(of_step, step=4)
    run.learner.log({"eval/reward_mean": 0.4}, step=5)
    text = "\n".join(picture(read_state(run.directory), 80, 24))
    assert "compute   mfu 31%  41.0 GiB of 40.0 GiB" in text


def test_a_run_with_an_environment_has_a_line_about_its_episodes(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=3)
    assert not any(line.startswith("episode") for line in picture(read_state(run.directory), 80, 24))
    tools = {"tools/calls": 1.234, "tools/invalid": 0.1, "tools/late": 0.05, "tools/raised": 0.01}
    seconds = {"model_s": 12.34, "environment_s": 0.567}
    row = {f"environment/{name}": value for name, value in (tools | seconds).items()}
    run.learner.log(row | {"episodes/turns_mean": 2.5, "time/step": 5.0}, step=4)
    (line,) = [one for one in picture(read_state(run.directory), 80, 24) if one.startswith("episode")]
    assert line == "episode  turns 2.5  calls 1.2  wrong 0.16  model 12 s  environment 0.57 s"
    status = run.status()
    members = [
        replace(one, metrics={**one.metrics, "environment_faults_hung": 2.0, "environment_faults_died": 1.0})
        for one in status.members[:2]
    ]
    write_status(run.directory / "status.json", replace(status, members=tuple(members)))
    lines = picture(read_state(run.directory), 120)
    assert any(one.endswith("environment 0.57 s  faults died 2  hung 4") for one in lines)
    for step in (5, 6):
        missing = {"episodes/missing/died": 1.0, "episodes/missing/hung": 0.0}
        run.learner.log(row | missing | {"episodes/turns_mean": 2.5, "time/step": 5.0}, step=step)
    lines = picture(read_state(run.directory), 120)
    assert any(one.endswith("faults died 2  hung 4  missing died 2") for one in lines)


def test_a_ringing_alarm_is_a_red_line_and_stands_in_the_line_of_its_step(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=3)
    before = picture(read_state(run.directory), 80, 24)
    row = {"time/step": 5.0, "mismatch/ess": 0.21, "policy/entropy": 0.7}
    run.learner.log({**row, "alarm/ess": 1.0, "alarm/entropy": 0.0}, step=4)
    run.learner.log({"eval/reward_mean": 0.4}, step=5)
    state = read_state(run.directory)
    assert state.alarms == ["ess"]
    lines = picture(state, 120)
    assert lines[2] == "! mismatch/ess 0.21: lower staleness.max_lag; see weights/probe_max"
    assert not [line for line in before if line.startswith("!")]
    assert len(picture(state, 80, 24)) == 24
    (red,) = [text for text in render(state, 120).renderables if text.plain.startswith("!")]
    assert "red" in str(red.style)
    assert step_line(state, 4).endswith("  ALARM ess") and "ALARM" not in step_line(state, 3)
    run.learner.log({**row, "alarm/ess": 0.0}, step=6)
    assert read_state(run.directory).alarms == []
    assert read_state(tmp_path / "none").alarms == []


def test_hosts_are_counted_and_those_that_do_not_run_are_named(tmp_path: Path) -> None:
    run, file = run_with(tmp_path, steps=1), tmp_path / "quickstart" / "hosts.json"
    assert "hosts " not in "\n".join(picture(read_state(run.directory), 120, 24))
    running = {"phase": "running", "address": "10.0.0.1", "why": "", "status": None, "pid": 7}
    waiting = running | {"phase": "pending", "why": "job 7: Resources"}
    file.write_text(json.dumps({"learner-0": running, "generators-0": running, "generators-1": waiting}))
    (line,) = [one for one in picture(read_state(run.directory), 120, 24) if one.startswith("hosts ")]
    assert line == "hosts    2 running  1 pending  generators-1 is pending: job 7: Resources"
    for damaged in ("[]", '{"learner-0": 1}', '{"learner-0": {}}', "{"):
        file.write_text(damaged)
        assert picture(read_state(run.directory), 80, 24)


def test_missing_ids_are_not_hidden(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=1)
    status = run.status()
    assert status.audit
    write_status(
        run.directory / "status.json",
        replace(status, audit=replace(status.audit, done=status.audit.done - 2)),
    )
    assert "2 missing" in "\n".join(picture(read_state(run.directory), 80, 24))


def state_with(
    learner: float | None,
    generators: float | None,
    paused: float | None = 0.0,
    *,
    count: int = 0,
    queued: float = 0.0,
    max_lag: int = 9,
) -> RunView:
    history = History()
    if learner is not None:
        for step in (1, 2, 3):
            history.add({"step": step, "time": 1.0, "idle/learner": learner, "staleness/in_queue": queued})
    members = tuple(
        MemberStatus(generator_id=f"g{index}", state="sampling", version=1, silent_s=0.0, metrics={})
        for index in range(count)
    )
    status = StatusSnapshot(
        run="a", state="training", step=3, total_steps=9, version=3, started_at=0.0, updated_at=0.0, pid=1,
        lag_bound=12, max_lag=max_lag,
    )  # fmt: skip
    return RunView(
        run="a",
        now=0.0,
        status=status if learner is not None else None,
        history=history,
        idle_generators=generators,
        paused_generators=paused,
        members=members,
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        # 2 busy generators make 39 % of what the learner could take: 2 * 0.98 / 0.39 = 5.03
        (
            state_with(0.61, 0.02, count=2),
            "learner waits 61% of the time: add 4 generators (on more GPUs or hosts)",
        ),
        (state_with(0.5, 0.0, count=4), "add 4 generators (on more GPUs or hosts)"),  # 4 / 0.5
        # 4 * 0.75 / 0.6 = 5.
        (state_with(0.4, 0.25, count=4), "add 1 generator (on more GPUs or hosts)"),
        (state_with(0.95, 0.0, count=2), "far too few; begin with 6 more"),  # 40
        (state_with(1.0, 0.0, count=64), "begin with 192 more"),
        (state_with(0.9, None), "add generators"),
        # the learner is always busy: half of 8 would do
        (
            state_with(0.0, 0.5, count=8),
            "generators wait 50%: 4 of 8 would do, or add learner.ranks in a new run",
        ),
        (state_with(0.05, 0.55, count=2), "1 of 2 would do"),  # 2 * 0.45 / 0.95 = 0.95
        (state_with(0.0, 0.4, count=1), "generators wait 40%: add learner.ranks in a new run"),
        (
            state_with(0.5, 0.5, count=2),
            "learner waits 50%, generators 50%: raise staleness.max_lag or window_groups",
        ),
        (
            state_with(0.1, 0.1, 0.4, count=2),
            "generators stand still 40% for weight updates: train larger batches",
        ),
        (
            state_with(0.02, 0.1, count=4, queued=2.3),
            "rollouts wait 2.3 steps in the queue: lower staleness.max_lag by 2",
        ),
        (state_with(0.2, 0.1, count=4, queued=2.3), "balanced"),
        (state_with(0.02, 0.1, count=4, queued=0.9), "balanced"),
        (state_with(0.02, 0.1, count=4, queued=2.3, max_lag=2), "lower staleness.max_lag by 1"),
        (state_with(0.02, 0.1, count=4, queued=2.3, max_lag=1), "balanced"),  # 0 would be synchronous
        (state_with(None, None), "no step yet"),
    ],
)
def test_the_bottleneck_is_who_never_waits_and_the_cure_has_a_number(state: RunView, said: str) -> None:
    sentence = bottleneck(state)
    assert said in sentence and len(sentence) <= 78


def test_the_learners_idle_share_is_that_of_its_last_steps_by_their_time() -> None:
    history = History()
    for step in range(1, 31):
        history.add({"step": step, "time": 1.0, "idle/learner": 1.0, "time/step": 500.0})  # long ago
    for step in range(31, 50):
        history.add({"step": step, "time": 2.0, "idle/learner": 0.0, "time/step": 1.0})
    history.add({"step": 50, "time": 3.0, "idle/learner": 0.5, "time/step": 19.0})
    history.add({"step": 51, "eval/accuracy": 0.5})
    assert RunView(run="a", now=0.0, history=history).idle_learner == pytest.approx(0.25)


@pytest.mark.parametrize("width", [80, 120])
def test_of_many_generators_the_worst_are_shown_and_all_are_summed_up(tmp_path: Path, width: int) -> None:
    run = run_with(tmp_path, steps=5, generators=64)
    status = run.status()
    odd = {9: {"state": "dirty"}, 41: {"silent_s": 40.0}, 50: {"version": 2}}
    well: dict[str, Any] = {"state": "sampling", "version": 5, "silent_s": 0.0}
    members = tuple(
        replace(member, **{**well, **odd.get(index, {})}) for index, member in enumerate(status.members)
    )
    write_status(run.directory / "status.json", replace(status, members=members))
    lines = picture(read_state(run.directory), width, 24)
    head = next(index for index, line in enumerate(lines) if line.startswith("worst of all"))
    rows = [line.split()[0] for line in lines[head + 1 : head + 4]]
    assert set(rows[:2]) == {"g9", "g41"} and rows[2] == "g50"
    summary = next(line for line in lines if line.startswith("all 64: "))
    assert (
        "1 silent, 1 dirty, 63 sampling, at most 3 behind" in summary
        and "tok/s" in summary
        and "…" not in summary
    )
    assert max(map(cell_len, lines)) <= width and len(lines) == 24


def test_a_curve_of_few_points_is_a_line(tmp_path: Path) -> None:
    lines = [line.plain for line in curve("x", ((1, 0.0), (50, 1.0)), width=40, height=9, style="")]
    drawn = [sum("\u2801" <= sign <= "\u28ff" for sign in line) for line in lines[2:-2]]
    assert sum(drawn) >= 30 and all(drawn), "one point in every column, some in every row"


def test_idle_shares_are_those_of_the_last_minute_of_living_generators(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, generators=2)
    run.ids = ["g0"]  # g1 has left: its file must not count
    idle_s = 0.0
    for tick in range(1, 101):
        idle_s += 5.0 if tick <= 80 else 1.0  # busy only lately
        run.trackers["g0"].log(
            {"alive_s": 5.0 * tick, "idle_s": idle_s, "paused_s": 0.0, "stalled_s": tick * 0.5}
        )
        run.trackers["g1"].log({"alive_s": 5.0 * tick, "idle_s": 5.0 * tick, "paused_s": 0.0})
    run.step = 1
    write_status(tmp_path / "status.json", run.status())
    state = read_state(tmp_path)
    assert state.idle_generators == pytest.approx(0.2) and state.paused_generators == 0.0
    assert state.stalled_generators == pytest.approx(0.1)
    run.trackers["g0"].log({"alive_s": 10.0, "idle_s": 9.0, "paused_s": 0.0})  # restarted
    assert read_state(tmp_path).idle_generators == pytest.approx(0.9)


def test_a_reader_sees_what_was_added_and_agrees_with_a_fresh_one(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path)
    reader = RunReader(tmp_path)
    for _ in range(25):
        run.advance()
        state, fresh = reader.read(), read_state(tmp_path)
        assert state.history.rows == fresh.history.rows and state.samples == fresh.samples
        assert (state.step, state.members, state.dropped) == (fresh.step, fresh.members, fresh.dropped)
    assert len(state.samples) == 8 and state.samples[-1].response == NASTY and state.samples[-1].step == 25


def test_a_dead_ticket_is_dropped_once_though_store_and_learner_both_count_it(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path)
    run.learner.log({"groups/rejected_dead": 2.0, "time/step": 1.0}, step=1)
    counters = {"dead": 2, "failed": 6}
    audit = Audit(issued=9, leased=0, reissue=0, ready=0, taken=0, done=9, payload_bytes=0, counters=counters)
    write_status(tmp_path / "status.json", replace(run.status(), audit=audit))
    assert read_state(tmp_path).dropped == {"dead": 2, "failed": 6}


def test_of_a_long_run_only_the_newest_lines_of_generators_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, steps=2)
    line = json.dumps({"step": None, "alive_s": 1.0, "idle_s": 1.0}) + "\n"
    for name in run.ids:
        path = run.directory / "metrics" / f"{name}.jsonl"
        path.write_text(line * (4 * NEWEST_BYTES // len(line)) + path.read_text())
    loads, read_bytes = json.loads, 0

    def counted(text: bytes) -> Any:
        nonlocal read_bytes
        read_bytes += len(text)
        return loads(text)

    monkeypatch.setattr(jsonl.json, "loads", counted)
    others = (run.directory / name for name in ("metrics/learner.jsonl", "status.json", "samples.jsonl"))
    others_bytes = sum(path.stat().st_size for path in others)
    state = read_state(run.directory)
    assert others_bytes < read_bytes <= 2 * others_bytes + len(run.ids) * NEWEST_BYTES
    assert [len(rows) for rows in state.generators.values()] == [RECENT_ROWS] * len(run.ids)
    assert state.members[0].metrics["alive_s"] == 10.0


def test_the_time_left_is_steps_left_at_the_recent_speed() -> None:
    history = History()
    for step in range(1, 31):
        history.add(
            {"step": step, "time": 100.0 * step if step < 10 else 900.0 + 2.0 * (step - 9), "time/step": 2.0}
        )
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 30, 130, [], 0.0
    assert RunView(run="a", now=0.0, history=history, status=run.status()).eta_s == pytest.approx(200.0)


def test_before_the_first_status_generators_are_known_by_their_files(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, generators=2)
    run.trackers["g1"].log({"tokens_per_s": 5.0})
    assert [(member.generator_id, member.state) for member in read_state(tmp_path).members] == [
        ("g0", "unknown"),
        ("g1", "unknown"),
    ]
    assert read_state(tmp_path).generated_tokens_per_s == 5.0


def test_a_member_shows_what_its_heartbeat_says_over_what_its_file_says(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=2, generators=1)
    status = replace(
        run.status(),
        members=(
            MemberStatus(
                generator_id="g0", state="sampling", version=2, silent_s=0.0, metrics={"tokens_per_s": 9.0}
            ),
        ),
    )
    write_status(run.directory / "status.json", status)
    (member,) = read_state(run.directory).members
    assert member.metrics["tokens_per_s"] == 9.0 and member.metrics["running_requests"] == 64


def test_without_a_terminal_every_step_is_one_line(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=3)
    written: list[str] = []
    reporter, reader = PlainReporter(written.append), RunReader(run.directory)
    reporter.show(reader.read())
    reporter.show(reader.read())
    run.advance()
    run.advance()
    reporter.show(reader.read())
    assert [line.split("  ")[0] for line in written] == [f"step {step}/400" for step in range(1, 6)]
    for figure in (
        "reward ",
        "lag 1.31 max 4",
        "gen 1208",
        "lrn 1,380",
        "idle lrn 12% gen 40%",
        "5.12 s",
        "left",
    ):
        assert figure in written[-1]
    assert all("\n" not in line and len(line) < 200 for line in written)
    # A restarted learner makes two steps again before the next look.
    run.step = 3
    run.advance()
    run.advance()
    reporter.show(reader.read())
    reporter.show(reader.read())
    assert [line.split("  ")[0] for line in written[5:]] == ["step 4/400", "step 5/400"]


@pytest.mark.parametrize("past", [0, 2])
def test_without_a_terminal_steps_are_new_by_their_place_and_not_by_the_clock(
    tmp_path: Path, past: int
) -> None:
    run = run_with(tmp_path, steps=4)
    written: list[str] = []
    reporter, reader = (
        PlainReporter(written.append, past=past),
        RunReader(run.directory, since=time.time() + 9),
    )
    reporter.show(reader.read())
    assert [line.split("  ")[0] for line in written] == ["step 3", "step 4"][2 - past :]
    run.started_at -= 3600
    run.step = 2
    for _ in range(4):
        run.advance()
        path = run.directory / "metrics" / "learner.jsonl"
        *before, last = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*before, json.dumps(json.loads(last) | {"time": 1.0}) + "\n"]))
    write_status(run.directory / "status.json", run.status())
    reporter.show(reader.read())
    reporter.show(reader.read())
    assert [line.split("  ")[0] for line in written[past:]] == [f"step {step}/400" for step in (3, 4, 5, 6)]


def test_the_newest_figures_do_not_read_the_whole_history() -> None:
    class Counted(dict[int, dict[str, float]]):
        reads = 0

        def __getitem__(self, step: int) -> dict[str, float]:
            self.reads += 1
            return super().__getitem__(step)

    history, run = History(), SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 2000, 4000, [], 0.0
    for step in range(1, 2001):
        history.add({"step": step, "time": 2.0 * step, "time/step": 2.0, "idle/learner": 0.5})
    state = RunView(run="a", now=4001.0, history=history, status=run.status())
    history.rows = counted = Counted(history.rows)
    assert (state.eta_s, state.idle_learner, state.fullest_gpu, state.alarms) == (4000.0, 0.5, None, [])
    waiting_for(state), bottleneck(state)
    assert 0 < counted.reads < 500
    lines: list[str] = []
    reporter = PlainReporter(lines.append)
    reporter.show(state)
    counted.reads = 0
    reporter.show(state)
    assert len(lines) == RECENT_STEPS and counted.reads < 500


def log_line(directory: Path, process: str, level: str, text: str, at: float, **more: object) -> None:
    (directory / "logs").mkdir(exist_ok=True)
    time_ = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    record = {
        "time": time_,
        "level": level,
        "process": process,
        "logger": "asyncrl.generator",
        "event": text,
    } | more
    with (directory / "logs" / f"{process}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_without_a_terminal_warnings_of_every_process_are_told_once(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=1)
    now = time.time()
    log_line(run.directory, "g0", "warning", "of the start before", now - 1000)
    written: list[str] = []
    reporter, reader = (
        PlainReporter(written.append, past=0),
        RunReader(run.directory, since=now - 900, without="supervisor"),
    )
    log_line(run.directory, "g0", "info", "starting the engine", now)
    log_line(run.directory, "g0", "warning", "version 7 was not received: \x1b[2J no", now)
    log_line(run.directory, "g0", "warning", "a library complains", now, logger="vllm.core")
    log_line(
        run.directory,
        "learner",
        "error",
        "ended by an error",
        now + 1,
        exception="Traceback\n  line\nValueError: bad",
    )
    log_line(run.directory, "learner", "error", "rank 1 says the same", now + 1, rank=1)
    log_line(run.directory, "supervisor", "warning", "is on the console already", now + 1)
    reporter.show(reader.read())
    # The same, within a minute.
    log_line(run.directory, "g0", "warning", "version 8 was not received: \x1b[2J no", now + 2)
    # Of a host whose clock is behind, or whose file comes late.
    log_line(run.directory, "g1", "warning", "found no reward", now + 0.5)
    reporter.show(reader.read())
    reporter.show(replace(reader.read(), now=now + 600))
    assert [line for line in written if line.startswith("!")] == [
        "! g0: version 7 was not received: ␛[2J no",
        "! learner: ended by an error: ValueError: bad",
        "! g1: found no reward",
    ]


def test_without_a_terminal_a_run_on_hosts_shows_the_warnings_of_its_supervisor(tmp_path: Path) -> None:
    run, console = run_with(tmp_path, steps=1), Console(file=io.StringIO(), width=100)
    with viewer(run.directory, console, lines=True, since=time.time() - 1, own="driver") as show:
        log_line(run.directory, "supervisor", "warning", "learner hangs and is killed", time.time())
        log_line(run.directory, "driver", "warning", "is on the console already", time.time())
        show()
    assert isinstance(console.file, io.StringIO)
    found = [line for line in console.file.getvalue().split("\n") if line.startswith("!")]
    assert found == ["! supervisor: learner hangs and is killed"]


def test_without_a_terminal_silence_is_explained_within_ten_seconds(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    written: list[str] = []
    now = time.time()
    reporter = PlainReporter(written.append, past=0)
    reader = RunReader(tmp_path, since=now - 1)
    log_line(tmp_path, "learner", "info", "loading the model", now)
    log_line(tmp_path, "g0", "info", "starting the engine", now, logger="__main__")
    for second in range(31):
        reporter.show(replace(reader.read(), now=now + second))
    assert written == ["no step yet: waiting for the learner (loading the model)"] * 3, (
        "every ten seconds, before the first step"
    )
    run = SyntheticRun(tmp_path, generators=0)
    run.started_at = now
    write_status(tmp_path / "status.json", run.status())
    for second in range(31, 42):
        reporter.show(replace(reader.read(), now=now + second))
    assert written[3:] == [
        f"{duration(now + 36 - now)}  waiting for the first generator: g0 (starting the engine)"
    ]


def test_without_a_terminal_a_long_step_is_told_each_minute(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=4)
    state = read_state(run.directory)
    assert state.status
    for row in state.history.rows.values():
        row["time"] = state.now - 3.0
    state = replace(state, status=replace(state.status, doing="train", started_at=state.now - 90.0))
    written: list[str] = []
    reporter = PlainReporter(written.append, past=0)
    for second in range(200):
        reporter.show(replace(state, now=state.now + second))
    assert 3 <= len(written) <= 5 and all("training on step 5 for" in line for line in written)


def test_what_is_waited_for_follows_from_the_state(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=4, generators=2)
    state = read_state(run.directory)
    assert (
        state.status
        and waiting_for(state) == "waiting for the groups of step 5: 12 are ready, 64 are being sampled"
    )
    dirty = tuple(replace(member, state="dirty", version=-1) for member in state.members)
    stuck = replace(state, members=dirty, paused_generators=0.9)
    assert waiting_for(stuck) == bottleneck(stuck) != ""
    assert bottleneck(stuck).startswith("no generator has complete weights (g0, g1)"), (
        "and not: train larger batches"
    )
    assert waiting_for(replace(state, status=replace(state.status, state="finished"))) is None


def test_a_learner_that_computes_waits_for_no_groups(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=4, generators=2)
    state = read_state(run.directory)
    assert state.status
    for row in state.history.rows.values():
        row["time"] = state.now - 60.0
    state = replace(state, status=replace(state.status, doing="train", started_at=state.now - 90.0))
    assert waiting_for(state) == f"training on step 5 for {duration(60.0)} (now: train)"
    assert state.status
    resumed = replace(state, status=replace(state.status, started_at=state.now - 30.0))
    assert waiting_for(resumed) == "training on step 5 (now: train)"
    waits = replace(state, status=replace(state.status, doing="wait_groups"))
    assert str(waiting_for(waits)).startswith("waiting for the groups of step 5: 12 are ready")


@pytest.mark.parametrize(
    ("learner", "generators", "cores", "said"),
    [
        (0.5, 0.0, 3, "learner waits 50% of the time: no core is free; raise generator.threads"),
        (0.5, 0.0, 4, "add 1 generator (asyncrl scale generators=+1)"),
        (0.5, 0.0, 8, "add 2 generators (asyncrl scale generators=+2)"),
        (0.5, 0.0, None, "add 2 generators (on more GPUs or hosts)"),
        (0.0, 1.0, 3, "1 of 2 would do, or raise learner.threads"),
        (0.0, 0.4, 3, "generators wait 40%: raise learner.threads"),
        (0.0, 0.4, 4, "add learner.ranks"),
    ],
)
def test_no_more_processes_are_advised_than_there_are_cores(learner, generators, cores, said) -> None:
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 3, 130, [], 0.0
    state = state_with(learner, generators, count=2)
    sentence = bottleneck(replace(state, status=replace(run.status(), cores=cores, max_lag=1)))
    assert said in sentence and len(sentence) <= 78


def test_sides_that_take_turns_on_the_same_cores_are_not_advised_to_overlap() -> None:
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 3, 130, [], 0.0
    state = state_with(0.5, 0.5, count=1)
    for cores, lag, said in ((2, 0, "take turns"), (2, 1, "raise"), (8, 0, "raise"), (None, 0, "raise")):
        assert said in bottleneck(replace(state, status=replace(run.status(), cores=cores, max_lag=lag)))


def test_the_wait_for_the_start_of_generators_gives_no_advice() -> None:
    history = History()
    for step in (1, 2, 3):
        history.add({"step": step, "time": 100.0 * step, "idle/learner": 0.0, "time/step": 1.0})
    history.add({"step": 4, "time": 900.0, "idle/learner": 1.0, "time/step": 60.0})
    history.add({"step": 5, "time": 901.0, "idle/learner": 0.0, "time/step": 1.0})
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 5, 130, [], 800.0
    assert RunView(run="a", now=0.0, history=history, status=run.status()).idle_learner == 0.0


def test_after_a_resume_nothing_is_advised_from_the_steps_before_it() -> None:
    history = History()
    for step in range(1, 31):
        history.add({"step": step, "time": 100.0, "idle/learner": 0.9, "time/step": 1.0})
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 30, 130, [], 800.0
    doing = {"g0": "starting the engine"}
    resumed = RunView(run="a", now=801.0, history=history, status=run.status(), doing=doing)
    assert bottleneck(resumed) == "waiting for the first generator: g0 (starting the engine)"
    assert resumed.idle_learner is None
    assert bottleneck(replace(resumed, status=None)).startswith("no step yet")
    for step in (31, 32):
        history.add({"step": step, "time": 810.0, "idle/learner": 0.9, "time/step": 1.0})
    assert bottleneck(resumed).startswith("waiting")
    history.add({"step": 33, "time": 811.0, "idle/learner": 0.9, "time/step": 1.0})
    assert bottleneck(resumed).startswith("learner waits 90%")


def test_the_time_left_is_that_of_this_start_without_its_slowest_step() -> None:
    history = History()
    for step, at in enumerate((100.0, 110.0, 5000.0, 5060.0, 5061.0, 5062.0), start=1):
        history.add({"step": step, "time": at, "time/step": 1.0})
    run = SyntheticRun.__new__(SyntheticRun)
    run.step, run.total_steps, run.ids, run.started_at = 6, 16, [], 4000.0
    state = RunView(run="a", now=5063.0, history=history, status=run.status())
    assert state.eta_s == pytest.approx(10.0)
    assert state.status
    assert replace(state, status=replace(state.status, started_at=5061.0)).eta_s is None, "one interval"


def stage_status(now: float, **changes: Any) -> StatusSnapshot:
    status = StatusSnapshot(
        run="sft", state="training", step=40, total_steps=140, version=0, started_at=0.0, updated_at=now, pid=0,
        ranks=1, doing="train",
    )  # fmt: skip
    return replace(status, **changes)


@pytest.mark.parametrize("each", [1, 10])
def test_the_time_left_of_a_stage_counts_steps_where_it_logs_only_some(each: int) -> None:
    history = History()
    for step in range(each, 40 + 1, each):
        history.add({"step": step, "time": 1.0 * step, "train/loss": 0.5, "time/step": 1.0})
    state = RunView(run="a", now=41.0, history=history, status=stage_status(41.0))
    assert state.eta_s == pytest.approx(100.0)


def test_a_stage_in_a_long_step_is_not_called_silent() -> None:
    history = History()
    history.add({"step": 40, "time": 1000.0, "train/loss": 0.5, "time/step": 60.0})
    state = RunView(run="a", now=1340.0, history=history, status=stage_status(1300.0, step=45))
    assert picture(state, 80, 24)[1] == f"> training on step 46 for {duration(40.0)} (now: train)"
    loads = stage_status(1300.0, step=0, state="starting", started_at=1300.0, doing="load the model")
    assert picture(replace(state, status=loads), 80, 24)[1] == "> training on step 1 (now: load the model)"


def test_the_time_left_is_not_told_while_nothing_gets_on(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=4)
    state = read_state(run.directory)
    rows = state.history.rows
    for step in rows:
        rows[step]["time"] = 1000.0 + 2.0 * step
    assert state.status
    state = replace(state, status=replace(state.status, started_at=1000.0))
    assert replace(state, now=1010.0).eta_s == pytest.approx(2.0 * 396)
    assert replace(state, now=1036.0).eta_s == pytest.approx(2.0 * 396)
    assert replace(state, now=1039.0).eta_s is None, "30 s without a step of 2 s"


def test_the_newest_warning_is_on_the_dashboard_for_a_minute(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=4)
    log_line(run.directory, "g1", "warning", "refused version 3", time.time())
    state = read_state(run.directory)
    assert "! g1: refused version 3" in "\n".join(picture(state, 80, 24))
    assert "refused" not in "\n".join(picture(replace(state, now=state.now + 61), 80, 24))


def test_watching_ends_with_the_run_and_writes_all_its_steps(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=12)
    run.finish()
    out = io.StringIO()
    watch(run.directory, over=lambda: True, console=Console(file=out, width=80))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        f"step {step}/400" for step in range(1, 13)
    ]
    assert "held-out" in out.getvalue().splitlines()[-1]


def terminal() -> io.StringIO:
    found = io.StringIO()
    found.isatty = lambda: True  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("out", "variable", "value"),
    [
        (io.StringIO(), "FORCE_COLOR", "1"),
        (io.StringIO(), "TTY_COMPATIBLE", "1"),
        (terminal(), "TERM", "dumb"),
    ],
)
def test_a_file_with_colors_and_a_terminal_that_cannot_be_redrawn_get_lines(
    out: io.StringIO, variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    run = run_with(tmp_path, steps=2)
    watch(run.directory, over=lambda: True, console=Console(file=out, width=80))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/400", "step 2/400"]


def test_on_a_terminal_the_last_picture_stays(tmp_path: Path) -> None:
    run = run_with(tmp_path, steps=2)
    out = terminal()
    watch(run.directory, over=lambda: True, console=Console(file=out, width=80, height=24))
    assert out.getvalue().count("\x1b[?1049h") == out.getvalue().count("\x1b[?1049l") == 1
    assert "step 2/400" in out.getvalue().split("\x1b[?1049l")[1]


def test_a_curve_shows_its_range_and_a_flat_one_is_where_it_should_be() -> None:
    lines = [
        line.plain
        for line in curve(
            "reward", tuple((step, step / 10) for step in range(1, 101)), width=60, height=9, style=""
        )
    ]
    assert lines[0] == "reward 10" and lines[-1].split() == ["1", "100"] and len(lines) == 9
    assert any(line.strip().startswith("10┤") for line in lines) and any(
        line.strip().startswith("0.1┤") for line in lines
    )
    flat = [
        line.plain
        for line in curve("x", tuple((step, 0.5) for step in range(1, 50)), width=40, height=9, style="")
    ]
    (drawn,) = [line for line in flat if re.search(r"[\u2801-\u28ff]{3}", line)]
    assert drawn.strip().startswith("0.5┤")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), "-"), (number(0.5123), "0.512"), (number(0.0), "0"), (number(12345.6), "1.2e+04"),
        (number(1380.2), "1,380"), (number(999.7), "1,000"), (number(120.4, 2), "120"), (number(99.4, 2), "99"),
        (number(1.234e-5), "1.2e-05"), (number(-3.14159), "-3.14"), (number(float("nan")), "-"),
        (share(0.031), "3.1%"), (share(0.61), "61%"), (share(0.0), "0%"), (share(None), "-"),
        (duration(5.9), "5s"), (duration(187), "3m07s"), (duration(7500), "2h05m"), (duration(86400 * 3 + 4 * 3600), "3d04h"),
        (data_size(512), "512 B"), (data_size(12_900_000), "12.3 MiB"), (data_size(5 * 2**30), "5.0 GiB"),
    ],
)  # fmt: skip
def test_figures_are_short(shown: Any, expected: str) -> None:
    assert shown == expected
