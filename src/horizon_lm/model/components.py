"""Tell apart the towers, the projector and the language model of a model, each of which a run can freeze."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from horizon_lm.errors import StreamingError
from horizon_lm.model.towers import outermost_towers
from horizon_lm.model.units import find_blocks

# Names of a projector inside a tower, or of one that is a model of transformers itself.
_PROJECTORS = frozenset({
    "merger", "patch_merger", "connector", "aligner", "resampler", "qformer", "projector", "multi_modal_projector", "mm_projector",
})  # fmt: skip


class Component(Enum):
    """A component of a model; its value is its name in the settings of LLaMA-Factory.

    The language model includes the embedding and the head, and a model of text is nothing else. A tower encodes images, video or audio.
    The projector is what lies between both.
    """

    VISION_TOWER = "vision_tower"
    PROJECTOR = "multi_modal_projector"
    LANGUAGE_MODEL = "language_model"

    @property
    def setting(self) -> str:
        """The name of the setting that freezes it."""
        return f"freeze_{self.value}"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.value.removeprefix("multi_modal_").replace("_", " ")


def frozen_components(run: Any) -> frozenset[Component]:
    """Return the components that a run's settings freeze: none if patterns decide what is trained, or if an adapter has its own layers."""
    if run.trainable is not None or run.adapter_name_or_path is not None:
        return frozenset()
    return frozenset(each for each in Component if getattr(run, each.setting))


def reject_gradients(model: Any, components: Collection[Component]) -> None:
    """Let the towers of a model raise StreamingError in passes with gradients, because these components get none: no row has an image."""
    titles = " and ".join(each.title for each in Component if each in components)

    def reject(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            raise StreamingError(
                f"a training step reaches {type(module).__name__}, but no training row has an image, so the {titles} "
                f"{'is' if len(components) == 1 else 'are'} frozen; name what is trained in the setting trainable"
            )

    for tower in outermost_towers(model, find_blocks(model)[1]).values():
        tower.register_forward_pre_hook(reject)


def component_of_params(model: Any) -> dict[str, Component]:
    """Return the component of each parameter by full name. One in several places belongs to the language model, if one of them does."""
    of_modules = component_of_modules(model)
    found: dict[int, Component] = {}
    for path, component in of_modules.items():
        for param in model.get_submodule(path).parameters(recurse=False):
            if found.get(id(param)) is not Component.LANGUAGE_MODEL:
                found[id(param)] = component
    return {name: found[id(param)] for name, param in model.named_parameters()}


def component_of_modules(model: Any) -> dict[str, Component]:
    """Return the component of each module of a model by its path, in the order of the model.

    Raises:
        ModelNotSupportedError: the model has no list of decoder blocks.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    blocks = find_blocks(model)[1]
    towers = outermost_towers(model, blocks)
    if not towers:
        return dict.fromkeys(paths, Component.LANGUAGE_MODEL)
    of_text = {id(module) for module in _language_modules(model, blocks, towers.values())}

    def component_of(path: str) -> Component:
        if id(paths[path]) in of_text:
            return Component.LANGUAGE_MODEL
        in_tower = any(path == tower or path.startswith(f"{tower}.") for tower in towers)
        is_projector = not in_tower or not _PROJECTORS.isdisjoint(path.split("."))
        return Component.PROJECTOR if is_projector else Component.VISION_TOWER

    return {path: component_of(path) for path in paths}


def _language_modules(model: Any, blocks: nn.ModuleList, towers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of the language model: embedding, head, and the largest model around the blocks that has no tower.

    If each model around the blocks has towers, it is the smallest one without them and without the modules that hold them.
    """
    from transformers import PreTrainedModel

    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        yield from () if table is None else table.modules()
    around: list[nn.Module] = [
        each for each in model.modules() if isinstance(each, PreTrainedModel) and _has(each, [blocks])
    ]
    language = next((each for each in around if not _has(each, towers)), around[-1])
    pending = [language]
    while pending:
        module = pending.pop()
        yield module
        pending.extend(each for each in module.children() if _has(each, [blocks]) or not _has(each, towers))


def _has(module: nn.Module, wanted: Collection[nn.Module]) -> bool:
    """Return whether one of the wanted modules is this module or inside it."""
    return not {id(each) for each in wanted}.isdisjoint(id(each) for each in module.modules())


def modules_of(components: Mapping[str, Component], wanted: Collection[Component]) -> Sequence[str]:
    """Return the paths of the outermost modules that belong to wanted components with all that is inside them.

    Args:
        components: the component of each module, in the order of the model (`component_of_modules`).
        wanted: the wanted components.
    """
    mixed = {""}  # paths of modules around a module that is not wanted
    for path, component in components.items():
        if component not in wanted:
            parts = path.split(".")
            mixed |= {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
    return [path for path in components if path not in mixed and path.rpartition(".")[0] in mixed]
