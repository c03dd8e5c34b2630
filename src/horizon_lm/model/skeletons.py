"""A skeleton: a model whose parameters are on the meta device, with the buffers of one with weights."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.model.config_limits import num_elements, require_few_parameters, require_small_buffer
from horizon_lm.model.generation import read_generation_config
from horizon_lm.model.hf_config import auto_class
from horizon_lm.model.opening import open_like_transformers


def skeleton_of(config: Any, place: str, **options: Any) -> Any:
    """Return the model of a config without weights (`build_skeleton`); raise ConfigError, naming ``place``, if it cannot be built."""
    try:
        return build_skeleton(config, **{name: value for name, value in options.items() if value is not None})
    except HorizonError:
        raise
    except Exception as error:  # the model's own code, with any values of its config
        attention = options.get("attn_implementation")
        if attention is not None and isinstance(error, ImportError):  # a kernel that is not installed
            raise ConfigError(
                f"attn_implementation: {attention} cannot be used here ({first_line(error)}); choose sdpa, or varlen, which "
                "needs no package"
            ) from error
        raise ConfigError(
            f"{place}: transformers cannot build this model ({first_line(error)}); correct its config.json, or the setting "
            "that the message names"
        ) from error


def open_skeleton(folder: Path, config: Any, **options: Any) -> Any:
    """Return the model in a folder without weights, with its generation config; raise ConfigError if one of them cannot be made."""
    model = skeleton_of(config, str(folder), **options)
    if (settings := read_generation_config(folder)) is not None:
        model.generation_config = settings
    return model


_FACTORIES = (torch.ones, torch.zeros, torch.full, torch.rand, torch.randn, torch.arange)
_LARGE = 2**24  # elements; few buffers have as many, but the experts of one block may exceed host memory


class _LargeOnMeta(TorchFunctionMode):
    """A mode that allocates ``torch.empty``, and what other factories make of more elements than a limit, on the meta device.

    Without a limit all of it is computed, as buffers are, and an absurd size is rejected before it is allocated.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif func in _FACTORIES:
            num_sizes = 1 if func is torch.full else None  # the second argument of `torch.full` is a value
            sizes = [*args[:num_sizes], kwargs.get("size", ())]
            if self._limit is None:
                require_small_buffer(sizes)
            elif num_elements(sizes) > self._limit:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta(limit: int | None) -> Iterator[None]:
    """Context manager: turn every parameter that any module registers into a meta tensor, but compute buffers.

    ``limit``: elements of the largest buffer that is computed; None computes all.
    ``torch.device("meta")`` would also put buffers (rotary frequencies, scales) on the meta device.
    """
    original, count = nn.Module.register_parameter, itertools.count(1)

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        require_few_parameters(next(count))
        original(module, name, param)
        if param is not None and param.device.type != "meta":
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta(limit):
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _build(config: Any, model_class: Any, limit: int | None, options: dict[str, Any]) -> Any:
    """Return the model of a config as its class builds it, without weights. ``limit``: see `parameters_on_meta`."""
    from transformers.initialization import no_init_weights

    # Random initialization on the meta device has no effect, but takes most of the time of building a model. Some classes draw
    # parameters by themselves; in transformers they do so on the meta device, which leaves the caller's random state alone.
    with no_init_weights(), parameters_on_meta(limit), torch.random.fork_rng(devices=()):
        return auto_class(model_class, config).from_config(config, **{"trust_remote_code": False, **options})


def _buffers_on_meta(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]


def build_skeleton(config: Any, model_class: Any = None, **options: Any) -> nn.Module:
    """Return the model of a Hugging Face config without weights, in evaluation mode, of the class that `auto_class` gives.

    Its buffers, and the dtypes of all its tensors, are those that transformers gives a model that is opened with the option
    ``dtype``; without this option, with the dtype of the config.
    """
    # Large tensors are computed in a second try only, if a buffer or a computation needs them.
    try:
        model = _build(config, model_class, _LARGE, options)
    except RuntimeError:
        model = None
    if model is None or _buffers_on_meta(model):
        model = _build(config, model_class, None, options)
    lost = _buffers_on_meta(model)
    assert not lost, f"{type(model).__name__}: the buffer {lost[0]} was made by torch.empty"
    open_like_transformers(model)
    model.tie_weights()
    model.config.name_or_path = model.config.name_or_path or config.name_or_path  # of a part of a config, it is empty
    return model.eval()


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are meta tensors, without duplicating weights even temporarily."""
    import copy

    memo: dict[int, Any] = {  # objects that the copy has in place of others, by their identities
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for param in module.parameters()
    }
    for part in module.modules():  # hooks may refer to anything, so share them with the copy
        memo |= {id(hooks): hooks for name, hooks in part.__dict__.items() if name.endswith("_hooks")}
    return copy.deepcopy(module, memo)
