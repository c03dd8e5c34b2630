"""What the pages say of a GPU is what the results have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "CHANGELOG.md", "docs/benchmarks.md")
DATA_SHEET = 989  # TFLOP/s


def measured(model: str) -> dict[str, list[str]]:
    """Return the cells of a result's rows, by system."""
    text = (RESULTS / f"gpu_{model}_h100_2026-11-26.md").read_text()
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| qwen")]
    return {cells[2].strip(): [cell.strip() for cell in cells] for cells in rows}


def shown(cells: list[str]) -> str:
    """Return seconds, tokens/s, TFLOP/s and the share of the data sheet as the table of the benchmarks has them."""
    seconds, tokens, flops = cells[3].split()[0], cells[4], cells[6]
    return f"| {seconds} | {tokens} | {flops} | {round(100 * int(flops) / DATA_SHEET)}% |"


@pytest.mark.parametrize(
    ("row", "model", "system"),
    [
        ("Qwen2.5-3B, streamed", "3b", "horizon"),
        ("Qwen2.5-3B, resident, compiled, recomputed, **without an optimizer**", "3b", "resident, compiled, 8 rows at once"),
        ("Qwen2.5-7B, streamed: 106 GiB in host memory", "7b", "horizon"),
    ],
)  # fmt: skip
def test_the_table_of_the_benchmarks(row: str, model: str, system: str) -> None:
    cells = measured(model)[system]
    (line,) = [each for each in (ROOT / "docs/benchmarks.md").read_text().splitlines() if each.startswith(f"| {row} ")]
    assert line.startswith(f"| {row} {shown(cells)}")
    assert (cells[10] in line) == ("host memory" in row)
    if cells[5]:
        assert line.endswith(f"| {cells[5]} |")


@pytest.mark.parametrize("page", PAGES)
def test_figures_in_sentences(page: str) -> None:
    """Each rate, share and duration beside the word TFLOP/s, tokens or data sheet is one of the results'."""
    rows = [cells for model in ("3b", "7b") for cells in measured(model).values()]
    text = " ".join((ROOT / page).read_text().split())
    rates = {cells[4] for cells in rows}
    flops = {cells[6] for cells in rows}
    shares = {str(round(100 * int(cells[6]) / DATA_SHEET)) for cells in rows}
    assert set(re.findall(r"at ([\d,]+) tokens a second", text)) <= rates
    assert set(re.findall(r"(\d+) TFLOP/s of (?:the model's|its) own", text)) <= flops
    assert set(re.findall(r"(\d+)% of the data sheet's 989", text)) <= shares
    found = re.findall(r"[\d,]+ tokens a second|TFLOP/s of (?:the model's|its) own|data sheet's 989", text)
    assert found, "the page has no such sentence, so this test does nothing"


def test_what_the_resident_model_lacks_is_said() -> None:
    for page in (*PAGES, "benchmarks/results/first_contact_h100_2026-11-26.md"):
        text = (ROOT / page).read_text()
        assert re.search("no optimizer|without an optimizer", text), page
        assert "cannot be resident |" not in text
        assert "cannot be resident," not in text
