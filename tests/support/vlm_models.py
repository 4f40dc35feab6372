"""A tiny Idefics3, the class of SmolVLM and the only one with images that vLLM's CPU build loads."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from asyncrl.batch.packing import TrainSample
from asyncrl.data.image_processor import LearnerImages
from tests.support.task_config import config_of

SIDE, PATCH, SCALE = 56, 14, 2
IMAGE_TOKENS = (SIDE // PATCH) ** 2 // SCALE**2
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?.:\n"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_idefics3(directory: Path, *, seed: int = 0) -> Path:
    """Two layers of vision and two of text, with weights so large that images matter."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *MARKS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=MARKS,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    Idefics3Processor(images, fast, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE).save_pretrained(
        directory
    )
    config = Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "vocab_size": len(vocabulary),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        image_token_id=vocabulary["<image>"],
        scale_factor=SCALE,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        # The policy hardly ever answers with the mark of an image.
        model.lm_head.weight[[vocabulary[mark] for mark in MARKS]] = 0.0
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    return directory


def picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> Path:
    """A picture of one colour, with a diagonal."""
    image = Image.new("RGB", size, colour)
    for place in range(min(size)):
        image.putpixel((place, place), (255, 255, 255))
    image.save(file)
    return file


def picture_bytes(shade: int, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """A PNG that is like no other shade's."""
    rng = np.random.default_rng(shade)
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def with_pictures(items: Sequence[TrainSample], model: str) -> list[TrainSample]:
    """Each sample with 0, 1 or 2 pictures before its prompt, of two sizes, and without marks elsewhere."""
    processor = AutoProcessor.from_pretrained(model)
    found = []
    for index, one in enumerate(items):
        images = tuple(picture_bytes(10 * index + i, (SIDE, SIDE - 14 * i)) for i in range(index % 3))
        ids = [7]
        if images:
            pictures = [Image.open(BytesIO(image)) for image in images]
            ids = processor(text=["<image>" * len(images)], images=[pictures])["input_ids"][0]
        prompt, response = (np.where(part < 7, part + 7, part) for part in (one.prompt_ids, one.response_ids))
        prompt = np.concatenate([np.array(ids, dtype=np.int32), prompt])
        found.append(replace(one, prompt_ids=prompt, response_ids=response, images=images))
    return found


def images_of(model: str, data: str) -> LearnerImages:
    """What a rank of a learner with these rows has."""
    return LearnerImages(
        config_of(model={"path": model, "chat_template": True}, data={"train": data, "images_key": "images"})
    )
