"""The replaced forward methods of streamed modules, and the structure of the model around them."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.errors import StreamingError
from horizon_lm.model.block_template import Structure
from horizon_lm.model.parts import ModelParts


class ReplacedForwards:
    """The forward methods of streamed modules, which compute with the model's streamed weights.

    Args:
        parts: the parts of the model.
        blocks: its blocks.
        forwards: the new forward method of each streamed module.
    """

    def __init__(self, parts: ModelParts, blocks: Blocks, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._model, self._blocks = weakref.ref(parts.model), blocks
        self._replaced = list(forwards.items())
        # Each module, and the forward that other code has set on it, which `restore` puts back; None if it has its class's forward.
        self._forwards_before = [(module, module.__dict__.get("forward")) for module in forwards]
        self.replace()
        # Without blocks, which compare their own structure when they are bound, and without the model itself, which would
        # close a cycle here and is left to `_root_ids`.
        inside = {id(module) for block in parts.blocks for module in block.modules()}
        self._structure = Structure(
            module for module in parts.model.modules() if id(module) not in inside and module is not parts.model
        )
        self._old_root = self._root_ids()

    def replace(self) -> None:
        """Replace the forward methods."""
        for module, forward in self._replaced:
            module.forward = forward  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give streamed modules their own forward methods back, and remove the replaced ones from copies of these modules."""
        replaced = {id(forward) for _, forward in self._replaced}
        # Modules that are in the model now: PEFT's copies for `modules_to_save` have the replaced forwards, too.
        for module in self._live_model().modules():
            if id(module.__dict__.get("forward")) in replaced:
                del module.forward
        for module, forward in self._forwards_before:
            if forward is not None:
                module.forward = forward

    def is_structure_changed(self) -> bool:
        """Return whether a module or parameter of the model was added, removed or replaced."""
        return self._root_ids() != self._old_root or self._structure.is_changed() or self._blocks.is_structure_changed()

    def require_structure(self) -> None:
        """Raise StreamingError if other code has changed the modules or parameters, whose weights would be written under old names."""
        if self.is_structure_changed():
            raise StreamingError(
                "a module or parameter of the model was added, removed or replaced after horizon_lm.stream(), so its weights "
                "cannot be written under their names; undo the change, or make it first, then stream the model"
            )

    def require_unchanged(self) -> None:
        """Raise StreamingError if other code has replaced a module, a parameter or a forward method of the model."""
        self._structure.require_unchanged("outside of blocks")
        if self._root_ids() != self._old_root:
            raise StreamingError(
                "a module of the model was added, removed or replaced after horizon_lm.stream(); change the model first, then "
                "stream it"
            )
        for module, forward in self._replaced:
            if module.__dict__.get("forward") is not forward:
                raise StreamingError(
                    f"the forward of a streamed {type(module).__name__} was replaced after horizon_lm.stream(), so it would "
                    "compute without the model's streamed weights; replace it before streaming, or replace the forward of "
                    "an inner module"
                )

    def _live_model(self) -> nn.Module:
        """Return the model. The reference is weak, but the caller uses the model, so it exists."""
        model = self._model()
        assert model is not None
        return model

    def _root_ids(self) -> list[int]:
        """Return the identities of the model's own children and parameters."""
        model = self._live_model()
        return [*map(id, model._modules.values()), *map(id, model._parameters.values())]


def weakly(method: Callable[..., Any], *leading: Any) -> Callable[..., Any]:
    """Return a function that calls a method with these leading arguments, and refers to its object weakly."""
    # The module holds this function: a strong reference back to the model would be a cycle (`ModelForward`).
    ref = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        function = ref()
        assert function is not None, "the streamed model is gone"
        return function(*leading, *args, **kwargs)

    return call


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs a module's original forward method, and refers to the module weakly."""
    replaced = module.__dict__.get("forward")
    if replaced is not None:
        # Other code has set it before the model was streamed; its function may refer to the module strongly, as that code likes.
        return replaced  # type: ignore[no-any-return]
    ref = weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        live_module: Any = ref()
        return type(live_module).forward(live_module, *args, **kwargs)

    return forward
