"""The report of a run is one file that loads nothing, shows what was measured, and gives no model a way out
of its box."""

import base64
import hashlib
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from asyncrl.algo import metrics
from asyncrl.cli.after import report
from asyncrl.errors import RunError
from asyncrl.results.archive import MOST_ROWS, read_archive, spread_rows
from asyncrl.results.charts import BANDS, MOST_POINTS, growth_shares
from asyncrl.results.run_page import report_page, sample_sections, write_report
from asyncrl.run.directory import RunDirectory
from asyncrl.telemetry.alarms import ALARMS
from asyncrl.telemetry.history import thinned
from asyncrl.telemetry.text import visible, visible_lines
from asyncrl.telemetry.trackers import JsonlTracker
from tests.support.run_page import Page, archive_of, run_in
from tests.support.synthetic_run import NASTY, SyntheticRun

MARKUP = (
    "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)><a "
    "href=//evil.example>x</a>{{7*7}}<!-- "
)
HOSTILE = MARKUP + NASTY


def page_of(run: SyntheticRun) -> Page:
    return Page(report_page(archive_of(run)))


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(run_in(tmp_path))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "style"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page.text_of["style"][0] and "@import" not in page.text_of["style"][0]
    charts, plotly, draw = page.text_of["script"]
    assert len(plotly) > 1_000_000, "once, and whole"
    for text in (charts, draw, *page.text_of["style"], *page.text_of["p"], *page.text_of["td"]):
        assert "://" not in text
    (policy,) = [attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv")]
    assert (
        policy is not None
        and policy.startswith("default-src 'none'; script-src 'sha256-")
        and "http" not in policy
    )
    for script in (plotly, draw):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_the_data_of_a_mixture_is_named_by_its_paths(tmp_path: Path) -> None:
    train = [{"path": "a.jsonl", "weight": 2}, {"path": "owner/b"}]
    run = run_in(tmp_path, config=json.dumps({"model": {"path": "m"}, "data": {"train": train}}))
    (said,) = [text for text in page_of(run).text_of["p"] if "asyncrl run: model" in text]
    assert "asyncrl run: model m, data a.jsonl, owner/b; this page" in said


def test_no_text_of_a_model_or_a_user_becomes_markup(tmp_path: Path) -> None:
    harmless = {tag for tag, _ in page_of(run_in(tmp_path / "harmless")).tags}
    run = run_in(tmp_path, config=json.dumps({"run": {"name": MARKUP}, "model": {"path": MARKUP}}))
    record = {
        "prompt": HOSTILE, "response": HOSTILE, "reason": HOSTILE, "generator_id": HOSTILE, "parts": {HOSTILE: 1.0},
        "finish_reason": HOSTILE, "kind": HOSTILE, "reward": 9.0, "step": 1,
    }  # fmt: skip
    with (run.directory / "samples.jsonl").open("a") as file:
        file.writelines(
            json.dumps(record | {"kind": kind}) + "\n" for kind in (HOSTILE, "train", "eval", "dropped")
        )
    row = {
        f"reward/{HOSTILE}/mean": 0.5,
        f"groups/rejected_{HOSTILE}": 2.0,
        f"alarm/{HOSTILE}": 1.0,
        f"time/{HOSTILE}": 1.0,
    }
    run.learner.log(row, step=31)
    JsonlTracker(run.directory / "metrics" / f"{HOSTILE.replace('/', '')}.jsonl").log(
        run.generator_metrics("g0", 3)
    )
    run.finish("failed", HOSTILE)
    text = report_page(archive_of(run))
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= harmless | {"nav"}
    assert len(page.text_of["script"]) == 3 and "<script>alert" not in text and "<img" not in text
    assert not [
        attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)
    ]
    assert page.text_of["pre"].count(visible_lines(HOSTILE)) == 3 * 2 and MARKUP in page.text_of["h1"]
    for sign in ("\x1b", "\u202e", "\u200b", "\x07", "\x9b"):
        assert sign not in text.replace(page.text_of["script"][1], "")
    assert f"{visible(HOSTILE)} | 2 | -" in " | ".join(page.text_of["td"])


