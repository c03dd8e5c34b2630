"""The most important numbers of a run, compared with its plan."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from horizon_lm.common.quantities import Item, counted, format_bytes, format_duration, format_rate, listed
from horizon_lm.runs.run_files import Run, TrainingLine
from horizon_lm.schedule.trace import Trace

_FEW_CORES = 0.5  # that other programs may use without being mentioned


def summarise(run: Run) -> list[Item]:
    """Return the numbers for the top of the page, without unknown ones."""
    lines = [] if run.metrics is None else run.metrics.training
    return [*_losses(run), *_speeds(run, lines), *_other_programs(lines), *_energy(lines), *_memory(run, lines)]


def median_step(trace: Trace) -> tuple[int, float, float] | None:
    """Return number, start and end of the step of median length, or of the shorter of two; None if nothing was traced."""
    by_length = sorted(trace.steps, key=lambda step: step[2] - step[1])  # end minus start
    return by_length[(len(by_length) - 1) // 2] if by_length else None


def _losses(run: Run) -> Iterator[Item]:
    """Yield the last losses, of training and evaluation."""
    if run.metrics is None:
        return
    if run.metrics.losses:
        step, loss = run.metrics.losses[-1]
        num_steps = None if run.plan is None else run.plan.run.num_steps
        name, of_all = "Final training loss", ""
        if num_steps is not None and step < num_steps:
            name, of_all = "Last training loss", f" of {num_steps:,}"
        yield Item(name, loss, "{:.4f}".format, f"step {step:,}{of_all}; first {run.metrics.losses[0][1]:.4f}")
    if run.metrics.evaluations:
        first, last = run.metrics.evaluations[0], run.metrics.evaluations[-1]
        if last is first:
            yield Item("Eval loss", last.eval_loss, "{:.4f}".format, f"step {last.step:,}")
        else:
            change = f"{first.eval_loss:.4g} → {{:.4g}}".format
            yield Item("Eval loss", last.eval_loss, change, f"before → after {counted(last.step, 'step')}")


def _speeds(run: Run, lines: Sequence[TrainingLine]) -> Iterator[Item]:
    """Yield the speed and the time of a step, compared with the planned ones."""
    planned = None if run.plan is None else run.plan.step
    planned_rate, planned_seconds = (None, None) if planned is None else (planned.tokens_per_second, planned.seconds)
    if lines:
        # Without the first line, like the time of a step: its step has warmed up.
        speed = median(line.tokens_per_second for line in lines[1:] or lines)
        yield from _compared("Tokens per second", speed, format_rate, "median", "predicted", planned_rate)
    seconds, source = None if run.metrics is None else run.metrics.step_seconds, "median"
    if seconds is None and run.measured is not None and (step := median_step(run.measured)) is not None:
        _, start, end = step
        seconds, source = end - start, "median of traced steps"
    yield from _compared("Step", seconds, format_duration, source, "predicted", planned_seconds)


def _other_programs(lines: Sequence[TrainingLine]) -> Iterator[Item]:
    """Yield the cores that other programs used during the run, if they were so many that it matters."""
    measured = [line.cores_of_others for line in lines if line.cores_of_others is not None]
    if measured and measured[-1] >= _FEW_CORES:
        note = "on average, which may have slowed the run"
        yield Item("Used by other programs", measured[-1], "{:.1f} cores".format, note)


def _energy(lines: Sequence[TrainingLine]) -> Iterator[Item]:
    """Yield the energy for a token, as far as counters have measured it."""
    known = {
        "processors": [line.host_joules_per_token for line in lines if line.host_joules_per_token is not None],
        "GPU": [line.device_joules_per_token for line in lines if line.device_joules_per_token is not None],
    }
    joules = "{:.3g} J".format
    parts = [Item(name, median(values), joules) for name, values in known.items() if values]
    if parts:
        yield Item("Energy per token", sum(part.value for part in parts), joules, f"median; {listed(parts)}")


def _memory(run: Run, lines: Sequence[TrainingLine]) -> Iterator[Item]:
    """Yield the peaks of memory, compared with the planned ones."""
    host, device = (None, None) if run.plan is None else (run.plan.host, run.plan.device_peak)
    for name, peaks, place in (
        ("Host peak", [line.host_bytes for line in lines], host),
        ("Device buffers", [line.device_bytes_peak for line in lines], device),
    ):
        expected = None if place is None else place.bytes
        yield from _compared(name, max(peaks, default=None), format_bytes, "", "planned", expected)


def _compared(
    name: str, value: float | None, unit: Callable[[float], str], source: str, word: str, expected: float | None
) -> Iterator[Item]:
    """Yield a measured number with the expected one in its note, or the expected one alone if nothing was measured.

    Args:
        name: label of the number.
        value: the measured number; None if unknown.
        unit: its unit, as in `Item`.
        source: origin of the measured number, such as "median"; may be empty.
        word: origin of the expected number, such as "planned".
        expected: the expected number; None if unknown.
    """
    if value is None:
        if expected is not None:
            yield Item(name, expected, unit, word)
        return
    notes = [source] if source else []
    if expected is not None:
        difference = f"{value / expected - 1:+.1%}" if expected else ""
        is_shown = difference.strip("+-0.%")  # not if it rounds to 0
        notes.append(f"{word} {unit(expected)}" + (f" ({difference})" if is_shown else ""))
    yield Item(name, value, unit, "; ".join(notes))
