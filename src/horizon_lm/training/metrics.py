"""Measure a run and log it: ``metrics.jsonl``, and a progress bar on a terminal or plain lines elsewhere."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from horizon_lm.data.loader import Batch
from horizon_lm.objective.base import Loss
from horizon_lm.plan.plan import Plan
from horizon_lm.quantities import format_bytes, format_seconds
from horizon_lm.resources import resident_bytes


class Metrics:
    """Sums over the steps between two log lines.

    Args:
        num_steps: steps of the run.
        steps_per_epoch: to tell the epoch.
        plan: what was planned for it.
    """

    def __init__(self, num_steps: int, steps_per_epoch: int, plan: Plan) -> None:
        self._num_steps, self._steps_per_epoch, self._plan = num_steps, steps_per_epoch, plan
        self.last_loss, self._learning_rate = math.nan, 0.0
        self._flops_per_token = plan.step.outline.step_flops(plan.step.tokens) / plan.step.tokens
        self.tokens_trained = self.tokens_total = self._rows = 0
        self.started = time.perf_counter()
        self._window_started, self._aside = self.started, 0.0
        self._losses: list[float] = []
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._window_steps = self._window_trained = self._window_total = 0

    @property
    def has_steps(self) -> bool:
        """There are steps that no line tells of yet."""
        return self._window_steps > 0

    @contextmanager
    def exclude_from_timing(self) -> Iterator[None]:
        """What happens inside takes time, but no step's."""
        begun = time.perf_counter()
        yield
        self._aside += time.perf_counter() - begun

    def add(self, value: float, loss: Loss, batch: Batch, learning_rate: float) -> None:
        """Count a step with its loss and the learning rate that it was applied with."""
        self.last_loss, self._learning_rate = value, learning_rate
        if math.isfinite(value):  # else it is of a step that is left out
            self._losses.append(value)
            self._weight += loss.weight
            for name, each in loss.metrics.items():
                self._sums[name] = self._sums.get(name, 0.0) + each
        self._window_steps += 1
        self._rows += len(batch.places)
        self._window_trained += batch.num_trained
        self._window_total += batch.num_tokens

    def line(self, step: int, optimizer: Any, model: Any, unit_norms: bool = False) -> dict[str, Any]:
        """A line of ``metrics.jsonl``, over the steps since the last one.

        Returns:
            ``loss``: mean over these steps of the step's loss, null if all were skipped, and what else the objective measures;
            ``grad_norm``: of the last applied step, before clipping, and ``grad_norm/UNIT`` on request; ``steps_skipped``
            since the run began; ``learning_rate``: of this step; ``rows_seen`` and ``tokens_*``: since the run began,
            without padding; ``*_per_second``: over these steps, evaluation and exports left out; ``model_tflops``: operations that the model asks for (6·N·T
            and attention), per second; ``of_planned_speed``: tokens per second over those of the plan, null if it has none;
            ``device_bytes_peak``: of the engine's buffers, and ``of_planned_device``; ``host_bytes``: of this process, without
            page cache, and ``of_planned_host``; ``seconds`` since the run began; ``eta_seconds``.
        """
        import horizon_lm

        plan, now = self._plan, time.perf_counter()
        seconds = now - self._window_started - self._aside
        self.tokens_trained += self._window_trained
        self.tokens_total += self._window_total
        device_bytes, host_bytes = horizon_lm.stats(model)["device_bytes_peak"], resident_bytes()
        line = {
            "step": step,
            "epoch": round(step / self._steps_per_epoch, 4),
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            **{name: total / self._weight for name, total in self._sums.items()},
            "grad_norm": optimizer.grad_norm,
            **({f"grad_norm/{unit}": norm for unit, norm in optimizer.unit_grad_norms.items()} if unit_norms else {}),
            "steps_skipped": optimizer.num_skipped,
            "learning_rate": self._learning_rate,
            "rows_seen": self._rows,
            "tokens_trained": self.tokens_trained,
            "tokens_total": self.tokens_total,
            "trained_tokens_per_second": round(self._window_trained / seconds, 3),
            "tokens_per_second": round(self._window_total / seconds, 3),
            "model_tflops": round(self._flops_per_token * self._window_total / seconds / 1e12, 4),
            "of_planned_speed": _ratio(
                self._window_total / seconds, plan.time.tokens_per_second if plan.time else None
            ),
            "device_bytes_peak": device_bytes,
            "of_planned_device": _ratio(device_bytes, plan.buffers.num_bytes),
            "host_bytes": host_bytes,
            "of_planned_host": _ratio(host_bytes, plan.host.num_bytes),
            "seconds": round(now - self.started, 3),
            "eta_seconds": round(seconds / self._window_steps * (self._num_steps - step), 1),
        }
        self._window_started, self._aside = now, 0.0
        self._losses, self._sums, self._weight = [], {}, 0.0
        self._window_steps = self._window_trained = self._window_total = 0
        return line


