"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, over what the file says.", show_default=False)]
RunArgument = Annotated[Path | None, typer.Argument(help="Run directory or name; default: the newest run.", show_default=False)]
StoreOption = Annotated[str | None, typer.Option(help="Store of a run: redis://, rediss:// or unix:// URL.")]
