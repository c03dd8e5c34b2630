"""``horizon-lm report``: write a run as an HTML page."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.common import exits
from horizon_lm.cli.outputs import file_to_write
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError


@exits
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The output_dir of a run.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="File to write the page to.", show_default="RUN_FOLDER/report.html"),
    ] = None,
) -> None:
    folder = run_folder.expanduser()
    page = folder / "report.html" if output is None else file_to_write(output, "the page is HTML", ".html")
    if find_spec("plotly") is None:
        raise ConfigError("report needs the package plotly: pip install 'horizon-lm[report]'")
    from horizon_lm.tools.report.page import write_report

    write_report(folder, page)
    print(visible(f"report: {page}"))
