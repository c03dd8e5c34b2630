"""Other projects' own tests on streamed models: `python -m tests.peers`.

A suite is a set of another project's test files. Each test runs on plain models first, and, if it passes, on streamed ones; what its
trainings logged and the parameters that they left are compared, in addition to the test's own assertions. The sources of the
other projects are not part of this repository. They lie in a folder that git ignores, `.peers` by default:

    .peers/trl            `tests`, `scripts` and `pyproject.toml` of TRL's repository
    .peers/transformers   `tests` of the repository of transformers
    .peers/peft           the unpacked sdist of PEFT, which `python -m tests.peers sample` downloads
    .peers/hub            tiny models and data sets, which `python -m tests.peers hub` makes
    .peers/site           packages that the tests need and Horizon-LM does not; torchvision for models with images
    .peers/results        a JSON line for each test and mode
"""
