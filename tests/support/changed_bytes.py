"""Change bytes at random, for fuzzing."""

import random
from collections.abc import Sequence


def changed_bytes(content: bytes, rng: random.Random, tokens: Sequence[bytes]) -> bytes:
    """Return a copy with a few random changes, most of them near the beginning.

    tokens: bytes that mean something to what reads them.
    """
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(min(len(data), rng.choice((16, 1000, 1 << 30))) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 1, 4, 8, 30)))
        kind = rng.randrange(6)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[start:stop]
        elif kind == 2:
            data[start:stop] = rng.choice(tokens)
        elif kind == 3:
            data[start:start] = data[start:stop] * rng.choice((1, 2, 50))
        elif kind == 4:
            data[start:stop] = rng.randbytes(stop - start)
        else:
            del data[rng.choice((start, len(data) - 1, len(data))) :]
    return bytes(data)
