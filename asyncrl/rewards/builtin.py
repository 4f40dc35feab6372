"""The built-in reward functions. A wrong answer scores 0; a row that cannot be scored raises ValueError.

So does a parameter with which nothing can be scored; `params` of the config are arguments by name.
Functions that look for one answer also return it, in a normal form: equal numbers are equal texts.
"""

import json
import math
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.errors import EnvironmentFault
from asyncrl.sandbox.box import OUTPUT_BYTES, Result, python_result

_NUMBER = re.compile(
    r"(?<![0-9.])[-+\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+\u2212]?\.[0-9]+"
)
_FINAL = re.compile(r"####\s*(" + _NUMBER.pattern + ")")
# Limit of math-verify, by the clock.
_DECISION_S = 5.0
# Seconds for one program of the model.
_PROGRAM_S = 5.0
PYTHON = "python"
# Interpreter -> languages of fenced blocks with its programs, besides its own name.
_LANGUAGES = {
    PYTHON: ("py", "python3"),
    "bash": ("sh", "shell"),
    "node": ("javascript", "js"),
    "perl": ("pl",),
    "ruby": ("rb",),
}
# Python that runs a program of another interpreter. A file that is left in a sandbox would cost the sandbox.
_STARTER = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with open("/tmp/program", "w") as file:
    file.write({program!r})
status = os.spawnlp(os.P_WAIT, {interpreter!r}, {interpreter!r}, "/tmp/program")
os.chmod("/tmp", 0o755)
if os.path.lexists("/tmp/program"):
    os.unlink("/tmp/program")
