"""What a run measures: the fields of a line of ``metrics.jsonl``."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horizon_lm.data.loader import Batch
from horizon_lm.objective.base import Loss
from horizon_lm.plan.plan import Plan
from horizon_lm.store.ram import resident_bytes


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
    def aside(self) -> Iterator[None]:
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
