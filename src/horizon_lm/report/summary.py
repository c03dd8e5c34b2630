"""The figures that matter, with what they stand beside."""

from dataclasses import dataclass
from statistics import median

from horizon_lm.quantities import format_bytes, format_seconds
from horizon_lm.report.run_files import Run


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the summary: its name, its value, and what to compare it with."""

    name: str
    value: str
    beside: str = ""


def summarise(run: Run) -> list[Figure]:
    """The strip at the top of the page. What is not known is not in it."""
    return [*_losses(run), *_speeds(run), *_memory(run)]


def duration(seconds: float) -> str:
    """Seconds with three digits, or minutes and hours: an operation takes microseconds, a step up to minutes."""
    if seconds >= 100:
        return format_seconds(seconds)
    seconds = _three_digits(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} µs"


def count(number: float) -> str:
    """A number of parameters or tokens, such as 7.62B."""
    number = _three_digits(number)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _three_digits(number: float) -> float:
    """Rounded before the unit is chosen: 999.9 ms are a second."""
    return float(f"{number:.3g}")


def _losses(run: Run) -> list[Figure]:
    figures = []
    metrics = run.metrics
    if metrics is not None and metrics.losses:
        step, loss = metrics.losses[-1]
        of = run.plan.run.num_steps if run.plan is not None else None
        name, to_come = ("Last training loss", f" of {of:,}") if of and step < of else ("Final training loss", "")
        beside = f"step {step:,}{to_come}; at first {metrics.losses[0][1]:.4f}"
        figures.append(Figure(name, f"{loss:.4f}", beside))
    if metrics is not None and metrics.evaluations:
        first, last = metrics.evaluations[0], metrics.evaluations[-1]
        if last is first:
            figures.append(Figure("Held-out loss", f"{first.eval_loss:.4f}", f"step {first.step:,}"))
        else:
            value = f"{first.eval_loss:.4g} → {last.eval_loss:.4g}"
            figures.append(Figure("Held-out loss", value, f"before → after {last.step:,} steps"))
    return figures


def _speeds(run: Run) -> list[Figure]:
    figures = []
    predicted = None if run.plan is None else run.plan.step
    if run.metrics is not None and run.metrics.training:
        speed = median(line.tokens_per_second for line in run.metrics.training)
        beside = (
            "median"
            if predicted is None
            else (
                f"median; predicted {predicted.tokens_per_second:,.0f}{_difference(speed, predicted.tokens_per_second)}"
            )
        )
        figures.append(Figure("Tokens per second", f"{speed:,.0f}", beside))
    seconds, source = _step_seconds(run)
    if seconds is not None:
        beside = (
            source
            if predicted is None
            else (f"{source}; predicted {duration(predicted.seconds)}{_difference(seconds, predicted.seconds)}")
        )
        figures.append(Figure("Step", duration(seconds), beside))
    elif predicted is not None:
        figures.append(Figure("Step", duration(predicted.seconds), "predicted"))
    return figures


def _step_seconds(run: Run) -> tuple[float | None, str]:
    """Seconds of a step of the whole run where there are two lines of it, else of the steps that were traced."""
    if run.metrics is not None and run.metrics.step_seconds is not None:
        return run.metrics.step_seconds, "median"
    step = None if run.measured is None else run.measured.median_step()
    return (None, "") if step is None else (step.seconds, "median of traced steps")


def _memory(run: Run) -> list[Figure]:
    figures = []
    lines = [] if run.metrics is None else run.metrics.training
    host, device = (None, None) if run.plan is None else (run.plan.host, run.plan.device_peak)
    for name, peaks, place in (
        ("Host peak", [line.host_bytes for line in lines], host),
        ("Device peak", [line.device_bytes_peak for line in lines], device),
    ):
        if peaks:
            beside = f"planned {format_bytes(place.bytes)}{_difference(max(peaks), place.bytes)}" if place else ""
            figures.append(Figure(name, format_bytes(max(peaks)), beside))
        elif place:
            figures.append(Figure(name, format_bytes(place.bytes), "planned"))
    return figures


def _difference(measured: float, expected: float) -> str:
    """By how much a figure is off what was expected."""
    return f" ({measured / expected - 1:+.1%})" if expected else ""
