"""Prompts: special tokens exactly once, templates, chat, refusals that name the rows."""

import json
import logging
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config

from asyncrl.config.data_section import DataConfig
from asyncrl.config.sections import ModelConfig, SamplingConfig
from asyncrl.data import dataset
from asyncrl.data.data_files import DataFiles
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sample_plan import SamplePlan
from asyncrl.errors import DataError
from tests.support.characters import BOS, CHARACTERS, EOS, SPECIALS, character_tokenizer
from tests.support.task_config import config_of

STORIES = Path(__file__).parents[2].parent / "shared" / "models" / "stories260K-hd32"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def jsonl(tmp_path):
    def write(name: str, *rows: dict) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def source(
    model: str, train: str, *, chat: bool = False, limit: int = 64, seed: int = 0, **data
) -> PromptSource:
    return PromptSource(
        DataConfig(train=train, **data),
        ModelConfig(path=model, chat_template=chat),
        SamplingConfig(max_prompt_tokens=limit),
        seed=seed,
    )


def ids(text: str) -> list[int]:
    """Token ids by hand."""
    return [(SPECIALS + CHARACTERS).index(character) for character in text]


def test_a_plain_prompt_has_one_bos_also_when_the_text_brings_its_own(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    prompts = source(model, jsonl("t", {"prompt": "1+2="}, {"prompt": "<bos>1+2="}), shuffle=False)
    assert list(prompts.prompt(1).token_ids) == [BOS, *ids("1+2=")]
    assert list(prompts.prompt(2).token_ids) == [BOS, *ids("1+2=")]
    assert (prompts.prompt(1).text, dict(prompts.prompt(1).row)) == ("1+2=", {"prompt": "1+2="})


def test_an_eos_that_the_tokenizer_adds_is_taken_off(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", pattern="<bos> $A <eos>")
    assert list(source(model, jsonl("t", {"prompt": "ab"})).prompt(1).token_ids) == [BOS, *ids("ab")]


def test_end_tokens_are_those_of_config_json_where_there_is_no_generation_config(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    end = ids("z")[0]
    Qwen2Config(eos_token_id=[EOS, end]).save_pretrained(model)
    assert source(model, jsonl("t", {"prompt": "ab"})).renderer.stop_ids == {EOS, end}
    Path(model, "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    assert source(model, jsonl("t", {"prompt": "ab"})).renderer.stop_ids == {EOS}


def test_a_template_fills_in_columns(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    prompts = source(model, jsonl("t", {"question": "1+2", "n": 3}), template="Q{n}: {question}\n{{A}}:")
    assert prompts.prompt(1).text == "Q3: 1+2\n{A}:"


def test_a_row_may_give_the_width_of_a_field_within_bounds(tmp_path, jsonl):
    model, template = character_tokenizer(tmp_path / "m"), "{q:>{n}}:"
    assert source(model, jsonl("t", {"q": "a", "n": 3}), template=template).prompt(1).text == "  a:"
    with pytest.raises(DataError, match="found the width or precision 99999, at most 1000 is allowed"):
        source(model, jsonl("t", {"q": "a", "n": 3}, {"q": "a", "n": 99999}), template=template)


def test_a_chat_prompt_is_what_the_template_writes_and_nothing_twice(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    rows = jsonl(
        "t",
        {"prompt": "hi"},
        {
            "prompt": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yo"},
                {"role": "user", "content": "so"},
            ]
        },
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]},
    )
    prompts = source(model, rows, chat=True, system="be kind", shuffle=False)
    assert [prompts.prompt(ticket).text for ticket in (1, 2, 3)] == [
        "<bos>[system]be kind[user]hi[assistant]",
        "<bos>[system]be kind[user]hi[assistant]yo[user]so[assistant]",
        "<bos>[system]own[user]hi[assistant]",
    ]
    assert list(prompts.prompt(3).token_ids) == [BOS, *ids("[system]own[user]hi[assistant]")]


def test_a_chat_template_that_writes_no_bos_gets_none(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE.removeprefix("{{ bos_token }}"))
    assert list(source(model, jsonl("t", {"prompt": "hi"}), chat=True).prompt(1).token_ids) == ids(
        "[user]hi[assistant]"
    )


def test_tickets_follow_the_plan_through_epochs(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    train = jsonl("t", *({"prompt": str(n)} for n in range(10)))
    prompts, plan = source(model, train, seed=7), SamplePlan(10, seed=7, shuffle=True)
    assert [prompts.prompt(t).text for t in range(1, 31)] == [str(plan.row(t)) for t in range(1, 31)]


def test_every_prompt_that_is_read_is_progress(tmp_path, jsonl, monkeypatch):
    rows, beats = jsonl("t", *[{"prompt": "ab"}] * 3), []
    made = source(character_tokenizer(tmp_path / "m"), rows, eval=rows)
    monkeypatch.setattr("asyncrl.data.prompts.beat", lambda: beats.append(1))
    assert [len(beats) for _ in made] == [1, 2, 3]
    assert len(made.eval_prompts(2)) == 2 and len(beats) == 5


def test_prompts_of_a_mixture_come_from_their_source_below_its_system_message(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    train = [
        {"path": jsonl("t", *({"prompt": f"a{n}"} for n in range(4))), "weight": 0.5, "limit": 2},
        {"path": jsonl("u", {"prompt": "b0"}), "weight": 0.5, "system": "own", "name": "short"},
    ]
    prompts = source(model, train, chat=True, shuffle=False, system="all")
    texts = ["<bos>[system]all[user]a0[assistant]", "<bos>[system]own[user]b0[assistant]"]
    texts += [texts[0].replace("a0", "a1"), texts[1]]
    assert sorted(prompts.prompt(ticket).text for ticket in range(1, 5)) == sorted(texts)
    assert len(prompts) == 3
    # All that decides which prompt a ticket means is in the fingerprint, and nothing else.
    found = {prompts.fingerprint}
    for index, change in (
        (0, {"limit": 3}), (0, {"limit": None}), (0, {"weight": 0.6}), (1, {"system": None}),
        (1, {"system": "all"}), (1, {"path": train[0]["path"]}),
    ):  # fmt: skip
        other = [*train]
        other[index] = train[index] | change
        found.add(source(model, other, chat=True, system="all").fingerprint)
    assert len(found) == 7
    same = [train[0] | {"weight": 3, "name": "x"}, train[1] | {"weight": 3, "name": "y"}]
    assert source(model, same, chat=True, system="all").fingerprint == prompts.fingerprint


def test_eval_prompts_come_in_file_order_and_at_most_as_many_as_there_are(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    train, held_out = (
        jsonl("t", {"prompt": "a"}),
        jsonl("e", {"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}),
    )
    prompts = source(model, train, eval=held_out)
    assert [prompt.text for prompt in prompts.eval_prompts(2)] == ["x", "y"]
    assert [prompt.text for prompt in prompts.eval_prompts(9)] == ["x", "y", "z"]
    assert [prompt.held_out for prompt in prompts.eval_prompts(9)] == [0, 1, 2]
    assert prompts.prompt(1).held_out is None
    assert source(model, train).eval_prompts(9) == []


def test_overlap_of_training_and_evaluation_is_warned_of(tmp_path, jsonl, caplog):
    model = character_tokenizer(tmp_path / "m")
    train = jsonl("t", {"prompt": "a"}, {"prompt": "b"})
    with caplog.at_level(logging.WARNING):
        source(model, train, eval=jsonl("e", {"prompt": "c"}, {"prompt": "b", "other": 1}))
    assert (
        "1 of 2 prompts in data.eval" in caplog.text
        and "e.jsonl:2: the evaluation is not held out" in caplog.text
    )
    caplog.clear()
    source(model, train, eval=jsonl("f", {"prompt": "c"}))
    assert not caplog.records


@pytest.mark.parametrize("secret", [1, 2])
def test_rows_of_one_prompt_are_different_tasks_for_an_environment(tmp_path, jsonl, caplog, secret):
    model = character_tokenizer(tmp_path / "m")
    train, held_out = jsonl("t", {"prompt": ":", "secret": 1}), jsonl("e", {"secret": secret, "prompt": ":"})
    sections = {"model": {"path": model}, "data": {"train": train, "eval": held_out}}
    PromptSource.of(config_of(**sections, environment={"uses": "game.py:Game"}))
    assert ("1 of 1 prompts in data.eval also occur in data.train" in caplog.text) == (secret == 1)
    caplog.clear()
    PromptSource.of(config_of(**sections))
    assert "1 of 1 prompts in data.eval also occur in data.train" in caplog.text


def test_of_many_rows_some_are_looked_at_first_and_the_others_when_they_are_drawn(
    tmp_path, jsonl, monkeypatch, caplog
):
    monkeypatch.setattr(dataset, "CHECKED", 10)
    model = character_tokenizer(tmp_path / "m")
    texts = ["9" * 9 if number in (4, 6) else str(number) for number in range(30)]  # every third is looked at
    train, held_out = jsonl("t", *({"prompt": text} for text in texts)), jsonl("e", {"prompt": "3"})
    with pytest.raises(
        DataError, match=r"\(5\): 1 of 10 of \S+t.jsonl \(\S+t.jsonl:7: 10 tokens\); raise it to 10"
    ):
        source(model, train, limit=5)
    texts[6] = "6"
    train = jsonl("t", *({"prompt": text} for text in texts))
    prompts = source(model, train, limit=5, shuffle=False, eval=held_out)
    assert prompts.longest == 3 and "1 of 1 prompts in data.eval also occur" in caplog.text
    with pytest.raises(
        DataError, match=r"t.jsonl:5: the prompt has 10 tokens; sampling.max_prompt_tokens allows 5"
    ):
        prompts.prompt(5)
    assert [prompts.prompt(n + 1).text for n in range(30) if n != 4] == [t for t in texts if len(t) < 9]
    assert source(model, train, limit=5, shuffle=False, long_prompts="truncate").prompt(5).token_ids == (
        *ids("9" * 5),
    )
    dropped = source(model, train, limit=5, long_prompts="drop")
    assert len(dropped) == 29 and dropped.longest == 3, "of the prompts that are left"


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_that_drops_long_prompts_is_one_on_files_without_them(tmp_path, jsonl, caplog, shuffle):
    model = character_tokenizer(tmp_path / "m")
    texts = ["a" * (7 if number % 3 == 0 else 1 + number % 4) + str(number % 10) for number in range(30)]
    rows = [{"prompt": text} for text in texts]
    short = [row for row in rows if len(row["prompt"]) < 5]
    held_out, few = jsonl("e", *rows[:4]), jsonl("f", *(row for row in rows[:4] if row in short))
    values = {"limit": 5, "seed": 3, "shuffle": shuffle}
    # Not of the first two rows. What stands behind the last one is not looked at.
    file = jsonl("t", *rows, {"other": "column"})
    held = source(model, few, eval=[{"path": file, "limit": 2}], long_prompts="drop", limit=5)
    assert [*held.held_out[0]] == short[:2]
    assert [one.text for one in held.eval_prompts(2)] == [row["prompt"] for row in short[:2]]
    with caplog.at_level(logging.WARNING):
        dropping = source(model, jsonl("t", *rows), eval=held_out, long_prompts="drop", **values)
    whole = source(model, jsonl("s", *short), eval=few, **values)
    assert dropping.fingerprint == whole.fingerprint
    assert [dropping.prompt(n).text for n in range(1, 90)] == [whole.prompt(n).text for n in range(1, 90)]
    kept, expected = ([(one.text, one.held_out) for one in it.eval_prompts(9)] for it in (dropping, whole))
    assert kept == expected and len(kept) == 2
    said = "so their rows are left out: 14 of 30 of"
    assert any(said in line and "t.jsonl:1: 9 tokens" in line for line in caplog.messages)
    # The learner, which renders no prompts, knows the same rows.
    config = config_of(
        model={"path": model},
        data={"train": str(tmp_path / "t.jsonl"), "eval": held_out, "long_prompts": "drop"},
        sampling={"max_prompt_tokens": 5},
    )
    files = DataFiles(config)
    assert (files.fingerprint, files.train_rows) == (whole.fingerprint, [len(short)])
    assert files.held_out == [(len(rows), rows.fingerprint) for rows in dropping.held_out]
    assert [count for count, _ in files.held_out] == [len(whole.eval_prompts(9))]
    with pytest.raises(
        DataError, match=r"all prompts of \S+f.jsonl are longer than .* \(1\), so no row is left"
    ):
        source(model, few, limit=1, long_prompts="drop")


def test_the_end_of_a_long_prompt_stays_if_it_is_truncated(tmp_path, jsonl, caplog):
    model = character_tokenizer(tmp_path / "m")
    with caplog.at_level(logging.WARNING):
        prompts = source(
            model,
            jsonl("t", {"prompt": "1+2+3="}, {"prompt": "1="}),
            limit=4,
            long_prompts="truncate",
            shuffle=False,
        )
    assert [list(prompts.prompt(n).token_ids) for n in (1, 2)] == [ids("+2+3=")[-4:], [BOS, *ids("1=")]]
    assert any("their first tokens are cut off: 1 of 2 of" in line for line in caplog.messages)
    assert prompts.longest == 4


@pytest.mark.parametrize("chat", [False, True])
def test_a_teacher_reads_columns_that_the_policy_does_not(tmp_path, jsonl, chat):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    train, held_out = (jsonl(name, {"prompt": "1+2=", "answer": 3}) for name in ("t", "e"))

    def opened(limit: int, template: str, **data) -> PromptSource:
        sampling = SamplingConfig(max_prompt_tokens=limit)
        loaded, policy = (
            DataConfig(train=train, eval=held_out, **data),
            ModelConfig(path=model, chat_template=chat),
        )
        return PromptSource(loaded, policy, sampling, seed=0, teacher=template)

    before, after = ([BOS, *ids("[user]")], ids("[assistant]")) if chat else ([BOS], [])
    prompts = opened(64, "{answer}: {prompt}")
    prompt = prompts.prompt(1)
    assert list(prompt.token_ids) == [*before, *ids("1+2="), *after]
    assert list(prompt.teacher_ids) == [*before, *ids("3: 1+2="), *after]
    assert prompts.eval_prompts(1)[0].teacher_ids == () and prompt.text.count("3") == 0
    assert prompts.longest == len(prompt.teacher_ids)
    short = len(prompt.token_ids)
    with pytest.raises(DataError, match=f"raise it to {len(prompt.teacher_ids)}"):
        opened(short, "{answer}: {prompt}")
    cut = opened(short, "{answer}: {prompt}", long_prompts="truncate").prompt(1)
    assert (cut.token_ids, cut.teacher_ids) == (prompt.token_ids, prompt.teacher_ids[-short:])
    with pytest.raises(DataError, match=r"algorithm\.reference\.template wants column `solution`"):
        opened(64, "{solution}")


def test_learner_and_generators_drop_the_same_prompts_of_a_teacher(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    train = jsonl("t", {"prompt": "1+2=", "answer": 3}, {"prompt": "1+2=", "answer": "a" * 40})
    config = config_of(
        model={"path": model},
        data={"train": train, "long_prompts": "drop"},
        sampling={"max_prompt_tokens": 32},
        algorithm={
            "advantage": "distill",
            "reference": {"template": "{answer}: {prompt}", "scorers": 1},
        },
    )
    prompts, files = PromptSource.of(config), DataFiles(config)
    assert files.train_rows == [1] == [len(rows) for rows in prompts.rows]
    assert files.fingerprint == prompts.fingerprint


def test_a_template_shows_no_chat_messages(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    chat = [{"role": "user", "content": "1+2="}]
    data = DataConfig(train=jsonl("t", {"prompt": chat}), template="{prompt}")
    with pytest.raises(DataError, match="has chat messages, which become no text; name one that has text"):
        PromptSource(data, ModelConfig(path=model), SamplingConfig(), seed=0)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"data": {"train": "t", "images_key": "i", "long_prompts": "drop"}},
            "long_prompts is drop, but data.images_key is set",
        ),
        (
            {"data": {"train": "t", "long_prompts": "truncate"}, "environment": {"uses": "play.py:Play"}},
            "is truncate, but episodes render",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(sections, said):
    with pytest.raises(ValueError, match=said.removeprefix("long_prompts ")):
        config_of(**sections)


def test_too_long_prompts_are_all_counted_and_the_first_are_named(tmp_path, jsonl):
    model = character_tokenizer(tmp_path / "m")
    rows = [{"prompt": "x" * (4 + n % 3)} for n in range(30)]  # with <bos>: 5, 6, 7 tokens
    train = jsonl("t", *rows)
    assert source(model, train, limit=7).prompt(1)
    with pytest.raises(
        DataError,
        match=r"prompts are longer than sampling.max_prompt_tokens \(5\): 20 of 30 of \S+t.jsonl \(\S+t.jsonl:2: 6 tokens, "
        r"\S+t.jsonl:3: 7 tokens, \S+t.jsonl:5: 6 tokens, \S+:6: 7 tokens, \S+:8: 6 tokens, ...\); raise it to 7",
    ):
        source(model, train, limit=5)
    with pytest.raises(DataError, match=r"20 of 30 of \S+t.jsonl .*; 1 of 1 of \S+e.jsonl .*; raise it to 9"):
        source(model, train, limit=5, eval=jsonl("e", {"prompt": "x" * 8}))  # both at once


@pytest.mark.parametrize(
    ("row", "data", "chat", "message"),
    [
        (
            {"question": "q"},
            {},
            False,
            r"t.jsonl:2: data.prompt_field wants column `prompt`; the row has \['question'\]",
        ),
        (
            {"prompt": "q"},
            {"template": "{prompt} {level}"},
            False,
            r"t.jsonl:1: data.template wants column `level`",
        ),
        ({"prompt": "q"}, {"template": "{prompt"}, False, r"data.template is not a valid template"),
        (
            {"prompt": "q"},
            {"template": "{prompt:>999999999999}"},
            False,
            r"width or precision 999999999999, at most 1000 is",
        ),
        (
            {"prompt": 7},
            {},
            False,
            r"t.jsonl:2: column `prompt` holds a int; allowed is text; write it as text",
        ),
        (
            {"prompt": None},
            {},
            False,
            r"t.jsonl:2: column `prompt` holds nothing; allowed is text; write it as text",
        ),
        (
            {"prompt": [{"role": "user", "content": "q"}]},
            {},
            False,
            r"t.jsonl:2: .* holds a list; .* set model.chat_template: true",
        ),
        ({"prompt": " "}, {}, True, r"t.jsonl:2: the prompt is empty"),
        ({"prompt": ""}, {}, False, r"t.jsonl:2: the prompt is empty"),
        ({"prompt": [{"role": "user"}]}, {}, True, r"t.jsonl:2: found .*`role` and `content`"),
        ({"prompt": []}, {}, True, r"t.jsonl:2: found `\[\]`"),
        ({"prompt": 7}, {}, True, r"t.jsonl:2: found `7`; a chat prompt is text or a list"),
    ],
)
def test_a_row_that_makes_no_prompt_is_named(tmp_path, jsonl, row, data, chat, message):
    model = character_tokenizer(tmp_path / "m", template=TEMPLATE)
    with pytest.raises(DataError, match=message):
        source(model, jsonl("t", {"prompt": "fine"}, row), chat=chat, **data)


@pytest.mark.parametrize(("field", "hint"), [("hint", None), ("hint[text]", {"text": None})])
def test_a_template_refuses_null(tmp_path, jsonl, field, hint):
    train = jsonl("t", {"prompt": "p", "hint": {"text": "h"}}, {"prompt": "q", "hint": hint})
    named = f"t.jsonl:2: data.template wants a value of `{field}`, which is null; correct or remove the row"
    with pytest.raises(DataError, match=re.escape(named)):
        source(character_tokenizer(tmp_path / "m"), train, template=f"{{prompt}} {{{field}!s:>9}}")


@pytest.mark.parametrize("choices", [["a"], None, {}])
def test_a_row_that_lacks_a_part_of_a_column_is_named(tmp_path, jsonl, choices):
    train = jsonl("t", {"prompt": "p", "choices": ["a", "b"]}, {"prompt": "q", "choices": choices})
    named = r"t.jsonl:2: data.template wants a value of `choices\[1\]`, which the row does not have \(.*\); correct"
    with pytest.raises(DataError, match=named):
        source(character_tokenizer(tmp_path / "m"), train, template="{prompt} {choices[1]}")


def test_a_chat_run_needs_a_chat_template_and_a_run_a_tokenizer(tmp_path, jsonl):
    train = jsonl("t", {"prompt": "a"})
    with pytest.raises(DataError, match=r"the tokenizer in .* has none; set it to false"):
        source(character_tokenizer(tmp_path / "m"), train, chat=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"model.path .*empty: no tokenizer"):
        source(str(tmp_path / "empty"), train)


def test_a_tokenizer_that_the_library_refuses_is_named(tmp_path):
    model = character_tokenizer(tmp_path / "m")
    file = Path(model, "tokenizer.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "Newer", "vocab": {}}}))
    with pytest.raises(DataError, match=r"m: no tokenizer could be loaded .*; give a Hugging Face directory"):
        load_tokenizer(ModelConfig(path=model, chat_template=False))


def test_decoding_gives_what_was_sampled_without_special_tokens(tmp_path, jsonl):
    prompts = source(character_tokenizer(tmp_path / "m"), jsonl("t", {"prompt": "a"}))
    for raw in (False, True):
        assert prompts.decode([*ids(" 4 . 6 ,\n"), EOS], raw=raw) == " 4 . 6 ,\n"
        assert prompts.decode([], raw=raw) == ""


@pytest.mark.skipif(not STORIES.exists(), reason="needs the real model in ../shared/models")
def test_a_real_tokenizer_gets_one_bos_and_loses_no_text(jsonl):
    text = "Words: pen, crab.\nOnce upon a time, there was a"
    prompt = source(str(STORIES), jsonl("t", {"prompt": text, "words": ["pen", "crab"]})).prompt(1)
    assert prompt.token_ids[0] == 1 and prompt.token_ids.count(1) == 1 and prompt.token_ids[-1] != 2
    assert (
        AutoTokenizer.from_pretrained(STORIES).decode(prompt.token_ids, skip_special_tokens=True).strip()
        == text
    )
