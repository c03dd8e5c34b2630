"""Write docs/generated/compatibility.md and report failing rows: python -m tests.seams."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tests.seams import rows  # noqa: F401  (fills the table)
from tests.seams.page import PAGE, page
from tests.seams.seam import ROWS, all_cases, run

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    PAGE.write_text(page(), encoding="utf-8")
    outcomes = {(key, name): run(key, name) for key, name in all_cases()}
    wrong = [
        f"{key}-{name}: {each.kind}, {each.message}"
        for (key, name), each in outcomes.items()
        if not ROWS[key].allows(each)
    ]
    print(f"{PAGE}: {len(outcomes)} cases, {len(wrong)} wrong", *wrong, sep="\n  ")
    sys.exit(bool(wrong))
