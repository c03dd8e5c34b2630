"""Find the largest known models that a machine can train."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from horizon_lm.cli.common import run_arguments
from horizon_lm.cli.plan_arguments import Size, machine_of, read_amounts
from horizon_lm.cli.planned_run import own_shard, place_run
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.errors import ConfigError
from horizon_lm.model.known_models import KnownModel, known_models
from horizon_lm.model.routed_experts import num_experts
from horizon_lm.planning.arithmetic.host_memory import SAVED_BYTES
from horizon_lm.planning.arithmetic.request import Machine
from horizon_lm.runs.admission.inputs import Source, open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.load import parse_overrides, read_run_config

# The settings of each mode, as on the command line.
MODES = {
    "fp32_master": "--precision fp32_master --moments float32 --update_in_backward false",
    "bf16": "--precision bf16 --moments float32 --update_in_backward false",
    "bf16, 8-bit moments, in backward": "--precision bf16 --moments 8bit --update_in_backward true --max_grad_norm 0",
    "adapters, 4-bit base": r"--use_peft true --lora_target_modules .*attn\.\w*proj\w* --load_in_4bit true",
}


def plan_largest(
    arguments: Sequence[str],
    device: str | None,
    host_memory: str | None,
    size: Size,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the largest known models that this machine or another machine can train, by host memory and mode, as JSON values.

    Args:
        arguments: settings of the run except its model.
        device: ``--device`` of the command.
        host_memory: one or more amounts, separated by commas; None for this machine's.
        size: number of processes.
        progress: called with a line about each search.
    """
    path, overrides = run_arguments(arguments)
    of_modes = {mode: [*settings.split(), "--model_name_or_path", "-"] for mode, settings in MODES.items()}
    chosen = {name for settings in of_modes.values() for name in parse_overrides(settings)}
    if given := sorted(chosen & parse_overrides(overrides).keys()):
        raise ConfigError(f"--largest tries all models and modes; remove --{given[0]}")
    hardware, overrides = machine_of(device, overrides)
    amounts: Sequence[tuple[str | None, int | None]] = read_amounts(host_memory) or [(None, None)]
    runs = {
        mode: read_run_config(path, [*overrides, *settings], without_rows=True) for mode, settings in of_modes.items()
    }
    search = _Search()
    rows: list[dict[str, Any]] = []
    for amount, num_bytes in amounts:
        largest: dict[str, list[dict[str, Any]]] = {}
        for mode, run in runs.items():
            progress(f"planning... {len(rows) * len(MODES) + len(largest) + 1} of {len(amounts) * len(MODES)}: {mode}")
            limited = run if num_bytes is None else run.model_copy(update={"host_memory": num_bytes})
            placed, machine = place_run(limited, hardware, size)
            models = search.largest(placed, machine, size)
            largest[mode] = [{"name": known.name, "parameters": known.parameters} for known in models]
        limit = machine.host_limits[0]  # of a machine that is the same in all modes
        rows.append({"host_memory": amount or f"{format_bytes(limit.bytes)} ({limit.name})", "largest": largest})
    # All modes have the same steps, so the last one's are shown.
    step = f"{counted(run.rows_per_step * size.num_ranks, 'row')} of {run.max_length:,} tokens"
    return {"machine": machine.name, "step": step, "rows": rows}


def largest_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `plan_largest` returns as lines of Markdown."""
    yield f"Largest known models by host memory, on {table['machine']}, steps of {table['step']}:"
    yield ""
    yield f"| host memory | {' | '.join(f'`{mode}`' if ',' not in mode else mode for mode in MODES)} |"
    yield "|---" * (len(MODES) + 1) + "|"
    for row in table["rows"]:
        names = [[each["name"].rpartition("/")[2] for each in found] for found in row["largest"].values()]
        yield f"| {row['host_memory']} | {' | '.join(', '.join(each) or 'none' for each in names)} |"


class _Search:
    """A search for the largest models that fit. Each model is outlined only once."""

    def __init__(self) -> None:
        self._known = list(reversed(known_models()))
        self._sources: dict[tuple[str, bool], Source] = {}

    def largest(self, run: RunConfig, machine: Machine, size: Size) -> list[KnownModel]:
        """Return the largest dense model that fits, and the largest mixture of experts if it is larger."""
        found: list[KnownModel] = []
        shard = own_shard(run, size)
        for known in self._known:
            if _least_bytes(run, known.parameters) // shard.count > machine.host_limits[0].bytes:
                continue
            # Adapters are trained on quantized weights as they were published; all weights can only be trained once they are decoded.
            decoded = known.quantization is not None and not run.use_peft
            run = run.model_copy(update={"model_name_or_path": known.name, "dequantize": decoded})
            source = self._open(run)
            # A mixture that fits is listed beside the largest dense model, so after it only a dense model is sought.
            is_mixture = bool(num_experts(source.config.get_text_config()))
            if is_mixture and found:  # models are tried from the largest on
                continue
            plan = plan_run(
                run, source, machine, priced=False, shard=shard, num_ranks=size.num_ranks, counts_files=False
            )
            if plan.fits:
                found.append(known)
                if not is_mixture:
                    return found
        return found

    def _open(self, run: RunConfig) -> Source:
        """Return the model of a run, opened once."""
        key = (run.model_name_or_path, run.use_peft)
        if key not in self._sources:
            self._sources[key] = open_source(run)
        return self._sources[key]


def _least_bytes(run: RunConfig, parameters: int) -> int:
    """Return a lower bound of the host memory that a run needs, to rule out most models without planning them."""
    if run.use_peft:
        return parameters // 2  # codes of 4 bits
    moments = OPTIMIZERS[run.optim].moment_bytes(run.moments)
    return parameters * (SAVED_BYTES[run.precision] + moments + (0 if run.update_in_backward else 2))
