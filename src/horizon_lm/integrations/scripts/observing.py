"""See how a script loads, moves and calls models, and let streamed ones take their place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
    Trainer,
)

from horizon_lm.engine.opening.streamed_model import StreamedModel
from horizon_lm.engine.streamed import is_streamed
from horizon_lm.integrations.scripts.arguments import asks_for_codes, kept_arguments
from horizon_lm.integrations.scripts.loops import Loops
from horizon_lm.integrations.scripts.streaming import ScriptModels
from horizon_lm.integrations.scripts.trainers import made_by_scripts

_CLASSES = {"ForCausalLM": AutoModelForCausalLM, "ForSequenceClassification": AutoModelForSequenceClassification}
_STREAMED_ENDS = (*_CLASSES, "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")


@contextmanager
def observing(models: ScriptModels) -> Iterator[None]:
    """Context manager: observe all models of transformers.

    Loading is seen at the methods that every class of a model inherits. The classes for automatic choice have copies of theirs, which call these.
    """
    loops = Loops(models)
    with ExitStack() as stack:

        def replace(owner: Any, name: str, replacement: Any) -> None:
            stack.enter_context(patch.object(owner, name, replacement, create=True))

        loader = _Loader(models)
        replace(PreTrainedModel, "from_pretrained", classmethod(loader.from_pretrained))
        replace(PreTrainedModel, "_from_config", classmethod(loader.from_config))
        owners: list[Any] = [PreTrainedModel, StreamedModel]
        if find_spec("peft") is not None:
            from peft import PeftModel

            owners.append(PeftModel)
        for owner in owners:
            for name in ("to", "cuda"):
                replace(owner, name, _moved_nowhere(models, name, getattr(owner, name)))
            if owner is not StreamedModel:  # which is mixed into classes of transformers
                replace(owner, "__call__", loops.called(owner.__call__))
        replace(GenerationMixin, "generate", loops.called(GenerationMixin.generate, "generate"))
        loops.observe_accelerate(replace)
        # If it was deleted afterwards, the class would have that of `object`, which Python lets take no arguments then.
        stack.callback(setattr, Trainer, "__new__", _without_signature(_new))
        trainers: Any = Trainer
        trainers.__new__ = _without_signature(made_by_scripts(models))
        yield


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make an instance, as a class without a `__new__` does."""
    return object.__new__(cls)


def _without_signature(new: Callable[..., Any]) -> Any:
    """Return a function as a `__new__` whose signature `inspect` does not take for that of the class, which is that of its constructor."""
    return staticmethod(partial(new).__call__)


class _Loader:
    """A replacement of the methods by which models are loaded, or made of a config."""

    def __init__(self, models: ScriptModels) -> None:
        self._models, self._is_loading = models, False
        self._pretrained: Any = vars(PreTrainedModel)["from_pretrained"].__func__
        self._of_config: Any = vars(PreTrainedModel)["_from_config"].__func__

    def from_pretrained(self, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as the script asks for, in host memory. One with quantized weights is streamed at once."""
        name = pretrained_model_name_or_path
        if self._is_loading or not _may_be_streamed(cls):
            return self._pretrained(cls, name, *args, **kwargs)
        kept = kept_arguments(kwargs, self._models.say)
        config = kept.get("config")
        if config is None:
            config = _config_of(name, kept)
        with self._loading():
            if config is not None and asks_for_codes(config, kept):
                auto = next((auto for end, auto in _CLASSES.items() if cls.__name__.endswith(end)), None)
                return self._models.open_named(str(name), "auto", auto, **{"config": config} | kept)
            loaded = self._pretrained(cls, name, *args, **kept)
        self._models.add(loaded[0] if isinstance(loaded, tuple) else loaded)  # a tuple with output_loading_info
        return loaded

    def from_config(self, cls: Any, config: Any, **kwargs: Any) -> Any:
        """Make a model of a config."""
        if self._is_loading or not _may_be_streamed(cls):
            return self._of_config(cls, config, **kwargs)
        with self._loading():
            made = self._of_config(cls, config, **kwargs)
        self._models.add(made)
        return made

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Context manager: the parts of a model are loaded by the same methods, and are no models of their own."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False


_OF_CONFIG = ("trust_remote_code", "revision", "code_revision", "cache_dir", "token", "subfolder", "local_files_only")


def _config_of(name: Any, kept: Mapping[str, Any]) -> Any:
    """Return the config of a folder or hub id; None for those that only the class knows, such as a type of the script or adapters."""
    try:
        return AutoConfig.from_pretrained(name, **{key: kept[key] for key in _OF_CONFIG if key in kept})
    except (OSError, ValueError):  # transformers says why, where the class cannot load it either
        return None


def _may_be_streamed(cls: Any) -> bool:
    """Return whether a class has the head of a model that may be streamed. Others, such as encoders, are the script's to place."""
    return any(cls.__name__.endswith(end) for end in _STREAMED_ENDS)


def _moved_nowhere(models: ScriptModels, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces `to` or `cuda`: a model that is streamed, or may be later, is cast, but not moved."""

    def move(model: Any, *args: Any, **kwargs: Any) -> Any:
        record = models.waits(model)
        if record is None and not is_streamed(model):
            return original(model, *args, **kwargs)
        if name == "cuda":
            given: Any = args[0] if args else kwargs.get("device")
            device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given or "cuda")
            dtype = None
        else:
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if record is not None and device is not None:
            record.device = device
        return model if dtype is None else original(model, dtype)

    return move
