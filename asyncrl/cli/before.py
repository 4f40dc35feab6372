"""Commands for before a run: they start nothing of it."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import Overrides

app = typer.Typer()


@app.command()
def validate(config: Annotated[Path, typer.Argument()], overrides: Overrides = None) -> None:
    """Check a config: all mistakes at once, without loading a model."""
    from asyncrl.config.load import check_files, load_config

    check_files(load_config(config, overrides or []))
    typer.echo(f"{config}: fine")


@app.command()
def warmup(directory: Path, seed: int = 0) -> None:
    """Build the quick-start model: tiny, and barely able to add two numbers."""
    from asyncrl.launch.warmup import build_quickstart

    build_quickstart(directory, seed=seed, report=typer.echo)
