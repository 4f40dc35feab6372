"""What the documentation quotes exists: messages, metrics, commands with their options, keys and paths."""

import ast
import json
import re
from pathlib import Path

import pytest
import typer

from asyncrl.cli.app import app
from asyncrl.commands.sweep import swept
from asyncrl.config.data_section import DataSource, EvalSet
from asyncrl.config.load import load
from asyncrl.config.outline import all_paths
from asyncrl.config.schema import Config
from asyncrl.preflight.validate import validated_config
from asyncrl.rewards.forms import bind, load_function
from asyncrl.stages.pipeline import PipelineConfig
from asyncrl.stages.settings import StageConfig
from tests.support.model_files import model_files
from tests.support.pages import PAGES, ROOT, Command, blocks, commands, files, inline_commands, text_of

GROUP = typer.main.get_command(app)
ALL = [command for page in PAGES for command in commands(page)]
INLINE = [command for page in PAGES for command in inline_commands(page)]
OURS = [command for command in ALL if command.program == "asyncrl"]
PLACEHOLDERS = {
    "FILE": "configs/quickstart.yaml",
    "RUN": "runs/x",
    "URL": "redis://127.0.0.1/0",
    "METRIC": "reward/mean",
}
NOT_IN_THE_README = {"version"}
"""What every program has."""


def parse(words: list[str]) -> None:
    """Parse as the command line does. Raises typer's error, or KeyError for an unknown command."""
    group, rest = GROUP, list(words)
    while hasattr(group, "commands"):
        group = group.commands[rest.pop(0)]
    group.make_context("asyncrl", rest)


def label(command: Command) -> str:
    return f"{command.page}: {command.text}"


def test_no_line_of_a_block_is_a_command_that_nobody_sees():
    """A block without a language is all commands or none, except where a file is shown before them."""
    for page in PAGES:
        seen = [command.text for command in commands(page)]
        for language, content in blocks(page):
            for line in content.splitlines() if not language else ():
                if re.search(r"\b(asyncrl [a-z]+( |$)|python -m |docker (compose|run) |make [a-z]+$)", line):
                    assert any(line.strip().startswith(text) for text in seen), f"{page.name}: {line}"


@pytest.mark.parametrize("command", [*ALL, *INLINE], ids=label)
def test_scripts_modules_and_extras_exist(command):
    program, words = command.program, command.words
    if program == "python":
        path = ROOT / (words[2].replace(".", "/") if words[1] == "-m" else words[1])
        places = (path, path.with_suffix(".py"), path / "__main__.py")
        assert words[2:3] == ["pytest"] or any(place.is_file() for place in places)
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"(?:asyncrl|\.)\[([\w,-]+)\]", command.text)
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert extras and all(f"\n{extra} = [" in project for one in extras for extra in one.split(","))


@pytest.mark.parametrize("command", OURS, ids=label)
def test_our_commands_their_options_configs_and_keys_exist(command, tmp_path, monkeypatch):
    """Parsed as typed; its config loads with its overrides. test_doc_commands.py runs the quick ones."""
    rest = command.words[1:]
    if rest == ["--help"]:
        return
    parse(rest)
    for file, content in files(ROOT / command.page).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    config = next((word for word in rest if word.endswith(".yaml")), None)
    if config:
        model = {"stage": StageConfig, "pipeline": PipelineConfig}.get(rest[0], Config)
        overrides = [word for word in rest if re.match(r"[\w.]+=", word)]
        assert (
            swept(Path(config), overrides, 1) if rest[0] == "sweep" else load(model, Path(config), overrides)
        )


@pytest.mark.parametrize(
    "command", [command for command in INLINE if command.program == "asyncrl"], ids=label
)
def test_commands_in_a_sentence_can_be_typed(command):
    # [RUN], [--store URL].
    words = [word for word in re.sub(r"[\[\]]", "", command.text).split()[1:] if word != "…"]
    assert words[0] in GROUP.commands, label(command)
    if len(words) > 1:  # else the command is named, not typed
        parse([PLACEHOLDERS.get(word, word) for word in words])


def test_the_readme_has_every_command():
    visible = {name for name, command in GROUP.commands.items() if not command.hidden} - NOT_IN_THE_README
    assert {
        command.words[1] for command in inline_commands(ROOT / "README.md") if command.program == "asyncrl"
    } >= visible


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_environment_is_made_before_it_is_activated(page):
    texts = [command.text for command in commands(page)]
    if (entered := "source .venv/bin/activate") in texts:
        before = texts[: texts.index(entered)]
        assert any(text.endswith("make install") for text in before), "no clone has a .venv"


