"""Stream the models of another project's tests, as its user would: open them streamed, and train them with our trainers."""

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

import horizon_lm

COUNT = 0  # models streamed by the present test
_PATCHED: set[ModuleType] = set()


def patch(module: ModuleType, opens: bool) -> None:
    """Replace the trainers in a module of tests and, if `opens`, the class that opens causal models."""
    if module in _PATCHED:
        return
    _PATCHED.add(module)
    for name, value in list(vars(module).items()):
        if (
            isinstance(value, type)
            and issubclass(value, Trainer)
            and value.__module__.startswith(("trl", "transformers"))
        ):
            setattr(module, name, streamed_trainer(value))
        elif (
            opens
            and isinstance(value, type)
            and issubclass(value, AutoModelForCausalLM)
            and value.__module__ == module.__name__
        ):
            value.from_pretrained = partial(_changed_before, module, value.from_pretrained)
        elif opens and value is AutoModelForCausalLM:
            setattr(module, name, StreamedAutoModel)
        elif opens and getattr(value, "transformers_class", None) is AutoModelForCausalLM:  # a class of PEFT's tests
            value.transformers_class = StreamedAutoModel


class StreamedAutoModel:
    """Stands in for AutoModelForCausalLM."""

    @staticmethod
    def from_pretrained(name: Any, **options: Any) -> torch.nn.Module:
        return opened(str(name), **options)

    @staticmethod
    def from_config(config: transformers.PreTrainedConfig, **options: Any) -> torch.nn.Module:
        return streamed(AutoModelForCausalLM.from_config(config, **options))


def _changed_before(module: ModuleType, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the model that a class of PEFT's tests opens and changes, streamed after the change."""
    with mock.patch.object(module, "AutoModelForCausalLM", AutoModelForCausalLM):
        return streamed(original(*args, **options))


def opened(name: str, **options: Any) -> torch.nn.Module:
    """Return the streamed model of a folder or of the hub."""
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    _count()
    return horizon_lm.from_pretrained(name, precision=_precision(dtype), **options)


def streamed(model: Any) -> Any:
    """Return a model streamed; None and a model that is streamed already are returned as they are."""
    if not isinstance(model, torch.nn.Module) or hasattr(model, "_horizon"):
        return model
    _count()
    return horizon_lm.stream(
        model, precision=_precision(next(p.dtype for p in model.parameters() if p.is_floating_point()))
    )


def streamed_trainer(cls: type[Trainer]) -> type[Trainer]:
    """Return our trainer of a class, which streams the models that it is given, or opens them by name."""
    signature = inspect.signature(cls.__init__)

    class Streamed(horizon_lm.trainer(cls)):
        def __init__(self, *args: Any, **kwargs: Any):
            given = signature.bind_partial(self, *args, **kwargs).arguments
            given.pop("self")
            given |= given.pop("kwargs", {})
            seeded: Any = nullcontext()
            if isinstance(given.get("model"), str):
                if "Reward" in cls.__name__:  # the trainer sets the seed, draws a score and then adapters
                    transformers.set_seed(getattr(given.get("args"), "seed", 42))
                    seeded = mock.patch.object(sys.modules[cls.__module__], "set_seed")
                given["model"] = opened(given["model"], **_options_of_name(cls, given.get("args")))
            for name in ("model", "ref_model"):
                if name in given:
                    given[name] = streamed(given[name])
            with seeded:
                super().__init__(**given)

    Streamed.__name__, Streamed.__qualname__, Streamed.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Streamed


def _options_of_name(cls: type[Trainer], arguments: Any) -> dict[str, Any]:
    """Return the options with which a trainer of TRL opens a model that it is given by name, and clear them in its arguments."""
    given = getattr(arguments, "model_init_kwargs", None) or {}
    options = {"dtype": "float32"} | given
    if given:
        arguments.model_init_kwargs = None
    if getattr(arguments, "trust_remote_code", False):
        options.setdefault("trust_remote_code", True)
    if "Reward" in cls.__name__:
        options = {"num_labels": 1, "model_class": AutoModelForSequenceClassification} | options
    return options


def _precision(dtype: torch.dtype | None) -> str:
    return "bf16" if dtype == torch.bfloat16 else "float32"


def _count() -> None:
    global COUNT
    COUNT += 1