def _ratio(value: float, of: float | None) -> float | None:
    return round(value / of, 4) if of else None


def describe(line: dict[str, Any], num_steps: int) -> str:
    """A line of metrics for people."""
    begin = f"step {line['step']}/{num_steps}  "
    if "samples" in line:
        return "\n".join(f"{begin}{each['prompt']!r} -> {each['answer']!r}" for each in line["samples"])
    if "eval_loss" in line:
        tokens = f" ({line['eval_tokens']:,} tokens)" if "eval_tokens" in line else ""
        return f"{begin}held-out loss {line['eval_loss']:.4f}{tokens}{_others(line, 'eval_')}"
    return (
        f"{begin}epoch {line['epoch']:.2f}  loss {_number(line['loss'], '.4f')}{_others(line, '')}  "
        f"grad norm {_number(line['grad_norm'], '.2f')}  lr {line['learning_rate']:.2e}  "
        f"tokens/s {line['trained_tokens_per_second']:.0f} trained, {line['tokens_per_second']:.0f} in all  "
        f"device {format_bytes(line['device_bytes_peak'])}  host {format_bytes(line['host_bytes'])}  "
        f"left {format_seconds(line['eta_seconds'])}{_slow(line['of_planned_speed'])}"
    )


def _slow(of_planned: float | None) -> str:
    """A word about steps that take more than twice as long as planned: something else computes on this machine."""
    return f"  ({of_planned:.0%} of the planned speed)" if of_planned is not None and of_planned < 0.5 else ""


def _others(line: dict[str, Any], prefix: str) -> str:
    """What of an objective's measures deserves a place on a line."""
    known = {"perplexity": "perplexity", "rewards/margins": "margin", "rewards/accuracies": "accuracy"}
    return "".join(f"  {name} {_short(line[prefix + key])}" for key, name in known.items() if prefix + key in line)


def _short(value: float) -> str:
    """Three digits, and of what is small the first three."""
    return f"{value:z.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


class Reporter:
    """Writes metrics, flushed line by line, and shows progress. A context manager.

    Args:
        say: prints a line; None for standard output, with a progress bar if that is a terminal.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._say = say
        self._file: TextIO | None = None
        self._num_steps = 0

    def __enter__(self) -> Self:
        if self._say is None:
            from rich.console import Console

            console = Console()
            # rich wraps at the window's width; lines that go to a file must stay whole
            self._say = (
                (lambda text: console.print(text, markup=False, highlight=False)) if console.is_terminal else _plain
            )
            self._bar = _progress_bar(console) if console.is_terminal else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_bar()
        if self._file is not None:
            self._file.close()

    def say(self, *lines: str) -> None:
        """Lines for people."""
        assert self._say is not None
        for line in lines:
            self._say(line)

    def begin(self, metrics_file: Path, num_steps: int) -> None:
        """The loop begins; lines go into a new file."""
        self._file, self._num_steps = metrics_file.open("x", encoding="utf-8"), num_steps
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=num_steps, loss="")
            self._bar.start()

    def advance(self, loss: float) -> None:
        """One more step is done."""
        if self._task is not None:
            self._bar.update(self._task, advance=1, loss=f"loss {loss:.4f}")

    def write(self, line: dict[str, Any]) -> None:
        """A line of metrics, on disk when this returns."""
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.tell(line)

    def tell(self, line: dict[str, Any]) -> None:
        """A line for people alone."""
        self.say(describe(line, self._num_steps))

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """What stands between steps and may take long; told how much of how much is done."""
        said, task = time.perf_counter(), None

        def say(done: int, total: int) -> None:
            nonlocal said, task
            if self._bar is not None:
                if task is None:
                    task = self._bar.add_task(what, total=total, loss="")
                    self._bar.start()
                self._bar.update(task, completed=done)
            elif time.perf_counter() - said > 10:
                said = time.perf_counter()
                self.say(f"{what}: {done:,} of {total:,}")

        yield say
        if task is not None:
            self._bar.remove_task(task)

    def stop_bar(self) -> None:
        """The loop is over; what is said from now on stays below the bar."""
        if self._bar is not None:
            self._bar.stop()


def _plain(text: str) -> None:
    print(text, flush=True)


def _progress_bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
