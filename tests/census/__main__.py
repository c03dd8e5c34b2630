"""Run the census: ``python -m tests.census run``, then ``python -m tests.census render``."""

from tests.census.command import main

if __name__ == "__main__":
    main()
