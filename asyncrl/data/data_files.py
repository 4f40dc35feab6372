"""The rows that a config names, as far as processes need them that render no prompts."""

from functools import cached_property

from asyncrl.config.schema import Config
from asyncrl.data.dataset import Rows, fingerprint_of, fingerprints, load_rows, load_train


class DataFiles:
    """Number and fingerprint of the rows that a config names.

    Each file is read once, when its property is first used; that raises DataError. No row is kept.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def train(self) -> str:
        """Fingerprint of data.train."""
        return self._train[1]

    @property
    def train_rows(self) -> list[int]:
        """Number of rows in each source of data.train."""
        return self._train[0]

    @property
    def held_out_rows(self) -> int:
        """Number of rows in data.eval; 0 without one."""
        return self._held_out[0] if self._held_out else 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of both, which must be the same in generators."""
        return fingerprints(self.train, self._held_out and self._held_out[1])

    @cached_property
    def _train(self) -> tuple[list[int], str]:
        data = self._config.data
        rows = self._without_long[0] if self._drops else load_train(data)
        return [len(part) for part in rows], fingerprint_of(data, rows)

    @cached_property
    def _held_out(self) -> tuple[int, str] | None:
        data = self._config.data
        if data.eval is None:
            return None
        rows = self._without_long[1] if self._drops else load_rows(data.eval, data.eval_split)
        return (len(rows), rows.fingerprint) if rows else None

    @property
    def _drops(self) -> bool:
        return self._config.data.long_prompts == "drop"

    @cached_property
    def _without_long(self) -> tuple[list[Rows], Rows | None]:
        # Only a tokenizer tells which rows are left; it is slow to import.
        from asyncrl.data.prompts import PromptSource

        config = self._config
        source = PromptSource(config.data, config.model, config.sampling, seed=config.run.seed)
        return source.rows, source.held_out
