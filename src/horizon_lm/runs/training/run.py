"""A run: what surrounds it, its settings and rows, the model that it trains, and its result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.runs.admission.run_plan import Admission, apply_plan
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.vision import Vision
from horizon_lm.runs.training.callbacks import Callbacks
from horizon_lm.runs.training.interrupts import Interrupts
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.metrics import Metrics
from horizon_lm.runs.training.objectives import Objectives
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.reporter import Reporter
from horizon_lm.runs.training.resume import data_position, model_settings, settings_of
from horizon_lm.runs.training.rows import RunData
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.run_state import ResumePoint, RunState
from horizon_lm.runs.training.samples import SamplePrompts


@dataclass(frozen=True, slots=True)
class Session:
    """The surroundings of a run, which are open as long as it lasts: its processes, its folder, callbacks, signals and output."""

    ranks: Ranks
    run_dir: RunDir
    callbacks: Callbacks
    interrupts: Interrupts
    reporter: Reporter


@dataclass(slots=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        given: as the user has set them.
        point: the checkpoint that the run goes on from; None for a new run.
        config: with the choices of the checkpoint and of the plan.
        plan: the plan, which a first step that does not fit replaces.
    """

    given: RunConfig
    point: ResumePoint | None
    config: RunConfig
    plan: Plan

    def use(self, plan: Plan) -> None:
        """Take over the choices of another plan."""
        self.config, self.plan = apply_plan(self.config, plan), plan


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was admitted: all but its model.

    Attributes:
        session, settings: see there.
        tokenizer, vision: the tokenizer of the model, and its processor of images; None for a model of text.
        data, prompts: the rows, and the prompts to answer.
        intervals: the steps after which the run does something besides training.
        admission: has made the plan, and finds a smaller one.
        day: the date on which the run has begun, which chat templates print.
        weights: identifies the weights that the run has started from (`resume.starting_weights`).
    """

    session: Session
    settings: RunSettings
    tokenizer: Any
    vision: Vision | None
    data: RunData
    prompts: SamplePrompts
    intervals: Intervals
    admission: Admission
    day: str
    weights: str

    def identity(self, model: Any, step: int) -> dict[str, Any]:
        """Return plain data for the checkpoint of a step, with which a resumed run is compared."""
        sampler = self.data.loader.sampler
        return {
            "step": step, "rows_per_step": sampler.rows_per_step, "num_steps": self.intervals.num_steps,
            "config": settings_of(self.settings.given), "settled": settings_of(self.settings.config),
            "model_config": model_settings(model), "data": data_position(self.data, step, self.day),
            "weights": self.weights,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """The model of a run and the objects that train it. ``state``: the state of all parts of the run."""

    model: Any
    optimizer: Any
    scheduler: Any
    objectives: Objectives
    metrics: Metrics
    state: RunState


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of a run.

    Attributes:
        output_dir: the folder of the run.
        model_dir: the folder of the trained model.
        num_steps: optimizer steps.
        eval_loss_before: eval loss before the first step; None without an eval set.
        eval_loss_after: eval loss after the last step; None without an eval set.
        num_skipped: steps skipped because their gradient was not finite.
    """

    output_dir: Path
    model_dir: Path
    num_steps: int
    eval_loss_before: float | None
    eval_loss_after: float | None
    num_skipped: int
