"""The cost of orthogonalizing matrices on the device: work and memory. `optim.muon` has the computation."""

from collections.abc import Iterable

from horizon_lm.common.constants import ORTHOGONALIZED_AT_ONCE, ORTHOGONALIZING_STEPS
from horizon_lm.memory.layout.model import MatrixShape
from horizon_lm.planning.arithmetic.outline import Work


def orthogonalizing_work(matrices: Iterable[MatrixShape]) -> Work:
    """Return the work of orthogonalizing these matrices, in bfloat16."""
    total = Work()
    for count, rows, columns in matrices:
        short, long = sorted((rows, columns))
        # Each iteration has three products: the matrix by its transpose, that product by itself, and a sum of both by the matrix.
        products = 4 * short * short * long + 2 * short**3
        touched = 2 * (4 * short * long + 5 * short * short)  # bytes that they read and write, 2 for an element
        steps = count * ORTHOGONALIZING_STEPS
        groups = -(-count // _at_once(count, rows, columns))
        # Around the iterations are five operations: the matrix is rounded, its norm is computed and clamped, it is divided by the norm
        # and written back.
        total += Work(
            products=steps * products, product_bytes=steps * touched,
            moved_bytes=16.0 * count * short * long, num_ops=groups * (3 * ORTHOGONALIZING_STEPS + 5),
        )  # fmt: skip
    return total


def orthogonalizing_bytes(matrices: Iterable[MatrixShape]) -> int:
    """Return the most device memory that orthogonalizing one of these groups of matrices takes, beside the matrices themselves."""
    return max((_group_bytes(*each) for each in matrices), default=0)


def _group_bytes(count: int, rows: int, columns: int) -> int:
    short = min(rows, columns)
    return _at_once(count, rows, columns) * 2 * (2 * rows * columns + 2 * short * short)


def _at_once(count: int, rows: int, columns: int) -> int:
    return min(count, max(1, ORTHOGONALIZED_AT_ONCE // (rows * columns)))