sys.exit(status != 0)
"""
_BOXED = "\\boxed{"
# More words stand only behind a language: the end of a span within a line begins no block.
_FENCED = re.compile(r"```(?:([\w+-]+)[^\n`]*|\{[^\n`]*|[ \t]*)\n(.*?)```", re.DOTALL)
_CHOICES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\boxed\{\s*(?:\\text\{)?\(?([A-J])\)?\.?\}?\s*\}",
        # Possessive: much white space would otherwise be split in all ways. `I think` is not a choice.
        r"(?i:answer(?:\s+is)?+)\s*+:?\s*+(?:\*\*)?\(?"
        r"(?!I['\u2019]|I (?!because|since|as |is )[a-z])([A-J])\)?(?![A-Za-z])",
        r"\(([A-J])\)",
        r"(?<![A-Za-z'])([A-J])(?=[\s.):]*$)",
    )
)


def known(answer: object) -> str:
    """Column `answer` as text; pandas makes 46.0 of 46. Raises ValueError for what is no text or number."""
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer) if answer.is_integer() else answer)
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        found = "null" if answer is None else f"a {type(answer).__name__}, {str(answer)[:80]!r}"
        raise ValueError(f"column `answer` is {found}; make text of it by data.map, or write a function")
    return str(answer)


def exact_match(prompt: str, response: str, answer: object) -> tuple[float, str]:
    """1 if the response equals the column `answer`, apart from surrounding white space."""
    return float(response.strip() == known(answer).strip()), response.strip()


def arithmetic(prompt: str, response: str, answer: object) -> tuple[float, str | None]:
    """1 if the first number of the response equals the number in column `answer`."""
    expected = str(answer).strip()
    if not _NUMBER.fullmatch(expected):
        raise ValueError(f"column `answer` holds no number: {expected[:80]!r}")
    found = _NUMBER.search(response)
    return _compare(found[0] if found else None, _value(expected))


def gsm8k(prompt: str, response: str, answer: str) -> tuple[float, str | None]:
    """1 if the first number of the last `####`, else of `#### number`, else the last, is that of `answer`."""
    reference = _FINAL.findall(answer)
    if not reference:
        raise ValueError(f"column `answer` holds no `#### number`: {answer[-80:]!r}")
    _, mark, behind = response.rpartition("####")
    line = behind.lstrip().partition("\n")[0] if mark else ""  # only this one: other marks begin headings
    found = _NUMBER.findall(line)[:1] or (_FINAL.findall(response) or _NUMBER.findall(response))[-1:]
    return _compare(found[0] if found else None, _value(reference[-1]))


def words_used(prompt: str, response: str, words: Sequence[str]) -> float:
    """Share of the column `words` that the response uses as whole words, plural included, in any case."""
    if isinstance(words, str) or not words:
        raise ValueError(f"column `words` must be a list of at least one word, found {words!r}")
    used = [re.search(rf"(?<!\w){re.escape(word)}(s|es)?(?!\w)", response, re.IGNORECASE) for word in words]
    return sum(map(bool, used)) / len(words)


def _compare(found: str | None, expected: Decimal) -> tuple[float, str | None]:
    """The score of the number found in a response, and the number without exponent, -0 and trailing zeros."""
    if found is None:
        return 0.0, None
    value = _value(found)
    text = f"{value:f}" if value else "0"
    return float(value == expected), text.rstrip("0").rstrip(".") if "." in text else text


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", "").replace("\u2212", "-"))


def maths(prompt: str, response: str, answer: object) -> tuple[float, str | None]:
    """1 if the last mathematical answer of the response equals column `answer`, by math-verify.

    Both may be LaTeX: fractions, sets, intervals, percentages and units are compared as such. The answer of a
    row may end in `#### answer`, as in GSM8K. What math-verify cannot decide within 5 seconds is not equal.
    Raises TimeoutError if other work on the machine took these seconds.
    """
    from math_verify import parse, verify

    started_s, used_s = time.monotonic(), time.process_time()

    def require_time() -> None:
        own_s = time.process_time() - used_s
        if time.monotonic() - started_s >= _DECISION_S > 4 * own_s:
            left = f"{own_s:.1f} s of {_DECISION_S:g} s"
            raise TimeoutError(f"the machine left math-verify {left} for an answer")

    text = known(answer).rpartition("####")[2].strip()
    expected = parse(text if _BOXED in text else f"{_BOXED}{text}}}", raise_on_error=False)
    if not expected:
        require_time()
        raise ValueError(f"column `answer` holds no mathematical answer: {text[:80]!r}")
    found = parse(_answered(response), raise_on_error=False)
    score = float(verify(expected, found, raise_on_error=False)) if found else 0.0
    if not score:
        require_time()
    return score, _normal_form(found[0]) if found else None


def _answered(response: str) -> str:
    """The content of the last `<answer>…</answer>`, else the whole response."""
    _, opened, content = response.rpartition("</answer>")[0].rpartition("<answer>")
    return content.partition("</answer>")[0] if opened else response


def _normal_form(found: Any) -> str:
    """A text that is equal for equal numbers: an exact fraction, else 12 digits."""
    import sympy

    if not isinstance(found, sympy.Expr) or not found.is_number:
        return str(found)
    exact = sympy.nsimplify(found, rational=True) if found.is_rational or found.is_Float else None
    return str(exact if exact is not None else sympy.N(found, 12))


def boxed(prompt: str, response: str, answer: object) -> tuple[float, str | None]:
    r"""1 if the content of the last `\boxed{}` equals column `answer`, apart from white space."""
    expected = known(answer)
    _, _, inside = response.rpartition(_BOXED) if _BOXED in response else ("", "", "")
    found, depth = None, 1
    for end, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            found = inside[:end].strip()
            break
    return float(found is not None and found.split() == expected.split()), found


def choice(prompt: str, response: str, answer: str) -> tuple[float, str | None]:
    r"""1 if the letter that the response chooses is that of column `answer`.

    The first that occurs counts, where it is last: `\boxed{B}`, `answer is B`, `(B)`, a letter at the end.
    """
    expected = str(answer).strip().strip("().").upper()
    if not re.fullmatch("[A-J]", expected):
        raise ValueError(f"column `answer` holds no letter from A to J: {str(answer)[:80]!r}")
    text = _answered(response).strip()
    found = next((letters[-1] for one in _CHOICES if (letters := one.findall(text))), None)
    return float(found == expected), found


def json_schema(prompt: str, response: str, schema: Mapping[str, Any] | str) -> float:
    """1 if the response, or its last fenced block, is JSON that satisfies column or parameter `schema`."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    wanted = json.loads(schema) if isinstance(schema, str) else schema
    kind = validator_for(wanted)
    try:
        kind.check_schema(wanted)
    except SchemaError as error:
        raise ValueError(f"`schema` is no JSON schema: {error.message}") from error
    try:
        text = [response, *(text for _, text in _FENCED.findall(response))][-1]
        # `int` refuses NaN and Infinity, which are no JSON.
        found = json.loads(text, parse_constant=int)
    except (ValueError, RecursionError):
        return 0.0
    with suppress(OverflowError, RecursionError):
        return float(kind(wanted).is_valid(found))
    return 0.0


def tags(prompt: str, response: str, names: tuple[str, ...] = ("think", "answer")) -> float:
    """1 if the response consists of the elements `names`, each once, in order: `<think>…</think>` …"""
    body = r"\s*".join(rf"<{re.escape(name)}>(?:.*?)</{re.escape(name)}>" for name in names)
    is_once = all(response.count(f"<{'/' * end}{name}>") == 1 for name in names for end in (0, 1))
    return float(is_once and re.fullmatch(rf"\s*{body}\s*", response, re.DOTALL) is not None)


def pattern(prompt: str, response: str, regex: str) -> float:
    """1 if the regular expression `regex` matches the whole response; `.` also matches line ends."""
    return float(re.fullmatch(regex, response, re.DOTALL) is not None)