def messages() -> list[str]:
    """Every text of the program; what is filled in is …"""
    found = []
    for path in [*(ROOT / "asyncrl").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[sdgf]", "…", node.value))
    return found


def test_every_message_that_is_quoted_is_one_of_the_program():
    known = messages()
    rows = re.findall(r"^\| (.*?) \|", text_of(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 40
    for text in quoted:
        pattern = ".*".join(re.escape(part.strip()) for part in text.split("…"))
        assert any(re.search(pattern, message, re.DOTALL) for message in known), text


def test_metrics_that_are_named_are_explained():
    explained = text_of(ROOT / "docs" / "metrics.md")
    prefixes = set(re.findall(r"`([a-z]+)/", explained))
    for page in ("reading-metrics.md", "first-run.md", "own-task.md", "troubleshooting.md"):
        for name in re.findall(r"`([a-z]+/[\w/@<>]+)`", text_of(ROOT / "docs" / page)):
            general = re.sub(r"(masked_share)/\w+", r"\1/<band>", name)
            general = re.sub(r"(rejected)_\w+", r"\1_<reason>", general)
            general = re.sub(r"^(mismatch|policy|drift)/(?=k\d|ratio|ess)", "<pair>/", general)
            if name.split("/")[0] in prefixes:
                assert f"`{name}`" in explained or f"`{general}`" in explained, f"{page}: {name}"


def test_keys_that_are_named_exist():
    known = set(all_paths(Config))
    sections = {path for path in known if "." not in path}
    for page in PAGES:
        # Half of their keys are of others; test_coming_from.py knows which.
        if page.name.startswith("coming-from-"):
            continue
        for name in re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`", text_of(page)):
            first = name.split(".")[0]
            if first in sections and not name.endswith((".py", ".yaml", ".json", ".jsonl", ".md", ".key")):
                plain = re.sub(r"\.\d+", "", name)
                assert plain in known or plain in ITEMS, f"{page.name}: {name}"


ITEMS = {f"reward.functions.{key}" for key in ("function", "weight", "name", "params")}
ITEMS |= {f"data.train.{key}" for key in DataSource.model_fields} | {
    f"data.eval.{key}" for key in EvalSet.model_fields
}


def test_recipes_of_rewards_are_configs_that_validate_accepts(tmp_path, monkeypatch):
    page = ROOT / "docs" / "rewards.md"
    shown = list(blocks(page))
    written = files(page) | {"rubric.jinja": next(text for language, text in shown if language == "jinja")}
    for file, content in written.items():
        (tmp_path / file).write_text(content)
    monkeypatch.chdir(tmp_path)
    model_files(Path("model"))
    row = {"prompt": "2+2=", "answer": "4", "reference": "It is 4.", "tests": ["assert True"]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    sizes = "sampling: {max_prompt_tokens: 8, max_response_tokens: 8}"
    base = f"run: {{name: t}}\nmodel: {{path: ./model}}\ndata: {{train: rows.jsonl}}\n{sizes}\n"
    recipes = [text for language, text in shown if language == "yaml"]
    assert len(recipes) == 5
    for recipe in recipes:
        Path("task.yaml").write_text(base + recipe)
        validated_config(Path("task.yaml"))
    brief, careful = (
        load_function(f"{name}.py:{to}") for name, to in (("rank", "brief"), ("careful", "careful"))
    )
    assert brief("", ["a", "aa", "aaa"]) == pytest.approx([2 / 3, 1 / 3, 0])
    scores = [careful("", said, "4") for said in ("so 4", "I do not know", "5")]
    assert scores == [1, 0, -1] and careful("", "4", None) is None


def test_files_of_the_guide_are_what_they_seem(tmp_path, monkeypatch):
    page = ROOT / "docs" / "own-task.md"
    for file, content in files(page).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    row, _ = [ast.literal_eval(content.strip()) for language, content in blocks(page) if language == "json"]
    columns = {"answer": row["answer"]}
    right, step = (bind(load_function(f"task.py:{name}")) for name in ("right", "last_digit"))
    for response, expected in (
        ("46", (1.0, 1.0)),
        ("36", (0.0, 1.0)),
        ("47", (0.0, 0.0)),
        ("", (0.0, 0.0)),
        ("46x", (1.0, 1.0)),
    ):
        assert (
            right([row["prompt"]], [response], [columns])[0][0],
            step([row["prompt"]], [response], [columns])[0][0],
        ) == expected


def test_no_blank_line_divides_a_table():
    """What follows one would be text: only the head of a table, with a line |---| below it, comes after it."""
    for page in PAGES:
        lines = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL).splitlines()
        for before, row, after in zip(lines, lines[1:], [*lines[2:], ""], strict=False):
            if not before.strip() and row.startswith("|"):
                assert re.match(r"\|[ :]*-", after), f"{page.name}: {row}"


def test_links_into_a_page_meet_a_heading():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text_of(page)):
            there = (page.parent / target).resolve() if target else page
            headings = re.findall(r"^#+ (.+)$", text_of(there), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_files_that_are_named_exist():
    """Also those of the reading order, which are named from asyncrl/ on."""
    for page in PAGES:
        for name in re.findall(
            r"`((?:asyncrl|bench|configs|deploy|docs|examples|reliability|tests)/[\w/.-]+)`", text_of(page)
        ):
            assert (ROOT / name).exists() or "/runs/" in name or "NAME" in name, f"{page.name}: {name}"
    for name in re.findall(r"`(\w+(?:/\w+)+\.py)`", text_of(ROOT / "docs" / "architecture.md")):
        assert (ROOT / "asyncrl" / name).is_file() or (ROOT / name).is_file(), name
