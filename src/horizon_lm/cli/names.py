"""List the machines and models that plans know by name."""

from collections.abc import Iterator

from horizon_lm.model.known_models import known_models
from horizon_lm.planning.arithmetic.catalog import published


def name_lines() -> Iterator[str]:
    """Yield lines: published profiles with their machines, and known models with their sizes and other names."""
    yield "machines, for --device:"
    for name, profile in published().items():
        yield f"  {name:24} {profile.name}"
    yield ""
    yield "models, for --model, smallest first; their names may omit the organization:"
    for model in known_models():
        yield f"  {model.name:44} {model.parameters / 1e9:8.2f}B"
        yield from (f"    {alias}" for alias in model.aliases)
