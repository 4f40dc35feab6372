"""docs/models.md says what a miniature of each architecture shows."""

import pytest

from asyncrl.trainer.miniature import AGREES
from tests.support.architectures import NAMES, judged, rows


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_is_found(name: str) -> None:
    (verdict, nats, why), row = judged(name), rows()[name]
    assert (verdict, why) == (row["verdict"], row["why"])
    if verdict == "right":
        assert nats < AGREES
        assert float(row["nats"]) < AGREES
    elif nats is not None:
        assert nats == pytest.approx(float(row["nats"]), rel=0.2)
        assert nats > 10 * AGREES
