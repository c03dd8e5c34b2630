"""Compute a model's loss with compiled code, which makes no tensor of the size of the logits but their gradient.

Shapes: N tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

import torch
from transformers import PreTrainedModel

from horizon_lm.model.compiling import compile_function, mark_varying


@contextmanager
def compiled_loss(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: let the model's forward compute its loss over a chunk with the compiled version of its loss function.

    It adds up in another order than the function itself, so bits may differ.
    """
    function = model.loss_function

    def compute(*args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:  # logits (1, N, V) and labels (1, N)
                mark_varying(tensor, [1])
        return compile_function(function)(*args, **kwargs)

    with loss_computed_by(model, compute):
        yield


@contextmanager
def loss_computed_by(model: PreTrainedModel, compute: Callable[..., Any]) -> Iterator[None]:
    """Context manager: let the model's forward compute its loss with this function.

    Nothing is changed if the model's loss function is not a plain function, such as a module with weights.
    """
    if not isfunction(model.loss_function):
        yield
        return
    before = vars(model).get("_loss_function")  # which transformers' property returns, if it was set
    model.loss_function = compute
    try:
        yield
    finally:
        if before is None:
            del model._loss_function
        else:
            model.loss_function = before
