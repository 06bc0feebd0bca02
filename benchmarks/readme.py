"""Copy result tables into the pages that show them: between `<!-- results/NAME.md -->` and `<!-- end -->` stands the
content of benchmarks/results/NAME.md. Run it after a benchmark; tests fail when a page and the results differ.

    python benchmarks/readme.py
"""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "benchmarks/README.md")
BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_results(text):
    """`text` of a page with every block renewed; raises FileNotFoundError for a block without results."""
    return BLOCK.sub(lambda m: m[1] + (ROOT / "benchmarks/results" / m[2]).read_text() + m[3], text)


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(with_results((ROOT / page).read_text()))
