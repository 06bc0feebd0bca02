"""Copy result tables into the pages that show them. Run it after a benchmark.

    python benchmarks/readme.py

Between `<!-- results/NAME.md -->` and `<!-- end -->` stands the content of
benchmarks/results/NAME.md. Tests fail when a page and the results differ.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "benchmarks/README.md")
BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renewed_block(match):
    """The text of one block with the results of today."""
    begin, name, end = match.groups()
    results = (ROOT / "benchmarks/results" / name).read_text()
    return begin + results + end


def with_results(text):
    """Renew every block of a page's text. Raises FileNotFoundError for a block without results."""
    return BLOCK.sub(renewed_block, text)


def main():
    """Renew the pages in their places."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_results(path.read_text()))


if __name__ == "__main__":
    main()
