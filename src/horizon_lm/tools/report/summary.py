"""The most important statistics of a run, compared with the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from horizon_lm.common.quantities import counted, format_bytes, format_seconds
from horizon_lm.runs.run_files import Run
from horizon_lm.schedule.trace import Trace

_FEW_CORES = 0.5  # that other programs may use without being mentioned


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of the summary: its name, its value, and a comparison."""

    name: str
    value: str
    comparison: str = ""


def summarise(run: Run) -> list[Statistic]:
    """Return the statistics for the top of the page, without unknown ones."""
    return [*_losses(run), *_speeds(run), *_other_programs(run), *_energy(run), *_memory(run)]


def duration(seconds: float) -> str:
    """Format seconds with three digits, from microseconds to hours."""
    if seconds >= 100:
        return format_seconds(seconds)
    seconds = _three_digits(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} µs"


def count(number: float) -> str:
    """Format a number of parameters or tokens, such as 7.62B."""
    number = _three_digits(number)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _three_digits(number: float) -> float:
    """Round to three digits. This is done before choosing the unit, since 999.9 ms is 1 s."""
    return float(f"{number:.3g}")


def median_step(trace: Trace) -> tuple[int, float, float] | None:
    """Return number, start and end of the step of median length, or of the shorter of two; None if nothing was traced."""
    by_length = sorted(trace.steps, key=lambda step: step[2] - step[1])  # end minus start
    return by_length[(len(by_length) - 1) // 2] if by_length else None


def _losses(run: Run) -> list[Statistic]:
    """Return the last losses, of training and evaluation."""
    statistics = []
    metrics = run.metrics
    if metrics is not None and metrics.losses:
        step, loss = metrics.losses[-1]
        num_steps = run.plan.run.num_steps if run.plan is not None else None
        unfinished = num_steps is not None and step < num_steps
        name = "Last training loss" if unfinished else "Final training loss"
        comparison = f"step {step:,}{f' of {num_steps:,}' if unfinished else ''}; first {metrics.losses[0][1]:.4f}"
        statistics.append(Statistic(name, f"{loss:.4f}", comparison))
    if metrics is not None and metrics.evaluations:
        first, last = metrics.evaluations[0], metrics.evaluations[-1]
        if last is first:
            statistics.append(Statistic("Eval loss", f"{first.eval_loss:.4f}", f"step {first.step:,}"))
        else:
            value = f"{first.eval_loss:.4g} → {last.eval_loss:.4g}"
            statistics.append(Statistic("Eval loss", value, f"before → after {counted(last.step, 'step')}"))
    return statistics


def _speeds(run: Run) -> list[Statistic]:
    """Return the speed and the time of a step, compared with the planned ones."""
    planned = None if run.plan is None else run.plan.step
    lines = [] if run.metrics is None else run.metrics.training
    # Without the first line, like the time of a step: its step has warmed up.
    speed = median(line.tokens_per_second for line in lines[1:] or lines) if lines else None
    seconds, source = None if run.metrics is None else run.metrics.step_seconds, "median"
    if seconds is None and run.measured is not None and (step := median_step(run.measured)) is not None:
        _, start, end = step
        seconds, source = end - start, "median of traced steps"
    statistics = []
    if speed is not None:
        expected = None if planned is None else planned.tokens_per_second
        statistics.append(_compared("Tokens per second", speed, "{:,.0f}".format, "median", "predicted", expected))
    if seconds is not None:
        expected = None if planned is None else planned.seconds
        statistics.append(_compared("Step", seconds, duration, source, "predicted", expected))
    elif planned is not None:
        statistics.append(Statistic("Step", duration(planned.seconds), "predicted"))
    return statistics


def _other_programs(run: Run) -> list[Statistic]:
    """Return the cores that other programs used during the run, if they were so many that it matters."""
    lines = [] if run.metrics is None else run.metrics.training
    measured = [line.cores_of_others for line in lines if line.cores_of_others is not None]
    if not measured or measured[-1] < _FEW_CORES:
        return []
    return [
        Statistic("Used by other programs", f"{measured[-1]:.1f} cores", "on average, which may have slowed the run")
    ]


def _energy(run: Run) -> list[Statistic]:
    """Return the energy for a token, as far as counters have measured it."""
    lines = [] if run.metrics is None else run.metrics.training
    known = {
        "processors": [line.host_joules_per_token for line in lines if line.host_joules_per_token is not None],
        "GPU": [line.device_joules_per_token for line in lines if line.device_joules_per_token is not None],
    }
    parts = {name: median(values) for name, values in known.items() if values}
    if not parts:
        return []
    of_parts = ", ".join(f"{name} {value:.3g} J" for name, value in parts.items())
    return [Statistic("Energy per token", f"{sum(parts.values()):.3g} J", f"median; {of_parts}")]


def _memory(run: Run) -> list[Statistic]:
    """Return the peaks of memory, compared with the planned ones."""
    statistics = []
    lines = [] if run.metrics is None else run.metrics.training
    host, device = (None, None) if run.plan is None else (run.plan.host, run.plan.device_peak)
    for name, peaks, place in (
        ("Host peak", [line.host_bytes for line in lines], host),
        ("Device buffers", [line.device_bytes_peak for line in lines], device),
    ):
        if peaks:
            expected = None if place is None else place.bytes
            statistics.append(_compared(name, max(peaks), format_bytes, "", "planned", expected))
        elif place:
            statistics.append(Statistic(name, format_bytes(place.bytes), "planned"))
    return statistics


def _compared(
    name: str, value: float, format_value: Callable[[float], str], source: str, word: str, expected: float | None
) -> Statistic:
    """Return a measured statistic with its ``source``, such as "median", and the ``expected`` value after a ``word`` such as "planned".

    An empty source, or None as the expected value, is left out. ``format_value`` returns a value as text.
    """
    parts = [source] if source else []
    if expected is not None:
        difference = f"{value / expected - 1:+.1%}" if expected else ""
        is_shown = difference.strip("+-0.%")  # not if it rounds to 0
        parts.append(f"{word} {format_value(expected)}" + (f" ({difference})" if is_shown else ""))
    return Statistic(name, format_value(value), "; ".join(parts))
