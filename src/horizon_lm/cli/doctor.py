"""``horizon-lm doctor``: benchmark this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.outputs import file_to_write
from horizon_lm.errors import ConfigError

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
    import json
    from dataclasses import asdict

    from horizon_lm.planning.arithmetic.catalog import own_profile_path
    from horizon_lm.tools.doctor.profile import check_folder, check_writable, write_profile

    given_path = None if output is None else file_to_write(output, "the profile is JSON", ".json")
    path = None if no_save else given_path or own_profile_path()
    check_folder(folder)
    if path is not None:
        check_writable(path)
    from horizon_lm.common.other_programs import CoreUse, cores_of_others, missing_cores
    from horizon_lm.engine.opening.options import open_device
    from horizon_lm.runs.training.setup import choose_device
    from horizon_lm.tools.doctor.machine import describe_machine
    from horizon_lm.tools.doctor.profile import describe_profile, measure_machine, section
    from horizon_lm.tools.doctor.timing import Rounds

    name = choose_device(device)
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device: {device}: choose auto, cpu, cuda or cuda:N")
    machine = describe_machine(open_device(name), folder)
    _log("measuring for about a minute; please stop other programs")
    began = CoreUse.now()
    rounds = Rounds(seconds=0.02, at_least=2, quick=True) if quick else Rounds()
    hardware = measure_machine(lambda: open_device(name), folder, rounds, _log)
    uses = [CoreUse.now().since(began)]  # of one process
    busy = cores_of_others(uses)
    machine["machine"]["other programs"] = f"{busy:.1f} cores during the measurement"
    if path is not None:
        write_profile(hardware, path)
    if as_json:
        print(json.dumps({"profile": asdict(hardware), "machine": machine, "saved": path and str(path)}, indent=2))
    else:
        for title, facts in machine.items():
            print(section(title, facts.items()))
        print(section(hardware.name, describe_profile(hardware)))
        print(f"profile: {path}" if path is not None else "profile: not written")
    if missing_cores(uses) > _SPARE_CORES:
        _log(f"warning: other programs used {busy:.1f} cores, so the figures are too low; stop them and measure again")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
