from itertools import pairwise

from asyncrl.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_stay_there():
    backoff = Backoff(0.5, 15.0)
    pauses = [backoff.pause_s(failures) for failures in range(1, 2000)]
    assert pauses[0] == 0.5 and pauses[-1] == 15.0
    assert all(later == min(2 * earlier, 15.0) for earlier, later in pairwise(pauses))
