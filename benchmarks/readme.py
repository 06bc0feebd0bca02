"""Copy result tables into README.md: what stands between `<!-- results/NAME.md -->` and `<!-- end -->` is the content
of benchmarks/results/NAME.md. Run it after a benchmark; a test fails when README and results differ.

    python benchmarks/readme.py
"""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_results(text):
    """`text` of the README with every block renewed; raises FileNotFoundError for a block without results."""
    return BLOCK.sub(lambda m: m[1] + (ROOT / "benchmarks/results" / m[2]).read_text() + m[3], text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_results(readme.read_text()))
