"""Hooks of mkdocs: the pages of the site are the repository's Markdown files, under their paths from the root.

mkdocs wants one folder of pages, but the README, the changelog and the results of benchmarks lie outside ``docs/``. With every page
under its own path, relative links between them are the same in the repository and on the site.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/images/*",
    "docs/site.css",
    "benchmarks/results/*.md",
    "benchmarks/results/*.txt",
    "examples/in_one_file.py",
)
REMOTE = re.compile(r"""<(?:script|img|iframe)[^>]+src="?https?:|<link[^>]+rel="?stylesheet[^>]+href="?https?:""")
log = logging.getLogger("mkdocs.hooks.docs_pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs/`` by `PAGES`; keep those of the theme."""
    pages = Files([file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")])
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        pages.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return pages


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Warn of a page that loads something from elsewhere, which ``--strict`` makes an error: the site works offline."""
    if found := REMOTE.search(output):
        log.warning("%s loads from elsewhere: %s", page.file.src_uri, found.group())
    return output