def test_curves_and_figures_are_what_was_logged(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=35)
    page, archive = page_of(run), archive_of(run)
    rewards = [(step, row["reward/mean"]) for step, row in sorted(archive.history.rows.items())]
    assert page.curves("Reward")["reward/mean"] == rewards and len(rewards) == 35
    assert [step for step, _ in page.curves("Held-out reward")["eval/reward_mean"]] == [10, 20, 30]
    assert page.curves("Mean age of a token")["staleness/in_flight"][7] == (8, 0.91)
    assert "trained | 0 | - | zero_variance | 105 | -" in " | ".join(page.text_of["td"])
    waiting = page.curves("Waiting: learner for groups, generators for tickets")
    assert waiting.keys() == {"learner", "g0", "g1"}
    assert [share for _, share in waiting["g0"]] == pytest.approx([0.4] * 34)
    facts = dict(zip(page.text_of["dt"], page.text_of["dd"], strict=True))
    assert facts["state"] == "training" and facts["step"] == "35 of 400" and facts["groups rejected"] == "105"
    assert facts["groups lost"] == "0 of 1,228" and facts["learner waited"] == "12% of its steps"
    best = max(rewards, key=lambda point: point[1])
    assert f"{best[1]:.3g} (step {best[0]})" in page.text_of["td"]


def test_no_chart_is_empty(tmp_path: Path) -> None:
    page = Page(report_page(archive_of(run_in(tmp_path))))
    for title in page.text_of["figcaption"]:
        assert any(page.curves(title).values()), title


