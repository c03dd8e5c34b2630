"""Give a skeleton the dtypes and buffers that transformers' own ``from_pretrained`` gives a model.

transformers builds a model on the meta device under the dtype that it is opened with. Buffers without a file are computed
afterwards, by the model's initialisation, and in that dtype; a few tensors stay in float32, whatever the dtype.
"""

import copy
import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Words of torch's messages about operands whose dtypes do not fit.
_OF_DTYPES = re.compile("dtype|scalar type|bfloat16", re.IGNORECASE)


def opened_dtype(precision: str) -> torch.dtype:
    """Return the dtype that transformers would open a model with for a precision: bfloat16, which is what is computed
    with, unless the precision is ``float32``.
    """
    return torch.float32 if precision == "float32" else torch.bfloat16


def open_like_transformers(model: Any) -> None:
    """Set the dtypes of a skeleton's tensors, and the values of its buffers.

    Args:
        model: a skeleton that was built under the dtype that it is opened with, with parameters on the meta device and
            buffers in memory.
    """
    _keep_in_float32(model)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    with torch.random.fork_rng(devices=()):  # some initialisations draw numbers even if nothing is to be drawn
        model.initialize_weights()


def kept_in_float32(model: Any, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Return the tensors, by full name, that transformers keeps in float32 if it opens the model in another dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)  # by patterns of names
    if not plan:
        return set()
    pattern = build_glob_alternation(list(plan))[0]
    return {name for name in names if pattern.search(name)}


def created_in_float32(model: Any, names: Iterable[str]) -> set[str]:
    """Return the weights, by full name, that the model's own code creates in float32 even if the model is built in bfloat16.

    transformers leaves them in float32 when it opens a folder. The set is empty if the model's operations reject operands of two dtypes.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
        dtypes = {name: parameter.dtype for name, parameter in built.named_parameters(remove_duplicate=False)}
        found = {name for name in names if dtypes.get(name) == torch.float32}
        return found if found and _accepts_its_dtypes(built) else set()


def _accepts_its_dtypes(model: Any) -> bool:
    """Return whether no operation of a model on the meta device rejects the dtypes of its operands; other errors do not count."""
    try:
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:  # such as those of code that reads values, which are not there
        return _OF_DTYPES.search(str(error)) is None
    return True


def _keep_in_float32(model: Any) -> None:
    """Convert to float32 the parameters and saved buffers of a skeleton that transformers keeps in it (`kept_in_float32`)."""
    state = model.state_dict(keep_vars=True)
    for name in kept_in_float32(model, state, model.config.dtype or torch.get_default_dtype()):
        path, _, attribute = name.rpartition(".")
        module, tensor = model.get_submodule(path), state[name]
        if isinstance(tensor, nn.Parameter):
            module._parameters[attribute] = nn.Parameter(tensor.float(), tensor.requires_grad)
        elif tensor.is_floating_point():
            module._buffers[attribute] = tensor.float()
