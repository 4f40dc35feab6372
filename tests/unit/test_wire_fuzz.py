"""A few seconds of reliability/fuzz/fuzz_frames.py: lies under a valid checksum only ever give WireErrors."""

import re
import resource

import pytest

from asyncrl.errors import WireError
from asyncrl.wire.group_frames import decode_group
from reliability.fuzz.frame_cases import Seen, case_of, check, corpus, frame_of, mutants


def test_cases_are_frames():
    for case in corpus()[:-1]:
        assert case_of(frame_of(case)) == case
        seen = Seen()
        check(case, seen)
        assert (seen.accepted, seen.refused) == (1, 1), "a group or a message, never both"


@pytest.mark.parametrize("seed", range(2))
def test_mutants_are_accepted_in_order_or_refused_as_wire_errors(seed):
    seen, before_kib = Seen(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in mutants(seed, 4000):
        check(case, seen)
    assert seen.accepted > 10 and seen.refused > 4000, seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


def test_the_checks_behind_the_checksum_are_reached():
    refusals = set()
    for case in mutants(99, 3000):
        try:
            decode_group(frame_of(case))
        except WireError as error:
            refusals.add(re.sub(r"\W.*", "", str(error).replace("the ", "")) + str(error)[-12:])
    assert not any("checksum" in refusal for refusal in refusals)
    assert len(refusals) > 30, refusals