def test_an_unfinished_run_a_run_without_evaluation_and_one_that_never_began_have_a_page(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "empty"
    directory.mkdir()
    (directory / "config.yaml").write_text("run: {name: empty}\n")
    page = Page(report_page(read_archive(RunDirectory(directory))))
    assert (
        "no status" in page.text_of["dd"]
        and "figcaption" not in page.text_of
        and len(page.text_of["script"]) == 1
    )
    run = run_in(tmp_path, steps=9)  # the first evaluation is at 10
    text = (run.directory / "metrics" / "learner.jsonl").read_bytes()
    (run.directory / "metrics" / "learner.jsonl").write_bytes(text[:-20])
    (run.directory / "samples.jsonl").write_bytes((run.directory / "samples.jsonl").read_bytes()[:-20])
    page = page_of(run)
    assert (
        "Held-out reward" not in page.text_of["figcaption"] and len(page.curves("Reward")["reward/mean"]) == 8
    )
    assert "Dropped samples" not in page.text_of["h2"] and "Best samples" in page.text_of["h2"]


def test_alarms_are_told_with_their_steps_and_their_cure(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=0)
    for step in range(1, 12):
        run.learner.log({"time/step": 1.0, "alarm/entropy": float(step in (3, 4, 5, 9))}, step=step)
    assert archive_of(run).alarm_spans == {"entropy": [(3, 5), (9, 9)]}
    cells = page_of(run).text_of["td"]
    assert {"3 to 5, 9", "policy/entropy", ALARMS["entropy"].cure} <= set(cells)


def test_wall_time_leaves_out_the_pause_before_a_resume(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=0)
    lines = [
        {"step": step, "time": at, "time/step": 1.0}
        for step, at in ((1, 110.0), (2, 120.0), (3, 130.0), (3, 1015.0), (4, 1020.0))
    ]
    (run.directory / "metrics" / "learner.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    start = {"versions": {"torch": "2"}, "hardware": "2 CPU cores"}
    starts = [
        start | {"time": 100.0, "step": 0},
        start | {"time": 1000.0, "step": 2, "versions": {"torch": "3"}},
    ]
    (run.directory / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    assert archive_of(run).wall_s == (130 - 100) + (1020 - 1000)
    assert "torch 2 -> 3" in page_of(run).text_of["td"]


def test_counters_of_a_generator_that_started_again_are_added_up(tmp_path: Path) -> None:
    rows = [
        {
            "time": 10.0,
            "alive_s": 5.0,
            "idle_s": 1.0,
            "sampled_tokens": 100.0,
            "environment_faults_hung": 2.0,
        },
        {
            "time": 20.0,
            "alive_s": 15.0,
            "idle_s": 6.0,
            "sampled_tokens": 250.0,
            "environment_faults_hung": 3.0,
        },
        {"time": 40.0, "alive_s": 4.0, "idle_s": 1.0, "sampled_tokens": 30.0},
        {
            "time": 50.0,
            "alive_s": 14.0,
            "idle_s": 1.0,
            "sampled_tokens": 90.0,
            "environment_faults_died": 4.0,
        },
    ]
    assert growth_shares(rows, "idle_s") == [(20.0, 0.5), (40.0, 0.25), (50.0, 0.0)]
    run = run_in(tmp_path, steps=0)
    tracker = JsonlTracker(run.directory / "metrics" / "g9.jsonl")
    for row in rows:
        tracker.log(row)
    assert archive_of(run).counted("sampled_tokens") == 250 + 90
    assert archive_of(run).faults == {"died": 4, "hung": 3}
    for step in (1, 2):
        run.learner.log({"episodes/missing/hung": 2.0, "time/step": 1.0}, step=step)
    assert {"died 4, hung 3", "hung 4"} <= {*page_of(run).text_of["dd"]}


def test_a_generator_may_say_that_it_lives_for_less_than_no_time(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text('{"alive_s": -1.0}\n' * 3)
    assert spread_rows(path) == [{"alive_s": -1.0}] * 3


@pytest.mark.parametrize(("count", "lifetime"), [(400, 37), (20_000, 1999), (20_000, 10**9)])
def test_of_a_long_run_lines_are_left_out_and_counters_still_add_up(
    tmp_path: Path, count: int, lifetime: int
) -> None:
    run, draw = run_in(tmp_path, steps=0), random.Random(0)
    rows, total = [], 0.0
    for index in range(count):
        before = rows[-1] if index % lifetime else {"alive_s": 0.0, "sampled_tokens": 0.0}
        more = draw.randrange(10 ** draw.randrange(1, 6))
        total += more
        rows.append(
            {"time": 5.0 * index, "alive_s": before["alive_s"] + 5.0}
            | {"sampled_tokens": before["sampled_tokens"] + more, "tokens_per_s": 1.0}
        )
    path = run.directory / "metrics" / "g9.jsonl"
    path.write_text("".join(json.dumps({"step": None} | row) + "\n" for row in rows))
    archive = archive_of(run)
    kept = archive.generators["g9"]
    assert archive.counted("sampled_tokens") == total
    assert len(kept) <= MOST_ROWS + 2 * (count // lifetime + 1)
    assert all(row in kept for row in rows) if count < MOST_ROWS / 3 else len(kept) > MOST_ROWS / 2
    longest_s = max(after["time"] - before["time"] for before, after in itertools.pairwise(kept))
    assert kept[0] == rows[0] and kept[-1] == rows[-1] and longest_s <= max(5.0, 2 * 5.0 * count / MOST_ROWS)


def test_what_an_environment_counts_is_in_one_chart_each(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=0)
    for step in (1, 2):
        counts = {"tools/calls": step, "tools/late": 0.5, "model_s": 3.0, "chat/kept": 1.5, "own": 7.0 * step}
        run.learner.log({f"environment/{name}": value for name, value in counts.items()}, step=step)
    page = page_of(run)
    names = {title: {*page.curves(title)} for title in page.text_of["figcaption"]}
    assert (
        names.items()
        >= {
            "Tool calls of an episode": {"environment/tools/calls", "environment/tools/late"},
            "Seconds of an episode": {"environment/model_s"},
            "How turns continue their conversation": {"environment/chat/kept"},
            "Environment": {"environment/own"},
        }.items()
    )


def test_what_was_dropped_is_set_beside_what_was_trained(tmp_path: Path) -> None:
    """Weighted by groups; bands over the steps that had any."""
    run = run_in(tmp_path, steps=0)
    base = {
        "groups/trained": 4.0,
        "tokens/short": 10.0,
        "tokens/medium": 0.0,
        "tokens/long": 0.0,
        "completions/length_mean": 20.0,
    }
    dropped = {"groups/rejected_stale": 1.0, "groups/length_rejected_stale": 90.0}
    more = {"groups/rejected_stale": 3.0, "groups/length_rejected_stale": 50.0, "tokens/long": 5.0}
    shares = {
        f"staleness/masked_share/{band}": share
        for band, share in (("short", 0.0), ("medium", 0.0), ("long", 1.0))
    }
    run.learner.log(base | dropped | shares, step=1)
    run.learner.log(base | more | shares | {"staleness/masked_share/long": 0.5}, step=2)
    page = page_of(run)
    cells = " | ".join(page.text_of["td"])
    assert f"trained | 8 | 20 | stale | 4 | {(90 + 3 * 50) / 4:g}" in cells
    assert "short | 20 | 0% | - | - | medium | 0 | - | - | - | long | 5 | 75% | - | -" in cells


def test_the_histogram_of_age_is_the_mean_over_steps(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=0)
    run.learner.log(
        {
            "time/step": 1.0,
            "staleness/in_flight/0": 1.0,
            "staleness/in_queue/0": 0.5,
            "staleness/in_queue/1": 0.5,
        },
        step=1,
    )
    run.learner.log(
        {
            "time/step": 1.0,
            "staleness/in_flight/0": 0.5,
            "staleness/in_flight/1": 0.5,
            "staleness/in_queue/0": 1.0,
        },
        step=2,
    )
    assert "0 | 75% | 75% | 1 | 25% | 25%" in " | ".join(page_of(run).text_of["td"])


def test_a_long_curve_is_thinned_to_means_that_keep_its_area() -> None:
    points = [(float(at), float(at % 7)) for at in range(10 * MOST_POINTS)]
    short = thinned(points, MOST_POINTS)
    assert len(short) == MOST_POINTS and short[-1][0] == points[-1][0]
    assert sum(value for _, value in short) * 10 == pytest.approx(sum(value for _, value in points))
    assert thinned(points[:MOST_POINTS], MOST_POINTS) == points[:MOST_POINTS]


def test_the_bands_are_those_of_the_mathematics() -> None:
    assert BANDS == metrics.BANDS


def test_the_page_lies_in_the_run_directory_or_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path, steps=2)
    report(run.directory, None)
    write_report(run.directory, tmp_path / "new" / "elsewhere.html")
    written = [(run.directory / "report.html").read_text(), (tmp_path / "new" / "elsewhere.html").read_text()]
    without_time = [re.sub(r"written [-\d :]+ UTC", "", text) for text in written]
    assert without_time[0] == without_time[1] and "report.html" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    for refused in (tmp_path / "file" / "report.html", Path(), Path("/")):
        with pytest.raises(RunError, match="cannot be written"):
            write_report(run.directory, refused)
    assert not list(run.directory.glob(".report*"))
    RunDirectory(run.directory).config.write_bytes(b"run: \xff")
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        read_archive(RunDirectory(run.directory))


def test_best_and_worst_samples_are_those_of_training(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rewards = [0.5, 2.0, -1.0, 0.0, 1.5, 7.0, -3.0, 0.25, 1.0]
    kinds = ["eval" if abs(reward) >= 3 else "train" for reward in rewards]
    lines = [{"reward": reward, "kind": kind} for reward, kind in zip(rewards, kinds, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = {section.title: [one.reward for one in section.samples] for section in sample_sections(path)}
    assert shown["Best samples"] == [2.0, 1.5, 1.0, 0.5] and shown["Worst samples"] == [-1.0, 0.0, 0.25, 0.5]
    assert shown["Held-out samples"] == [7.0, -3.0] and shown["Dropped samples"] == []
