"""The rows that a config names, as far as processes need them that render no prompts."""

from functools import cached_property
from typing import TYPE_CHECKING

from asyncrl.config.resolved import eval_digest
from asyncrl.config.schema import Config
from asyncrl.data.dataset import fingerprint_of, fingerprints
from asyncrl.data.row_functions import load_parts

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptSource
    from asyncrl.data.sample_plan import Mixture


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

    def row(self, ticket_id: int) -> int:
        """Return the row of a ticket, counted over the sources of data.train, while no row is skipped."""
        return self._mixture.row(ticket_id)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of both, which must be the same in generators."""
        return fingerprints(self.train, [fingerprint for _, fingerprint in self.held_out])

    @cached_property
    def _train(self) -> tuple[list[int], str]:
        source, data = self._without_long, self._config.data
        rows = source.rows if source else load_parts(data, data.train)
        return [len(part) for part in rows], fingerprint_of(data, rows)

    @cached_property
    def _mixture(self) -> "Mixture":
        from asyncrl.data.sample_plan import make_mixture  # it imports NumPy

        return make_mixture(self._config.data, self.train_rows, seed=self._config.run.seed)

    @cached_property
    def held_out(self) -> list[tuple[int, str]]:
        """Number and fingerprint of the rows of each set of data.eval."""
        source, data = self._without_long, self._config.data
        sets = source.held_out if source else load_parts(data, data.eval)
        return [(len(rows), rows.fingerprint) for rows in sets]

    def asked(self, metric: str) -> str:
        """Return digest and rows of the evaluation that has a metric; empty for a metric of steps."""
        if (task := self._config.data.set_of(metric)) is None:
            return ""
        return f"{eval_digest(self._config, task)} {self.held_out[self._config.data.eval.index(task)][1]}"

    @cached_property
    def _without_long(self) -> "PromptSource | None":
        if self._config.data.long_prompts != "drop":
            return None
        # Only a tokenizer tells which rows are left; it is slow to import.
        from asyncrl.data.prompts import PromptSource

        return PromptSource.of(self._config)
