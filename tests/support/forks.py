"""One process per process of tests from which ranks and runs are forked, because importing and compiling takes seconds."""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "horizon_lm.cli.train",
        "horizon_lm.integrations.trainer",
        "trl",
        "tests.distributed.training",
        "tests.support.warm",
    ]
)
