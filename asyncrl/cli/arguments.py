"""Arguments that commands share, and the two ways to name a config and its overrides.

asyncrl up task.yaml learner.steps=5      FILE, or --config FILE, and KEY=VALUE
asyncrl up task.yaml --learner.steps=5    as TRL and prime-rl write it, also with a space for the =
asyncrl up task.yaml +learner.steps=5     as Hydra does

Without a file, keys alone are a config: asyncrl up model.path=M data.train=F reward.functions='[math]'
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import asyncrl.config
from asyncrl.errors import ConfigError

# An override in the form of other trainers: a dotted key after a prefix. None of our own options has a dot.
PREFIXED = re.compile(r"(--|\+{1,2})([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
RunArgument = Annotated[
    Path | None, typer.Argument(help="Run directory or name; default: the newest run.", show_default=False)
]
StoreOption = Annotated[str | None, typer.Option(help="Store of a run: redis://, rediss:// or unix:// URL.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The YAML file, given as an option.")
]
# Of a command that gives only keys.
NO_FILE = Path(asyncrl.config.__file__).with_name("no_file.yaml")
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [KEY=VALUE]...",
        help="The YAML file of a run, and the keys to change in it.",
        show_default=False,
    ),
]


def named(text: object) -> str:
    """Return a text in which `NO_FILE` is called the command line."""
    return str(text).replace(str(NO_FILE), "the command line")


def plain_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the command line with every override as KEY=VALUE. Raises ConfigError, also for two configs."""
    if (count := sum(re.match(r"-c|--config(=|$)", word) is not None for word in arguments)) > 1:
        cure = "its key `extends` names files that it is merged onto"
        raise ConfigError(f"found `--config` {count} times; allowed is one YAML file; {cure}")
    rest, plain = list(arguments), []
    while rest:
        word = rest.pop(0)
        found = PREFIXED.fullmatch(word)
        if found is None:
            plain.append(word)
            continue
        prefix, key, value = found.groups()
        follows = bool(rest) and "=" not in rest[0] and not re.match(r"-(?![\d.])", rest[0])
        if value is None and prefix == "--" and follows:
            value = rest.pop(0)
        if value is None:
            raise ConfigError(f"override `{word}`  found no value; write for example `{key}=VALUE`")
        plain.append(f"{key}={value}")
    return plain


def config_and_overrides(words: Sequence[str] | None, config: Path | None) -> tuple[Path | None, list[str]]:
    """Return the config file and the overrides. Raises ConfigError for two files."""
    given = list(words or ())
    # `os.path.isfile`, since an override may be longer than a path can be, on which `Path.is_file` raises.
    files = [word for word in given if "=" not in word or os.path.isfile(word)]
    overrides = [word for word in given if word not in files]
    if config is None and files:
        config = Path(files.pop(0))
    if files:
        raise ConfigError(
            f"found `{files[0]}` in addition to the config {config}; allowed are one YAML file and overrides "
            f"KEY=VALUE, such as `learner.steps=200`; leave it out, or write `{files[0]}=VALUE`"
        )
    return config, overrides


def required_config(words: Sequence[str] | None, config: Path | None) -> tuple[Path, list[str]]:
    """Call `config_and_overrides` for a command that needs a config. Raises ConfigError without one.

    With keys alone, the file is one that has hardly any.
    """
    file, overrides = config_and_overrides(words, config)
    if file is None and overrides:
        return NO_FILE, overrides
    if file is None:
        here = sorted(str(path) for path in [*Path().glob("*.y*ml"), *Path("configs").glob("*.yaml")])[:5]
        hint = f"here are {', '.join(here)}" if here else "docs/own-task.md shows how to write one"
        raise ConfigError(
            "found no config; give the YAML file of a run, or keys such as model.path=DIRECTORY "
            f"data.train=FILE; {hint}"
        )
    return file, overrides
