"""``horizon-lm doctor``: benchmark this machine."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from horizon_lm.cli import common
from horizon_lm.cli.outputs import file_to_write
from horizon_lm.common.other_programs import CoreUse, cores_of_others, missing_cores
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware, own_profile_path

_SPARE_CORES = 0.2  # that other programs may use without affecting the measurement


@common.exits
def doctor(
    device: common.Device = "auto",
    folder: Annotated[
        Path,
        typer.Option(help="Folder whose disk is measured, with a temporary file of up to a tenth of its free space."),
    ] = Path("."),
    output: Annotated[
        Path | None, typer.Option(help="File to write the profile to.", show_default="where horizon-lm looks for it")
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Do not write the profile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", hidden=True, help="Use tiny sizes, to test the command.")] = False,
) -> None:
    path = own_profile_path() if output is None else file_to_write(output, "the profile is JSON", ".json")
    from horizon_lm.tools.doctor.profile import check_folder, check_writable, table_of_machine, write_profile

    check_folder(folder)
    if not no_save:
        check_writable(path)
    facts, hardware, use = _measure(device, folder, quick)
    busy = cores_of_others([use])
    facts["machine"]["other programs"] = f"{busy:.1f} cores during the measurement"
    if not no_save:
        write_profile(hardware, path)
    saved = None if no_save else str(path)
    if as_json:
        print(json.dumps({"profile": asdict(hardware), "machine": facts, "saved": saved}, indent=2))
    else:
        print("\n".join(table_of_machine(facts, hardware)))
        print(f"profile: {saved or 'not written'}")
    if missing_cores([use]) > _SPARE_CORES:
        _log(f"warning: other programs used {busy:.1f} cores, so the figures are too low; stop them and measure again")


def _measure(device: str, folder: Path, quick: bool) -> tuple[dict[str, Any], Hardware, CoreUse]:
    """Measure this machine.

    Args:
        device: the option of the command; raises ConfigError if it names no device.
        folder: folder on the disk to measure.
        quick: use tiny sizes.

    Returns:
        Facts about the machine, by section; its profile; and the processor time that the measurement took.
    """
    from horizon_lm.engine.opening.options import open_device
    from horizon_lm.runs.training.setup import choose_device
    from horizon_lm.tools.doctor.machine import describe_machine
    from horizon_lm.tools.doctor.profile import measure_machine
    from horizon_lm.tools.doctor.timing import Rounds

    name = choose_device(device)
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device: {device}: choose auto, cpu, cuda or cuda:N")
    facts = describe_machine(open_device(name), folder)
    _log("measuring for about a minute; please stop other programs")
    began = CoreUse.now()
    rounds = Rounds(seconds=0.02, at_least=2, quick=True) if quick else Rounds()
    hardware = measure_machine(lambda: open_device(name), folder, rounds, _log)
    return facts, hardware, CoreUse.now().since(began)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
