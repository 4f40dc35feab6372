"""Turns the error of a command, a user's mistake or our fault, into a message and an exit status."""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from asyncrl.cli.arguments import named
from asyncrl.config.wording import did_you_mean
from asyncrl.errors import AsyncRLError
from asyncrl.files import CURES, with_cure
from asyncrl.telemetry.text import visible_lines

FAULT, MISTAKE = 1, 2  # exit statuses; `doctor` and `reward test` return FAULT too, if a check failed
# Commands of other programs that do what one of ours does.
ELSEWHERE = {"ps": "status", "sft": "stage"}
ELSEWHERE |= dict.fromkeys(("grpo", "run", "start", "train"), "up") | dict.fromkeys(("kill", "stop"), "down")
# Commands that an earlier release had, and where their results are now.
GONE = {
    "analyze": "curves are in `asyncrl report`, all values in RUN/metrics/*.jsonl and `Run.metrics()`",
    "warmup": "`python examples/pupils.py`, or `python -m asyncrl.examples.pupils`, makes such models",
}
# typer's error for a wrong command line: a class of click, which newer releases of typer contain.
USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def explain(error: Exception, arguments: Sequence[str]) -> int:
    """Print the error on standard error and return the exit status."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(str(error).strip(), err=True, nl=False)  # with rich, typer has shown the help already
        return MISTAKE
    if isinstance(error, USAGE):
        text = usage_text(error, arguments)
    elif isinstance(error, AsyncRLError):
        text = visible_lines(named(f"{type(error).__name__}: {error}"))
    elif isinstance(error, OSError) and error.errno and error.errno in CURES:
        text = with_cure(error, "the system")
    elif isinstance(error, typer.Abort):
        return MISTAKE
    else:
        traceback.print_exception(error)
        text = f"asyncrl is at fault, not you: {type(error).__name__}. Please report it with the lines above"
        typer.echo(text, err=True)
        return FAULT
    typer.secho(text, fg="red" if sys.stderr.isatty() else None, err=True)
    return MISTAKE


def usage_text(error: Any, arguments: Sequence[str]) -> str:
    """Describe a wrong command line: what was found, what is allowed, what to do."""
    context, found = error.ctx, str(error.format_message()).rstrip(".")
    if not context:
        command, allowed = " ".join(["asyncrl", *arguments[:1]]), "what its help shows"
        return f"{command}: {found}; allowed is {allowed}; `{command} --help` says more"
    command = context.command_path
    allowed = f"`{' '.join(context.get_usage().removeprefix('Usage: ').split())}`"
    name = getattr(error, "option_name", None)
    known = [option for one in context.command.params for option in one.opts if option[0] == "-"]
    if name and name not in known:
        from asyncrl.config.load import meant_keys
        from asyncrl.config.schema import Config

        found = f"found no option `{name}`"
        hint = did_you_mean(name.lower(), known)
        # Keys of the config are given as KEY=VALUE, also those that look like `--learning_rate`.
        if not hint and (keys := meant_keys(Config, name.lstrip("-"))):
            hint = f"; did you mean `{keys[0]}=VALUE`, which overrides the config?"
        allowed = f"{', '.join([*known, '--help'])}{hint}"
    elif unknown := re.search(r"No such command '([^']*)'", found):
        commands = list(context.command.commands)
        found = f"found no command `{unknown[1]}`"
        meant = ELSEWHERE.get(unknown[1].lower())
        hint = f"; did you mean `{meant}`?" if meant else did_you_mean(unknown[1].lower(), commands)
        hint = f"; {GONE[unknown[1]]}" if unknown[1] in GONE else hint
        allowed = f"{', '.join(commands)}{hint}"
    return f"{command}: {found}; allowed is {allowed}; `{command} --help` says more"
