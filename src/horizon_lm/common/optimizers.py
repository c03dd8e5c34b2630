"""The optimizers that run files and transformers' trainers can name, with the figures that a plan needs of each.

Settings are read and runs are planned without torch. A module of `optim` has everything else of its optimizer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}
"""Bytes of a moment of a parameter, by the kind of moments. Those in 8 bits have scales, too."""
NO_MATRICES = "horizon_lm.Muon trains the matrices of blocks, and this model trains none of them; use AdamW, for example for adapters"
NO_MATRICES_OF_TILES = (
    "horizon_lm.Muon orthogonalizes matrices of whole blocks, which expert_tile cuts; use AdamW, or leave it unset"
)


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer in the table of all.

    Attributes:
        module, name: its module, and the name of its class there, which is also its name in `horizon_lm` and in reports.
        num_moments: moments of each parameter. An update reads and writes them once.
        orthogonalizes: matrices of blocks have one moment, which is orthogonalized on the device.
        settings: settings of a run that it uses, of those that not all optimizers use.
        aliases: transformers' names for it, with the kind of moments that each name means; empty if transformers lacks it.
    """

    module: str
    name: str
    num_moments: int
    orthogonalizes: bool = False
    settings: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def moments_held(self) -> str:
        """The number of moments, as the end of a sentence about parameters."""
        if self.orthogonalizes:
            return "one of matrices, two of others"
        return f"{'one' if self.num_moments == 1 else 'two'} per parameter"

    @property
    def updates_in_backward(self) -> bool:
        """True if a unit can be updated during the backward pass: its matrices are not orthogonalized after it."""
        return not self.orthogonalizes

    def moment_bytes(self, moments: str) -> int:
        """Return the bytes of a parameter's moments, without the scales of 8-bit moments. If matrices have fewer moments than other
        parameters, return those of a parameter in a matrix.
        """
        return (1 if self.orthogonalizes else self.num_moments) * MOMENT_BYTES[moments]

    def moments_of(self, trained: frozenset[str], matrices: Collection[str]) -> list[frozenset[str]]:
        """Return, for each moment, the full names of the parameters that have it.

        Args:
            trained: full names of all trained parameters.
            matrices: full names of the matrices of blocks. An optimizer that orthogonalizes them keeps one moment of them, the first of
                the result; the further moments belong to all other parameters.
        """
        if not self.orthogonalizes:
            return [trained] * self.num_moments
        return [trained.intersection(matrices), *[trained.difference(matrices)] * self.num_moments]


_LION = {"lion_32bit": "float32", "paged_lion_32bit": "float32", "lion_8bit": "8bit", "paged_lion_8bit": "8bit"}
_ADAMW_32BIT = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit")
_ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")

ADAMW = OptimizerEntry(
    "horizon_lm.optim.adamw",
    "AdamW",
    num_moments=2,
    settings=("adam_epsilon", "update_in_backward"),
    aliases=dict.fromkeys(_ADAMW_32BIT, "float32") | dict.fromkeys(_ADAMW_8BIT, "8bit"),
)
"""The optimizer that runs have by default, and that the seconds of an update are measured with."""
OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "adamw": ADAMW,
    "lion": OptimizerEntry(
        "horizon_lm.optim.lion", "Lion", num_moments=1, settings=("update_in_backward",), aliases=_LION
    ),
    "muon": OptimizerEntry(
        "horizon_lm.optim.muon", "Muon", num_moments=2, orthogonalizes=True, settings=("adam_epsilon",)
    ),
}


def by_other_name(theirs: str) -> tuple[str, str] | None:
    """Return the name here of an optimizer of transformers, and its kind of moments; None if there is none like it."""
    return next(((ours, each.aliases[theirs]) for ours, each in OPTIMIZERS.items() if theirs in each.aliases), None)


def users_of(setting: str) -> tuple[str, ...]:
    """Return the names of the optimizers that use a setting."""
    return tuple(name for name, each in OPTIMIZERS.items() if setting in each.settings)


def name_in_transformers(ours: str, moments: str) -> str:
    """Return transformers' name for an optimizer with this kind of moments, or else with any kind.

    For an optimizer that transformers does not have, the name is one of AdamW's.
    """
    aliases = OPTIMIZERS[ours].aliases or OPTIMIZERS["adamw"].aliases
    return next((theirs for theirs, kind in aliases.items() if kind == moments), next(iter(aliases)))
