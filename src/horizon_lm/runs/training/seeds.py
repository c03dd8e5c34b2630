"""The random numbers of a step, which follow from the seed of the run and the number of the step."""

import numpy as np


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step: the first 32-bit word of numpy's ``SeedSequence((seed, step))``.

    After `transformers.set_seed` with this seed, plain Hugging Face draws the same dropout in a step of one
    micro-batch.

    Args:
        seed: the seed of the run.
        step: the step, counted from 1.
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_step(seed: int, step: int) -> None:
    """Seed Python, numpy and torch, on the host and on all devices, for a step."""
    from transformers import set_seed

    set_seed(step_seed(seed, step))
