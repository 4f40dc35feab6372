"""What the log of a dead process is worth in one line."""

import traceback
from pathlib import Path

import pytest

from asyncrl.hosting.deaths import Deaths, last_error, last_message

VLLM = """\
(EngineCore pid=71) ERROR 11-22 12:00:00 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-22 12:00:00 [core.py:1100]   File "x.py", line 1
(EngineCore pid=71) ERROR 11-22 12:00:00 [core.py:1100] torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found
(EngineCore pid=71) ERROR 11-22 12:00:00 [core.py:1100] torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++
2026-11-22 12:00:01.000 ERROR   g0 v- asyncrl.launch.roles: ended by an error
Traceback (most recent call last):
asyncrl.errors.EngineError: vLLM did not start with model 'm' on cpu: Engine core initialization failed. See root cause above.
[rank0]:[W1122 12:00:02] Warning: destroy_process_group() was not called
"""


GROUP = ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("why")])])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("only\nthis\n\n", "this"),
        ("Traceback\nValueError: no\n", "ValueError: no"),
        ("a.b.CError: one\nDError: two\nmore noise\n", "DError: two"),
        ("\x1b[31mRuntimeError: red\x1b[0m\n", "RuntimeError: red"),
        (
            "2026-01-01 00:00:00.000 ERROR   g0 v- asyncrl.launch.roles: DataError: t.jsonl:3: no\n",
            "DataError: t.jsonl:3: no",
        ),
        ("Error: a word\n", "Error: a word"),
        ("KError: " + "x" * 1000, "KError: " + "x" * 392),
        ("".join(traceback.format_exception(GROUP)), "ValueError: why"),
    ],
)
def test_the_last_error_is_the_cause(text, words):
    assert last_error(text) == words[:400]


def test_an_error_that_points_back_is_told_with_the_first():
    assert last_error(VLLM) == (
        "EngineError: vLLM did not start with model 'm' on cpu: Engine core initialization failed. See "
        "root cause above. (first: InductorError: InvalidCxxCompiler: No working C++)"
    )


RANKS = """\
2026-11-23 23:20:03.263 ERROR   learner v0 asyncrl.launch.roles: {error}
[rank0]: Traceback (most recent call last):
[rank0]:   File "asyncrl/launch/learner_process.py", line 211, in <module>
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:58595. GLHF!
"""


def test_the_rank_that_knows_the_cause_is_quoted_and_not_those_that_lost_it():
    text = RANKS.format(error="MemoryFullError: rank 1 was at 'train'\n  lower this")
    text += 40 * "[rank0]:   File\n"
    assert last_message(text) == "MemoryFullError: rank 1 was at 'train'\n  lower this"
    assert last_error(RANKS.format(error="CheckpointError: no disk")) == (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:58595. GLHF! "
        "(first: CheckpointError: no disk)"
    )


def test_every_life_has_its_own_words_and_those_in_a_row_are_counted(tmp_path: Path):
    path = tmp_path / "g0.out"
    path.write_text("OldError: of the run before\n")
    deaths = Deaths(path)

    def die(text: str) -> tuple[str, int]:
        with path.open("a") as file:
            file.write(text)
        return deaths.note(), deaths.in_a_row

    assert die("") == ("", 1), "killed before it said a word"
    assert die("AError: port 5001 is taken\n") == ("AError: port 5001 is taken", 1)
    assert die("AError: port 5002 is taken\n") == ("AError: port 5002 is taken", 2)
    assert die("BError: another\n") == ("BError: another", 1)
    assert die("") == ("", 1) and die("") == ("", 1), "silence is not the same fault"
    path.unlink()
    assert die("CError: in a new file\n")[1] == 1


def test_a_message_of_several_lines_is_told_whole():
    before = "noise\n2026-01-01 00:00:00.000 ERROR   learner v- asyncrl.launch.roles: "
    text = "ConfigError: 2 problems in a.yaml\n  a.yaml:1  one\n  a.yaml:2  two"
    assert last_message(f"{before}{text}\n") == text
    assert last_message("no such model\n") == "no such model" and last_message("") == ""
