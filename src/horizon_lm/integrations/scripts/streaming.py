"""The models of a script: what it loads, and which of them are streamed, where, and with which options."""

import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from horizon_lm.common.optimizers import by_other_name
from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.visible import visible
from horizon_lm.engine.opening.loading import stream
from horizon_lm.engine.streamed import engine_of, is_streamed
from horizon_lm.errors import ModelNotSupportedError, StreamingError, first_line
from horizon_lm.integrations.named_models import open_named
from horizon_lm.integrations.scripts.script import Script
from horizon_lm.planning.arithmetic.request import Machine


@dataclass(slots=True)
class Loaded:
    """A model that the script has loaded, or made of a config.

    Attributes:
        place: the line that did.
        device: the device that the script has moved it to, where it is not.
        is_whole: it cannot be streamed, and is computed as it is.
    """

    place: str
    device: torch.device | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``horizon-lm run``.

    Attributes:
        plan_only: end after the plan.
        precision: precision of all trained models; None for the one that belongs to the dtype of each.
        device_memory: as in `horizon_lm.stream`.
        machine: another machine that plans are made for; None for this one.
    """

    plan_only: bool = False
    precision: str | None = None
    device_memory: int | None = None
    machine: Machine | None = None


class PlanShown(BaseException):
    """The plan was printed, and nothing else was asked for."""


class ScriptModels:
    """The models of a script.

    Args:
        script: the script.
        options: the command's.

    Attributes:
        num_streamed: number of models that were streamed.
        in_loops: streamed models, without adapters around them, that no trainer trains.
    """

    def __init__(self, script: Script, options: Options) -> None:
        self.script, self.options, self.num_streamed = script, options, 0
        self.loaded: WeakKeyDictionary[Any, Loaded] = WeakKeyDictionary()
        self.in_loops: WeakSet[Any] = WeakSet()
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        """Print a line once, with the line of the script that led to it, on the first rank."""
        if os.environ.get("RANK", "0") == "0" and line not in self._said:
            self._said.add(line)
            place = self.script.place()
            print(visible(f"{place}: {line}" if place else line), flush=True)

    def add(self, model: Any) -> None:
        """Remember a model that the script has loaded. Weights in float16 become bfloat16."""
        if getattr(model, "dtype", None) == torch.float16:
            model.to(torch.bfloat16)
            self.say(f"{type(model).__name__} has weights in float16, which become bfloat16")
        self.loaded[model] = Loaded(self.script.place())

    def waits(self, model: Any) -> Loaded | None:
        """Return the record of a model, or of the one inside its adapters, that was loaded and may be streamed later; None for others."""
        record = self.loaded.get(inside_of(model))
        return None if record is None or record.is_whole or is_streamed(model) else record

    def stream(self, model: Any, device: str, precision: str) -> None:
        """Stream a model, which stays the same object.

        Raises:
            ModelNotSupportedError: it cannot be streamed exactly.
        """
        precision = self.options.precision or precision
        stream(model, device, precision, device_memory=self.options.device_memory)
        self.note(model)

    def open_named(self, name: str, device: str, model_class: Any, **kept: Any) -> Any:
        """Return a model that is streamed while it is loaded. Arguments are those of `named_models.open_named`."""
        if self.options.precision is not None:
            kept = {key: value for key, value in kept.items() if key not in ("dtype", "torch_dtype")}
            kept["precision"] = self.options.precision
        model = open_named(name, device, model_class, device_memory=self.options.device_memory, **kept)
        self.note(model)
        return model

    def note(self, model: Any) -> None:
        """Count a model that was streamed, for the lines before the plan."""
        inside = inside_of(model)
        record, store = self.loaded.get(inside), engine_of(model).store
        loaded = f" of {record.place}" if record is not None and record.place not in ("", self.script.place()) else ""
        name = f"{type(inside).__name__} {inside.config.name_or_path}".strip()
        self.num_streamed += 1
        self.say(
            f"{name}{loaded} is streamed to {engine_of(model).device.torch_device} in {store.precision.name}: "
            f"{format_bytes(sum(store.num_bytes.values()))}"
        )

    def stream_if_possible(self, model: Any) -> None:
        """Stream a model whose forward pass begins. One that cannot be streamed is moved as the script has asked for."""
        record = self.waits(model)
        assert record is not None
        try:
            self.stream(model, "auto" if record.device is None else str(record.device), own_precision(model))
        except ModelNotSupportedError as error:
            record.is_whole = True
            if record.device is not None:
                model.to(record.device)
            self.say(
                f"{type(model).__name__} is computed as a whole on {model.device}; it is not streamed: {first_line(error)}"
            )

    def shown(self, has_plan: bool) -> None:
        """End the script after the plan, if nothing else was asked for. Raise StreamingError if there is no plan then."""
        if not self.options.plan_only:
            return
        if not has_plan:
            raise StreamingError("no plan was made; the line before says why")
        raise PlanShown


def own_precision(model: Any) -> str:
    """Return the precision in which the optimizers of other code update weights of a model as they are."""
    return "float32" if inside_of(model).dtype == torch.float32 else "bf16"


def trained_precision(model: Any, args: Any) -> str:
    """Return the precision for a Trainer: weights in 16 bits get fp32 masters, unless the optimizer of its settings is one of other code.

    Args:
        model: a model that is not streamed.
        args: ``transformers.TrainingArguments``; None for the default.
    """
    optimizer = getattr(args, "optim", "adamw_torch")
    if own_precision(model) == "bf16" and by_other_name(getattr(optimizer, "value", optimizer)) is not None:
        return "fp32_master"
    return own_precision(model)


def inside_of(model: Any) -> Any:
    """Return the model of transformers inside a PEFT model; other models as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
