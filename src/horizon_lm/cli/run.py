"""``horizon-lm run``: run a training script as it is, with its models streamed."""

from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.common import exits
from horizon_lm.cli.plan_arguments import other_hardware
from horizon_lm.common.visible import announced
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware


@exits
def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS...]",
            help="The script and its arguments: horizon-lm run train.py --learning_rate 1e-5",
            show_default=False,
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Stop before the first step, when the plan is printed.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="With --plan: another machine to plan for, by the names of horizon-lm plan --list. Default: this one."
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="With --device: host memory of that machine, such as 128GiB.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of the trained weights in host memory: bf16, fp32_master, float32. "
            "Default: float32 for a model in float32, else fp32_master, or bf16 with an optimizer of other code."
        ),
    ] = None,
    device_memory: common.DeviceMemory = None,
) -> None:
    from horizon_lm.integrations.scripts.script import Script

    if not script:
        raise ConfigError("name a script: horizon-lm run train.py, or horizon-lm run -m trl.scripts.sft")
    name, *arguments = script
    found = Script.of_module(name, arguments) if module else Script.of_file(name, arguments)
    limit = None if device_memory is None else common.read_size("--device-memory", device_memory)
    hardware = _hardware(plan, device, host_memory)
    if precision not in (None, "bf16", "fp32_master", "float32"):
        raise ConfigError(f"--precision {precision}: choose one of bf16, fp32_master, float32")
    with announced("starting..."), common.without_garbage_collection():
        from horizon_lm.integrations.scripts.running import run_script
        from horizon_lm.integrations.scripts.streaming import Options
        from horizon_lm.runs.admission.this_machine import other_machine
    num_bytes = None if host_memory is None else common.read_size("--host-memory", host_memory)
    machine = None if hardware is None else other_machine(hardware, num_bytes)
    run_script(found, Options(plan, precision, limit, machine))


def _hardware(plan: bool, device: str | None, host_memory: str | None) -> Hardware | None:
    """Return the hardware profile to plan for; None for this machine. Raise ConfigError for options that do not go together."""
    if device is None and host_memory is not None:
        raise ConfigError("--host-memory is for the machine that --device names; add --device, or leave it out")
    if device is None:
        return None
    hardware = other_hardware(device)
    if hardware is None:
        raise ConfigError(f"--device {device}: the script chooses the device of this machine; leave it out")
    if not plan:
        raise ConfigError(f"--device {device} is a machine to plan for; add --plan")
    return hardware
