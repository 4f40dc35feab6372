"""Each mutant of reliability/mutation still finds the code that it breaks."""

from reliability.mutation.mutate import MUTANTS, ROOT, mutate


def test_every_mutant_matches() -> None:
    for mutant in MUTANTS:
        text = mutant.file(ROOT).read_text()
        assert mutate(text, mutant) != text
