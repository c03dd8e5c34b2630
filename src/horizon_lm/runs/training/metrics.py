"""Measure a run: the lines of ``metrics.jsonl``."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import horizon_lm
from horizon_lm.common.resources import resident_bytes
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.objective.base import Loss
from horizon_lm.runs.training.energy import UNKNOWN, Energy, EnergyMeter


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss and the counts of a step, on this rank or on all of them.

    Attributes:
        value: the loss.
        weight: number of targets or pairs.
        metrics: sums over targets or pairs, by name.
        token_sums: sum and number of targets of each micro-batch, by name.
        num_rows, num_trained, num_tokens: rows, targets and tokens.
        energy: energy since the step before.
    """

    value: float
    weight: float
    metrics: Mapping[str, float]
    token_sums: Mapping[str, Sequence[tuple[float, int]]]
    num_rows: int
    num_trained: int
    num_tokens: int
    energy: Energy = UNKNOWN

    @classmethod
    def of(
        cls, value: float, loss: Loss, batch: Batch, micro_batch_rows: int, energy: Energy = UNKNOWN
    ) -> "StepResult":
        """Return the result of a batch.

        Args:
            value: the loss as a number.
            loss: the loss.
            batch: the batch.
            micro_batch_rows: rows or pairs whose token metrics have a mean of their own, as in TRL.
            energy: energy since the step before.
        """
        return cls(
            value=value,
            weight=0.0 if batch.is_stand_in else loss.weight,
            metrics=dict.fromkeys(loss.metrics, 0.0) if batch.is_stand_in else dict(loss.metrics),
            token_sums={
                name: [] if batch.is_stand_in else sums.of_micro_batches(micro_batch_rows)
                for name, sums in loss.token_metrics.items()
            },
            num_rows=len(batch.places), num_trained=0 if batch.is_stand_in else int(batch.num_trained),
            num_tokens=0 if batch.is_stand_in else batch.num_tokens, energy=energy,
        )  # fmt: skip


@dataclass
class _Totals:
    """Values since the start of the run: the losses of its first and its last line, and the tokens of all lines."""

    first_loss: float | None = None
    last_loss: float | None = None
    tokens_trained: int = 0
    tokens_total: int = 0


@dataclass
class _Recent:
    """Sums over the steps since the last line. The first two values are not reset by a line."""

    learning_rate: float = 0.0  # of the last step
    rows: int = 0  # since the start of the run
    losses: list[float] = field(default_factory=list)  # this and the next three leave out steps that were skipped
    sums: dict[str, float] = field(default_factory=dict)
    token_means: dict[str, list[float]] = field(default_factory=dict)
    weight: float = 0.0
    window_steps: int = 0
    window_trained: int = 0
    window_total: int = 0
    joules: list[float | None] = field(default_factory=lambda: [0.0, 0.0])  # host and device; None if unknown


