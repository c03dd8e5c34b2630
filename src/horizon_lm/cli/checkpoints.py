"""``horizon-lm checkpoints``: list the checkpoints of a run, and verify their files."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.common import exits
from horizon_lm.common.paths import near_path
from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError, first_line


@exits
def checkpoints(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or one checkpoint.")],
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes only, without reading the files.")] = False,
) -> None:
    from horizon_lm.common.run_folders import MANIFEST, is_checkpoint
    from horizon_lm.runs.checkpoints.manifest import read_manifest, verify

    folders = [folder] if is_checkpoint(folder) else sorted(folder.glob("checkpoint-*"), key=_step)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder{near_path(folder)}")
    if not folders:
        raise ConfigError(f"{folder} has no checkpoints")
    num_damaged = 0
    for path in folders:
        if not is_checkpoint(path):
            print(visible(f"{path.name}  a model without the optimizer's state; a run cannot be resumed from it"))
            continue
        try:
            manifest = read_manifest(path)
            if not quick:
                verify(path, manifest)
        except ConfigError as error:
            num_damaged += 1
            print(visible(f"{path.name}  DAMAGED: {first_line(error)}"))
            continue
        size = format_bytes(manifest.num_bytes)
        written = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        state = "complete" if quick else "verified"
        print(visible(f"{path.name}  step {manifest.step}  {size}  {written}  {manifest.precision}  {state}"))
    if num_damaged:
        raise ConfigError(f"{num_damaged} of {len(folders)} checkpoints in {folder} cannot be used; remove them")


def _step(path: Path) -> tuple[int, str]:
    number = path.name.removeprefix("checkpoint-")
    return (int(number) if number.isdigit() else 0, path.name)
