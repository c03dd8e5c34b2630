"""Settings of checkpoints, resuming, early stopping and the choice of the best model."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, ValidationInfo, field_validator

from horizon_lm.runs.config.rules import Needs, OnResume
from horizon_lm.runs.config.types import Bytes, Count, Interval, Seconds, Settings

_NEEDS_CHECKPOINTS = Needs(save_strategy=("steps", "epoch"))
_NEEDS_COMPARISON = Needs(load_best_model_at_end=..., early_stopping_patience=...)


def _as_auto(value: Any) -> Any:
    """Return auto for null; return anything else unchanged."""
    return "auto" if value is None else value


class CheckpointSettings(Settings):
    """Settings of writing and keeping checkpoints, and of resuming an interrupted run."""

    heading: ClassVar[str] = "Checkpoints"

    save_strategy: Annotated[Literal["no", "steps", "epoch"], OnResume.FREE] = Field(
        "steps", description="When to write checkpoint-STEP during training: no, steps or epoch."
    )
    save_steps: Annotated[Interval, OnResume.FREE, Needs(save_strategy="steps")] = Field(
        500, description="Steps between checkpoints, or a fraction of all steps if below 1."
    )
    save_only_model: Annotated[bool, OnResume.FREE, _NEEDS_CHECKPOINTS] = Field(
        False,
        description="Export only the model to checkpoint-STEP, without the optimizer's state; a run cannot be resumed from it.",
    )
    save_bandwidth: Annotated[Bytes | None, OnResume.FREE] = Field(
        None, description="Limit on the bytes written to checkpoints per second, such as 500MiB. Default: no limit."
    )
    save_on_signal: Annotated[bool, OnResume.FREE] = Field(
        True,
        description="On SIGTERM, SIGINT, SIGHUP or SIGUSR1, finish the step, write a checkpoint, and exit with code 75.",
    )
    save_on_signal_seconds: Annotated[Seconds | None, OnResume.FREE, Needs(save_on_signal=True)] = Field(
        None,
        description="Time that the system leaves after such a signal. A checkpoint that would take longer is not begun. "
        "Default: no limit.",
    )
    resume_from_checkpoint: Annotated[bool | str, BeforeValidator(_as_auto), OnResume.FREE] = Field(
        "auto",
        description="auto: go on with an unfinished run in output_dir, from its last checkpoint, else begin. true: the same, but "
        "it is an error if there is none. PATH: go on from this checkpoint. false: begin anew.",
    )
    resume_with_changes: Annotated[bool, OnResume.FREE] = Field(
        False,
        description="Resume although settings, rows or versions have changed, so that the run differs from an uninterrupted one.",
    )
    load_best_model_at_end: Annotated[bool, OnResume.FREE] = Field(
        False,
        description="Export the model of the best evaluation instead of the last one. Also writes a checkpoint at each new best.",
    )
    save_total_limit: Annotated[
        Count | None, OnResume.FREE, Needs(save_strategy=("steps", "epoch"), load_best_model_at_end=...)
    ] = Field(
        2,
        description="Number of checkpoints to keep; older ones are deleted once a new one is on disk. null for all. The best "
        "one is kept in addition with load_best_model_at_end.",
    )
    early_stopping_patience: Annotated[Count | None, OnResume.FREE] = Field(
        None,
        description="End the run after this many evaluations in a row without a better metric. Default: never.",
    )
    early_stopping_threshold: Annotated[NonNegativeFloat, OnResume.FREE, Needs(early_stopping_patience=...)] = Field(
        0.0, le=1e6, description="Difference from the best metric that counts as better for early stopping."
    )

    metric_for_best_model: Annotated[str | None, OnResume.FREE, _NEEDS_COMPARISON] = Field(
        None, description="Metric of the eval set that decides, such as eval_loss or loss. Default: eval_loss."
    )
    greater_is_better: Annotated[bool | None, OnResume.FREE, _NEEDS_COMPARISON] = Field(
        None, description="Whether larger values of this metric are better. Default: unless its name ends in loss."
    )

    @field_validator("load_best_model_at_end", "early_stopping_patience")
    @classmethod
    def _needs_evaluations(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("eval_strategy") == "no":
            raise ValueError("needs evaluations during training; set eval_strategy: steps or epoch")
        if value and info.field_name == "load_best_model_at_end" and info.data.get("save_only_model"):
            raise ValueError("needs checkpoints; remove save_only_model: true")
        return value