class Metrics:
    """The sums over the steps between two log lines.

    Args:
        num_steps: steps of the run.
        steps_per_epoch: steps of one epoch.
        plan: the plan of the run, which measured speed and memory are compared with.
        meter: measures the energy of this rank's device and, once a machine, of the host; None to measure nothing.

    Attributes:
        started: when the run began to train, on the clock of ``time.perf_counter``; the time until it was resumed does not count.
    """

    def __init__(self, num_steps: int, steps_per_epoch: int, plan: Plan, meter: EnergyMeter | None = None) -> None:
        self._num_steps, self._steps_per_epoch, self.plan, self._meter = num_steps, steps_per_epoch, plan, meter
        self.totals, self._recent = _Totals(), _Recent()
        self._flops_per_token = plan.step.outline.step_flops(plan.step.tokens) / plan.step.tokens
        self.started = time.perf_counter()
        self._window_started, self._excluded_seconds = self.started, 0.0

    @property
    def has_steps(self) -> bool:
        """True if there are steps that have not been logged."""
        return self._recent.window_steps > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain data, with seconds instead of times."""
        now = time.perf_counter()
        # Names with an underscore, which checkpoints have always had, differ from the names of the totals.
        recent = {f"_{name}": each for name, each in vars(self._recent).items()}
        window_seconds = now - self._window_started - self._excluded_seconds
        return {"sums": vars(self.totals) | recent, "seconds": now - self.started, "window_seconds": window_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned. The time between the two does not count."""
        sums = state["sums"]
        self.totals = _Totals(**{each.name: sums[each.name] for each in fields(_Totals)})
        self._recent = _Recent(**{each.name: sums[f"_{each.name}"] for each in fields(_Recent)})
        now = time.perf_counter()
        self.started, self._window_started = now - state["seconds"], now - state["window_seconds"]
        self._excluded_seconds = 0.0

    @contextmanager
    def exclude_from_timing(self) -> Iterator[None]:
        """Context manager: exclude the enclosed work from the speed and the energy of steps."""
        begun = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - begun
        self.energy()  # drops the energy of the enclosed work

    def energy(self) -> Energy:
        """Return this rank's energy since the last call."""
        return UNKNOWN if self._meter is None else self._meter.read()

    def add(self, result: StepResult, learning_rate: float) -> None:
        """Add the result of a step and the learning rate of its update."""
        recent = self._recent
        recent.learning_rate = learning_rate
        if math.isfinite(result.value):  # else the step was skipped
            recent.losses.append(result.value)
            recent.weight += result.weight
            for name, each in result.metrics.items():
                recent.sums[name] = recent.sums.get(name, 0.0) + each
            for name, sums in result.token_sums.items():
                recent.token_means.setdefault(name, []).extend(total / max(1, count) for total, count in sums)
        recent.window_steps += 1
        recent.rows += result.num_rows
        recent.window_trained += result.num_trained
        recent.window_total += result.num_tokens
        energy = Energy(*recent.joules) + result.energy
        recent.joules = [energy.host, energy.device]

    def _end_window(self, now: float) -> tuple[_Recent, float]:
        """Begin new sums, and add the tokens of the old ones to the totals. Return the old sums, and the seconds of their steps."""
        recent, seconds = self._recent, now - self._window_started - self._excluded_seconds
        self.totals.tokens_trained += recent.window_trained
        self.totals.tokens_total += recent.window_total
        self._recent = _Recent(learning_rate=recent.learning_rate, rows=recent.rows)
        self._window_started, self._excluded_seconds = now, 0.0
        return recent, seconds

    def line(self, step: int, optimizer: Any, model: Any, unit_norms: bool = False) -> dict[str, Any]:
        """Return a line of ``metrics.jsonl`` for the steps since the last line, and start new sums.

        Returns:
            - ``loss``: mean of the steps' losses, null if all were skipped; the objective's other metrics are logged in
              the same way.
            - ``entropy``, ``mean_token_accuracy``: as in TRL, means over the targets of each micro-batch of
              ``per_device_train_batch_size`` rows, and then over micro-batches. The entropy is in nats; the accuracy is the
              share of targets with the largest logit. For preferences, it is that of the chosen answers.
            - ``grad_norm``: norm of the last applied step before clipping; with ``unit_norms`` also ``grad_norm/UNIT``.
            - ``learning_rate``: rate of the last step. ``steps_skipped``: since the start of the run.
            - ``rows_seen``, ``tokens_trained``, ``tokens_total``: since the start of the run, without padding.
              ``num_tokens``: ``tokens_total`` under TRL's name.
            - ``*_per_second``: over these steps, without evaluation and exports. ``model_tflops``: operations of the model
              (6·N·T and attention) per second. ``of_planned_speed``: measured over planned tokens per second, null if the
              plan has no speed.
            - ``host_joules_per_token``, ``device_joules_per_token``: energy of all machines and devices over these steps for
              each of ``tokens_total``, null without a counter (see `horizon_lm.runs.training.energy`).
            - ``device_bytes_peak``: peak of the engine's buffers. ``host_bytes``: memory of this process without page
              cache. ``of_planned_device``, ``of_planned_host``: these over the planned bytes.
            - ``seconds``: since the start of the run. ``eta_seconds``: expected until its end.
        """
        plan, totals, now = self.plan, self.totals, time.perf_counter()
        recent, seconds = self._end_window(now)
        speed = recent.window_total / seconds
        device_bytes, host_bytes = horizon_lm.stats(model)["device_bytes_peak"], resident_bytes()
        loss = sum(recent.losses) / len(recent.losses) if recent.losses else None
        if loss is not None:
            totals.first_loss, totals.last_loss = loss if totals.first_loss is None else totals.first_loss, loss
        return {
            "step": step,
            "epoch": round(step / self._steps_per_epoch, 4),
            "loss": loss,
            **{name: total / recent.weight for name, total in recent.sums.items()},
            **{name: sum(means) / len(means) for name, means in recent.token_means.items()},
            "grad_norm": optimizer.grad_norm,
            **({f"grad_norm/{unit}": norm for unit, norm in optimizer.unit_grad_norms.items()} if unit_norms else {}),
            "steps_skipped": optimizer.num_skipped,
            "learning_rate": recent.learning_rate,
            "rows_seen": recent.rows,
            "tokens_trained": totals.tokens_trained,
            "tokens_total": totals.tokens_total,
            "num_tokens": totals.tokens_total,
            "trained_tokens_per_second": round(recent.window_trained / seconds, 3),
            "tokens_per_second": round(speed, 3),
            "model_tflops": round(self._flops_per_token * recent.window_total / seconds / 1e12, 4),
            "of_planned_speed": _ratio(speed, plan.time.tokens_per_second if plan.time else None),
            "host_joules_per_token": _ratio(recent.joules[0], recent.window_total, 6),
            "device_joules_per_token": _ratio(recent.joules[1], recent.window_total, 6),
            "device_bytes_peak": device_bytes,
            "of_planned_device": _ratio(device_bytes, plan.buffers.bytes),
            "host_bytes": host_bytes,
            "of_planned_host": _ratio(host_bytes, plan.host.bytes),
            "seconds": round(now - self.started, 3),
            "eta_seconds": round(seconds / recent.window_steps * (self._num_steps - step), 1),
        }


def _ratio(value: float | None, reference: float | None, digits: int = 4) -> float | None:
    return round(value / reference, digits) if reference and value is not None else None
