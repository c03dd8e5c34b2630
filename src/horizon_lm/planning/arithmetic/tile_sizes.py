"""The sizes of tiles into which a mixture's experts can be cut in a run."""

from horizon_lm.common.optimizers import NO_MATRICES_OF_TILES
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.request import Request

NOT_COMPILED = "compile=True compiles whole blocks, which expert_tile cuts; leave one of them unset"


def no_experts(name: str) -> str:
    """Return why a model's blocks cannot be cut."""
    return (
        f"expert_tile: {name} has no experts that can be cut into tiles (only those of transformers' experts interface can, without "
        "weights that they share and without adapters of their biases); leave it unset"
    )


def require_tiles(outline: ModelOutline, request: Request) -> None:
    """Raise ConfigError if a run cannot have the tiles that it asks for, and ModelNotSupportedError if its model cannot."""
    if request.expert_tile is None:
        return
    if problem := _excluding_setting(request):
        raise ConfigError(problem)
    if not outline.layout.experts:
        raise ModelNotSupportedError(no_experts(outline.name))


def _excluding_setting(request: Request) -> str:
    """Return the reason why a setting of the run excludes tiles; empty if none does."""
    if request.compile is True:
        return NOT_COMPILED
    return NO_MATRICES_OF_TILES if request.optimizer.orthogonalizes else ""


def tile_sizes(outline: ModelOutline, request: Request) -> list[int]:
    """Return the numbers of experts in a tile to try, largest first: powers of two that make at most `_MOST_TILES` tiles. None if a run
    cannot have tiles, or if the costs of the model are unknown.
    """
    if _excluding_setting(request) or outline.unknown:
        return []
    num_experts = max((each.count for each in outline.layout.experts.values()), default=0)
    powers = (2**exponent for exponent in reversed(range(num_experts.bit_length())))
    return [size for size in powers if num_experts / _MOST_TILES <= size < num_experts]


_MOST_TILES = 64  # of a block: smaller tiles are slower, and if these do not fit, something else is too large
