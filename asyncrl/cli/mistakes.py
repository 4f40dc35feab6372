"""Turns the error of a command into a message and an exit status: a mistake of the user, or a fault of
ours."""

import difflib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from asyncrl.errors import AsyncRLError
from asyncrl.files import CURES, with_cure

FAULT, MISTAKE = 1, 2  # exit statuses; `doctor` and `reward test` return FAULT too, if a check failed
# The error of typer for a wrong command line: click's class, or the one of the click that newer releases
# contain.
USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def explain(error: Exception, arguments: Sequence[str]) -> int:
    """Print the error on standard error and return the exit status."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(str(error).strip(), err=True, nl=False)  # with rich, typer has shown the help already
        return MISTAKE
    if isinstance(error, USAGE):
        text = usage_text(error, arguments)
    elif isinstance(error, AsyncRLError):
        text = f"{type(error).__name__}: {error}"
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
    """A wrong command line: what was found, what is allowed, what to do."""
    context, found = error.ctx, str(error.format_message()).rstrip(".")
    command = context.command_path if context else " ".join(["asyncrl", *arguments[:1]])
    allowed = (
        f"`{' '.join(context.get_usage().removeprefix('Usage: ').split())}`"
        if context
        else "what its help shows"
    )
    name = getattr(error, "option_name", None)
    known = (
        [option for one in context.command.params for option in one.opts if option[0] == "-"]
        if context
        else []
    )
    if context and name and name not in known:
        found, allowed = (
            f"found no option `{name}`",
            f"{', '.join([*known, '--help'])}{_meant(name, known) or _key(name)}",
        )
    elif context and (unknown := re.search(r"No such command '([^']*)'", found)):
        commands = list(context.command.commands)
        found, allowed = (
            f"found no command `{unknown[1]}`",
            f"{', '.join(commands)}{_meant(unknown[1], commands)}",
        )
    return f"{command}: {found}; allowed is {allowed}; `{command} --help` says more"


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _key(option: str) -> str:
    """A hint for options such as `--learning_rate`: keys of the config are given as KEY=VALUE."""
    from asyncrl.config.report import meant_keys

    keys = meant_keys(option.lstrip("-"))
    return f"; did you mean `{keys[0]}=VALUE`, which overrides the config?" if keys else ""
