"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path | None, typer.Argument(help="Run directory or name; default: the newest run.", show_default=False)]
StoreOption = Annotated[str | None, typer.Option(help="Store of a run: redis://, rediss:// or unix:// URL.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts.")]
