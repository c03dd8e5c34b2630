"""The components of a run's model that its settings freeze: check them, and say what they are."""

from collections.abc import Collection

from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component, component_of_params, frozen_components
from horizon_lm.runs.admission.inputs import Source
from horizon_lm.runs.config import RunConfig


def frozen_notes(run: RunConfig, source: Source) -> list[str]:
    """Return a sentence about the components of the model that a run freezes by its settings; empty if it has none of them.

    Raises:
        ConfigError: a setting is about a component that the model does not have.
    """
    if source.is_streamed or run.trainable is not None or run.adapter_name_or_path is not None:
        return []
    model, frozen = source.model.skeleton(), frozen_components(run)
    components = component_of_params(model)
    for each in Component:
        _require_component(run, each, components.values())
    numels = {name: param.numel() for name, param in model.named_parameters() if components[name] in frozen}
    found = [each for each in Component if each in {components[name] for name in numels}]
    if not found:
        return []
    names, settings = " and ".join(each.title for each in found), " or ".join(each.setting for each in found)
    return [
        f"model: {names} {'is' if len(found) == 1 else 'are'} frozen: {sum(numels.values()):,} parameters; set {settings} to false to train them"
    ]


def _require_component(run: RunConfig, component: Component, present: Collection[Component]) -> None:
    """Raise ConfigError if a setting is changed that is about a component which is not present in the model."""
    value, default = getattr(run, component.setting), type(run).model_fields[component.setting].default
    if value != default and component not in present:
        raise ConfigError(f"{component.setting}: {str(value).lower()}: the model has no {component.title}; remove it")
