"""The storyteller of the tutorial: wider heads change nothing, and no training row has a held-out word."""

import json
import runpy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.preflight.validate import validated_config
from examples.stories import HEAD, HELD_OUT, TRAINING, make_stories, story_rows, widen_heads
from tests.support.pages import ROOT

IDS = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(0))


def narrow(head: int = 48, kv_heads: int = 3) -> LlamaForCausalLM:
    """A Llama with the proportions of stories15M, or with fewer heads for keys and values."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=3 * head, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=kv_heads, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("head", "width", "kv_heads"), [(48, 96, 3), (8, 32, 1)])
def test_wider_heads_change_no_output_and_their_zeros_are_not_trained(head, width, kv_heads):
    before = narrow(head, kv_heads)
    after = widen_heads(before, width)
    assert after.config.head_dim == width
    torch.testing.assert_close(after(IDS).logits, before(IDS).logits, atol=2e-5, rtol=1e-4)
    after(IDS, labels=IDS).loss.backward()
    unused = [place for place in range(width) if place % (width // head)]
    for name, parameter in after.named_parameters():
        if "_proj.weight" in name and "self_attn" in name:
            heads = parameter.grad.T if "o_proj" in name else parameter.grad
            assert heads.view(-1, width, heads.shape[-1])[:, unused].abs().max() == 0, name


def test_rows_are_different_pairs_and_held_out_words_are_not_trained_on():
    rows = story_rows(TRAINING.split(), 2000)
    assert len({tuple(row["words"]) for row in rows}) == 2000
    assert all(row["prompt"].startswith(f"Words: {', '.join(row['words'])}.\n") for row in rows)
    assert not set(TRAINING.split()) & set(HELD_OUT.split()) and rows == story_rows(TRAINING.split(), 2000)


def test_what_is_made_is_what_the_config_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    narrow().save_pretrained(copy)
    vocabulary = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{letter: 3 + index for index, letter in enumerate("abcdefghij")},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(copy)

    file = ROOT / "configs" / "stories15m-words-cpu.yaml"
    made = (tmp_path / load_config(file).model.path).parent
    make_stories(made, str(copy))
    validated_config(file)
    assert len((made / "train.jsonl").read_text().splitlines()) == 2000
    assert {word for line in (made / "test.jsonl").open() for word in json.loads(line)["words"]} == set(
        HELD_OUT.split()
    )
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert model.config.head_dim == HEAD and model.generation_config.eos_token_id == [1, 2]
    # Made again from the copy, whose heads are wide, the model is the same.
    make_stories(tmp_path / "again", str(made / "model"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(DataError, match="exists; remove it"):
        make_stories(made, str(copy))


def test_a_model_that_cannot_be_loaded_is_said_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"cannot load \S+/nothing: .*give a directory with a copy"):
        make_stories(tmp_path / "made", str(tmp_path / "nothing"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["smollm2", "stories"])
@pytest.mark.parametrize(
    ("arguments", "said"), [([], "the following arguments are required: DIRECTORY"), (["full"], "error: ")]
)
def test_what_a_command_lacks_is_said_with_its_usage(tmp_path, monkeypatch, capsys, name, arguments, said):
    """`full` is not empty; the packages of a model may be missing, too."""
    (tmp_path / "full" / "file").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    found = capsys.readouterr().err
    assert ended.value.code == 2 and f"usage: {name}.py " in found and said in found
