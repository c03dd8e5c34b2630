"""The components of a run's model that are frozen, by its settings or because no row reaches them: check them, and say what they are."""

from collections.abc import Collection

from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component, component_of_params, frozen_components
from horizon_lm.model.image_inputs import takes_images
from horizon_lm.runs.admission.inputs import RowShape, Source
from horizon_lm.runs.config import RunConfig


def freeze_unreached(run: RunConfig, source: Source, rows: RowShape) -> RunConfig:
    """Return the run with the settings that freeze the components which none of its rows reaches.

    Raises:
        ConfigError: nothing is left to train.
    """
    if _may_have_images(source, rows) or not (unreached := trained_beside_text(run, source)):
        return run
    if run.freeze_language_model:
        raise ConfigError(
            "freeze_language_model: true leaves nothing to train, because no row has an image; remove it, or add rows with images"
        )
    return run.model_copy(update={each.setting: True for each in unreached})


def trained_beside_text(run: RunConfig, source: Source) -> frozenset[Component]:
    """Return the components that a run trains by its settings, but freezes if no row has an image."""
    if not _freezes_components(run, source):
        return frozenset()
    return source.beside_text() - frozen_components(run)


def frozen_notes(run: RunConfig, source: Source, rows: RowShape) -> list[str]:
    """Return sentences about the components of the model that a run freezes, or may freeze once its rows are read; empty if there are none.

    Args:
        run: the settings of the run, after `freeze_unreached`.
        source: the model of the run.
        rows: the shape of its rows.

    Raises:
        ConfigError: a setting is about a component that the model does not have.
    """
    if not _freezes_components(run, source):
        return []
    model, frozen = source.model.skeleton(), frozen_components(run)
    components = component_of_params(model)
    for each in Component:
        _require_component(run, each, components.values())
    numels = {name: param.numel() for name, param in model.named_parameters() if components[name] in frozen}
    found = {components[name] for name in numels}
    if not _may_have_images(source, rows) and found and found <= source.beside_text():
        return [f"model: {_named(found)} frozen, because no row has an image: {sum(numels.values()):,} parameters"]
    notes = []
    if found:
        settings, numel = " or ".join(each.setting for each in Component if each in found), sum(numels.values())
        notes.append(f"model: {_named(found)} frozen: {numel:,} parameters; set {settings} to false to train them")
    if rows.has_images is None and source.images is None and (trained := trained_beside_text(run, source)):
        notes.append(f"model: if no row has an image, {_named(trained)} frozen, too")
    return notes


def _freezes_components(run: RunConfig, source: Source) -> bool:
    """Return whether components are frozen, not weights by patterns, and not by the adapters that a run goes on with."""
    return not source.is_streamed and run.trainable is None and run.adapter_name_or_path is None


def _may_have_images(source: Source, rows: RowShape) -> bool:
    """Return whether a training row has an image or, before the rows are read, may have one."""
    if rows.has_images is not None or source.images is not None:
        return rows.has_images is not False
    return takes_images(source.model.skeleton())


def _named(components: Collection[Component]) -> str:
    """Return the names of components as the subject of a sentence, with its verb."""
    names = [each.title for each in Component if each in components]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _require_component(run: RunConfig, component: Component, present: Collection[Component]) -> None:
    """Raise ConfigError if a setting is changed that is about a component which is not present in the model."""
    value, default = getattr(run, component.setting), type(run).model_fields[component.setting].default
    if value != default and component not in present:
        raise ConfigError(f"{component.setting}: {str(value).lower()}: the model has no {component.title}; remove it")
