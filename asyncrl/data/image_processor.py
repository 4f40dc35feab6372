"""Images of rows on both sides of a run, and the model's processor of images.

    generator   reads the images of a ticket's row, samples with them, and records a digest of their bytes
    learner     reads the images of the same row again, and rejects a group whose digest differs

So no pixel crosses the store. The data's fingerprint covers the rows, but not the files that they name.
"""

import hashlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.model_files import image_problem
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig
from asyncrl.data.dataset import Rows
from asyncrl.data.images import image_bytes, picture_of
from asyncrl.data.row_functions import load_parts
from asyncrl.data.sample_plan import make_mixture
from asyncrl.engine.base import PromptImages
from asyncrl.errors import DataError
from asyncrl.types import Group

# Name of the column of a group.
DIGESTS = "image_digests"


def _digests_of(images: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return a digest of each image's bytes."""
    digests = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in images)
    return np.frombuffer(digests, dtype=np.uint64)


class ImageProcessor:
    """The processor of a model: placeholders in prompts, and what the forward pass takes of images."""

    def __init__(self, model: ModelConfig) -> None:
        """Load it. Raises DataError for a model without one."""
        from transformers import AutoProcessor

        try:
            if problem := image_problem(model.architecture().model_type):
                raise DataError(f"{model.path}: {problem}")
            self._processor: Any = AutoProcessor.from_pretrained(model.path, **model.hub_options)
            self.image_token: str = self._processor.image_token
            self._of_images: Any = self._processor.image_processor
        except (OSError, ValueError, ImportError, AttributeError) as error:
            found = f"data.images_key is set, but {model.path} has no processor of images ({error})"
            raise DataError(f"{found}; choose a model that sees images, or remove the key") from error
        self._tokenizer: Any = self._processor.tokenizer
        self.image_token_id = int(self._tokenizer.convert_tokens_to_ids(self.image_token))

    def short_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered prompt, with one placeholder for each image."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids(self, text: str, images: Sequence[bytes], where: str) -> tuple[int, ...]:
        """Return the tokens as the model gets them, with a placeholder for each part of an image."""
        pictures = [picture_of(image, where) for image in images]
        try:
            found = self._processor(text=[text], images=[pictures], add_special_tokens=False)["input_ids"][0]
        except (ValueError, IndexError, TypeError) as error:
            found = f"{where}: the model's processor refuses the row ({error})"
            raise DataError(f"{found}; correct it") from error
        return tuple(found)

    def read(self, text: str, images: Sequence[bytes], where: str) -> PromptImages:
        """Return what an engine gets."""
        pictures = tuple(picture_of(image, where) for image in images)
        return PromptImages(
            short_ids=self.short_ids(text),
            pictures=pictures,
            digests=_digests_of(images),
            inputs=lambda copies: self._inputs([list(pictures)] * copies),
        )

    def inputs(self, images: Sequence[bytes]) -> Mapping[str, Any]:
        """Return the tensors that the forward pass of one pack takes, whose images come in this order."""
        # The rollouts of a group have the same ones.
        pictures = {image: picture_of(image, "a group") for image in set(images)}
        return self._inputs([[pictures[image] for image in images]])

    def _inputs(self, pictures: list[list[Any]]) -> Mapping[str, Any]:
        found = self._of_images(pictures, return_tensors="pt")
        return {name: found[name] for name in self._of_images.model_input_names}


class LearnerImages:
    """Images on one rank of the learner: those of a group, and the tensors of a micro-batch."""

    def __init__(self, config: Config) -> None:
        """Read the rows and load the processor. Raises DataError."""
        assert config.data.images_key is not None, "without it there is nothing to read"
        self._key = config.data.images_key
        train = load_parts(config.data, config.data.train)
        self._rows = Rows.joined(train)
        self._plan = make_mixture(config.data, [len(rows) for rows in train], seed=config.run.seed)
        self._processor = ImageProcessor(config.model)
        self.inputs = self._processor.inputs
        blank = BytesIO()
        from PIL import Image

        Image.new("RGB", (64, 64), (255, 255, 255)).save(blank, "PNG")
        # Stands in a micro-batch without images: with shards, each rank must run the same parts of the model.
        self.blank = blank.getvalue()
        self.blank_ids = np.array(
            self._processor.ids(self._processor.image_token, [self.blank], "blank"), dtype=np.int32
        )

    def fault(self, group: Group) -> str | None:
        """Return why a group must not be trained, or None."""
        try:
            self.of(group)
        except DataError as error:
            return f"image_changed: {error}"
        token = self._processor.image_token_id
        if any((rollout.response_ids == token).any() for rollout in group.rollouts):
            # The learner would take it for the placeholder of an image.
            return f"image_token_sampled: a response has token {token}, the placeholder of images"
        return None

    def of(self, group: Group) -> tuple[bytes, ...]:
        """Return the images of a group's row. Raises DataError if the generator has read others."""
        index = self._plan.row(group.ticket_id)
        where = self._rows.place(index)
        images = image_bytes(self._rows[index], self._key, where, self._rows.directory(index))
        recorded = group.recorded.get(DIGESTS, np.zeros(0, dtype=np.uint64))
        if not np.array_equal(_digests_of(images), recorded):
            raise DataError(f"{where}: an image is not the one with which {group.generator_id} sampled")
        return images
