"""Fixtures of the command-line tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.cost import model_outline
from tests.e2e import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model, for tests that do not change it."""
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="session")
def outlines() -> Iterator[Any]:
    """Outline a model once for all runs in this process, because every plan of a tiny run would take most of its time.

    Yields:
        The function that outlines a model, for tests that change it.
    """
    known: dict[Any, Any] = {}
    outline_model = model_outline.outline_model

    def outline(source: Any, **options: Any) -> Any:
        key = (
            source.config.to_json_string(use_diff=False),
            source.place,
            source.attn_implementation,
            *options.values(),
        )
        if key not in known:
            known[key] = outline_model(source, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_outline, "outline_model", outline)
        yield outline_model
