"""Seeds of the steps of a run: what happens between two steps cannot change the dropout of the next one."""

import numpy as np


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step.

    The first 32-bit word of numpy's ``SeedSequence((seed, step))``. Given to `transformers.set_seed`, it makes plain Hugging
    Face draw the same dropout in a step of one micro-batch.

    Args:
        seed: of the run.
        step: from 1.
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_step(seed: int, step: int) -> None:
    """Seed the generators of Python, numpy and torch, on the host and on all devices, for a step of a run."""
    from transformers import set_seed

    set_seed(step_seed(seed, step))