def length(prompt: str, response: str, response_tokens: int, target: int, most: int | None = None) -> float:
    """0 up to `target` tokens, then falling along half a cosine to -1 at `most` (twice the target)."""
    limit = 2 * target if most is None else most
    if not 0 < target < limit:
        raise ValueError(f"`target` is {target} and `most` {limit}; 0 < target < most is needed")
    share = min(max((response_tokens - target) / (limit - target), 0.0), 1.0)
    return (math.cos(math.pi * share) - 1) / 2


def repetition(prompt: str, response: str, n: int = 3) -> float:
    """Minus the share of runs of `n` words that repeat an earlier one (arXiv:2502.03373)."""
    if n < 1:
        raise ValueError(f"`n` is {n}; n >= 1 is needed")
    words = response.lower().split()
    runs = Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))
    return len(runs) / runs.total() - 1 if runs else 0.0


def code(
    prompt: str, response: str, tests: list[Any], share: bool = False, interpreter: str = PYTHON
) -> float:
    """1 if the program of the response passes column `tests`; with `share` the share that passes.

    A test is `{input, output}` of standard input and output, or Python that raises where the program is
    wrong, such as `assert f(2) == 4`, and runs behind the program. The program is the last fenced block of
    the response in the language of `interpreter`, else the last that names no language, else the last block,
    else all of it. Each test runs in a sandbox of its own for at most 5 seconds. Raises EnvironmentFault for
    an interpreter that does not run there.
    """
    if not isinstance(tests, list) or not tests:
        raise ValueError("column `tests` must be a list of at least one test")
    name = Path(interpreter).name
    bare = name.rstrip("0123456789.-")  # of python3.12, for example
    family = next(({key, *others} for key, others in _LANGUAGES.items() if bare in (key, *others)), {bare})
    blocks = [(language.lower(), text) for language, text in _FENCED.findall(response)]
    kinds = ({name, *family}, {""}, {language for language, _ in blocks})
    found = [text for kind in kinds[::-1] for language, text in blocks if language in kind]
    program = found[-1] if found else response
    passed = (_passes(program, test, interpreter) for test in tests)
    return sum(passed) / len(tests) if share else float(all(passed))


def _passes(program: str, test: Any, interpreter: str) -> bool:
    if isinstance(test, str):
        if interpreter != PYTHON:
            found = f"a test of {interpreter} has `input` and `output`, found {test[:80]!r}"
            raise ValueError(f"{found}; Python text needs a program of Python")
        # Without it, a program that ends before the test would pass.
        proof = secrets.token_hex(16)
        proving = f"{program}\n\n{test}\nimport sys\nsys.stderr.write({proof!r})\n"
        result = python_result(proving, seconds=_PROGRAM_S)
        return result.status == "ok" and result.stderr.endswith(proof)
    if not isinstance(test, Mapping) or "input" not in test or test.get("output") is None:
        raise ValueError(f"a test is Python text or has `input` and `output`, found {str(test)[:80]!r}")
    expected = str(test["output"])
    if len(expected.encode()) > OUTPUT_BYTES:
        kept = f"{OUTPUT_BYTES >> 10} KiB, which is what is kept of a program's output"
        raise ValueError(f"the `output` of a test has more than {kept}; leave the row out")
    stdin = "" if test["input"] is None else str(test["input"])
    result = _result(program, stdin, interpreter)
    if result.status != "ok" and interpreter != PYTHON:
        # The program is wrong only where an empty one ends well.
        empty = _result("", "", interpreter)
        if empty.status != "ok":
            said = empty.stderr.strip()[-200:] or empty.status
            cure = "install it below /usr, of which the sandbox shows the programs"
            raise EnvironmentFault(f"`{interpreter}` runs no program in the sandbox ({said}); {cure}")
    return result.status == "ok" and result.stdout.split() == expected.split()


def _result(program: str, stdin: str, interpreter: str) -> Result:
    started = program if interpreter == PYTHON else _STARTER.format(program=program, interpreter=interpreter)
    return python_result(started, stdin=stdin, seconds=_PROGRAM_S)


# Names in configs.
BUILTINS: dict[str, Callable[..., Any]] = {
    "arithmetic": arithmetic,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "words_used": words_used,
    "boxed": boxed,
    "choice": choice,
    "code": code,
    "format": tags,
    "json_schema": json_schema,
    "length": length,
    "math": maths,
    "regex": pattern,
    "repetition": repetition,
}
# What pip installs for a function.
NEEDS = {"math": "math_verify", "json_schema": "jsonschema"}


def obstacle(name: str, params: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Say what a built-in function with these `params` needs and this machine lacks; empty if nothing."""
    interpreter = str(params.get("interpreter", PYTHON)) if name == "code" else PYTHON
    if interpreter != PYTHON and shutil.which(interpreter) is None:
        return f"`{name}` needs the interpreter `{interpreter}`, which is no program on PATH; install it"
    needed = NEEDS.get(name)
    if needed is None or find_spec(needed) is not None:
        return ""
    return f"`{name}` needs the package {needed}, which is not installed; pip install 'asyncrl[rewards]'"
