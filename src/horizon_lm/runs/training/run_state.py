"""The state of a run in a checkpoint: the parts that keep one, and how it is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.runs.checkpoints.manifest import Manifest
from horizon_lm.runs.checkpoints.saving import STATE

# A checkpoint of a run has at least these: first the values that the resumed run is compared with, then the states of its parts.
FORMAT: dict[str, tuple[type, ...]] = {
    "step": (int,), "num_steps": (int,), "config": (dict,), "settled": (dict,), "model_config": (dict,), "data": (dict,),
    "scheduler": (dict,), "metrics": (dict,), "best": (dict,), "last_eval": (list, tuple), "spikes": (dict,),
    "loss_before": (float, type(None)), "finished": (bool,), "callbacks": (dict,), "files": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run goes on from.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        state: the state of the run, in the format above.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return int(self.state["step"])


@contextmanager
def reading(point: ResumePoint) -> Iterator[None]:
    """Context manager: raise ConfigError if the state of a run lacks something, or a value has another type."""
    try:
        yield
    except HorizonError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{point.folder / STATE} is damaged ({type(error).__name__}: {first_line(error)})") from error


class Stateful(Protocol):
    """A part of a run whose state is in its checkpoints, as plain data."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


_Part = TypeVar("_Part", bound=Stateful)
_T = TypeVar("_T")


class Value(Generic[_T]):
    """A value that is in the checkpoints of a run."""

    def __init__(self, value: _T) -> None:
        self.value = value

    def state_dict(self) -> _T:
        return self.value

    def load_state_dict(self, state: _T) -> None:
        self.value = state


class RunState:
    """The parts of a run that have a state, by their names in a checkpoint.

    Args:
        point: the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(self, point: ResumePoint | None) -> None:
        self._point, self._parts = point, dict[str, Stateful]()

    def keep(self, name: str, part: _Part) -> _Part:
        """Add a part and return it, in a resumed run with the state that it had. Raise ConfigError if that is damaged.

        A part that the checkpoint does not have begins anew, because it is newer than the checkpoint, unless `FORMAT` requires it.
        """
        if self._point is not None and (name in FORMAT or name in self._point.state):
            with reading(self._point):
                part.load_state_dict(self._point.state[name])
        self._parts[name] = part
        return part

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts."""
        return {name: part.state_dict() for name, part in self._parts.items()}
