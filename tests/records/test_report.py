"""The report and the staircase: they say what the records say, escape all that comes from logs,
need no network, and fit a phone; in headless Chromium where one is installed."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

import records_helpers as made
from records import render
from records.__main__ import main
from records.record import chain

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'`|[a](javascript:1)"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two records of a chain, and one beside it whose device is HTML."""
    repository = made.make_repository(tmp_path_factory.mktemp("report"))
    made.add_first(repository)
    made.add_faster(repository)
    source = made.source_of("evil")
    began = made.YESTERDAY + made.timedelta(hours=6)
    made.write_logs(repository.root / "logs", source, rng=9, device=EVIL, began=began)
    made.submitted(repository, "Zevil", source)
    assert main(["table"], made.fresh(repository)) == 0
    out = repository.root / "site" / "report.html"
    assert main(["report", "--out", str(out)], made.fresh(repository)) == 0
    return repository


@pytest.fixture(scope="module")
def page(repository):
    return repository.root / "site" / "report.html"


class Page(HTMLParser):
    """Tags and addresses of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.attributes = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.addresses += [value for name, value in attributes if name in ("href", "src")]


def test_page_has_no_code(page):
    found = Page(page.read_text())
    assert not {"script", "link"} & {*found.tags}
    assert not [name for name in found.attributes if name.startswith("on")]
    pictures = [address for address in found.addresses if ":" in address]
    assert found.tags.count("img") == len(pictures) == 1
    assert pictures[0].startswith("data:image/png;base64,")
    assert "default-src 'none'" in page.read_text() and "script-src" not in page.read_text()


def test_page_links_to_records(page):
    addresses = [name for name in Page(page.read_text()).addresses if ":" not in name]
    assert len(addresses) == 3
    assert all((page.parent / address / "README.md").is_file() for address in addresses)


def test_a_record_beside_the_chain_stands_apart(page):
    ladder, _, beside = page.read_text().partition("<h3>Beside the ladder</h3>")
    assert ">Zevil</a>" in beside and ">Zevil</a>" not in ladder
    assert ladder.index(">Faster</a>") < ladder.index(">First</a>")


def test_the_staircase_follows_from_the_pairs(repository):
    """Each step is what is left of the first record's time, if the gains hold on its machine; its
    dots lie on a logarithmic scale."""
    links = chain(made.fresh(repository).records["mini"])
    runs = [sum(run.train_time_ms for run in side) for side in (links[1].runs, links[1].baseline)]
    picture = ElementTree.parse(repository.root / "records/mini.svg").getroot()
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    first = sum(run.train_time_ms for run in links[0].runs) / 4000
    second = first * runs[0] / runs[1]
    assert texts[0] == f"mini: {first:.0f} s to {second:.1f} s in 1 proven step"
    assert texts[1:5] == ["First", f"{first:.1f} s", "Faster", f"{second:.1f} s, -17 %"]
    dots = [float(dot.get("cx")) for dot in picture.iter(f"{SVG}circle")]
    assert dots[0] > dots[1]


def test_three_steps_are_apart_as_the_logarithms_of_their_times():
    class Link:
        def __init__(self, gain):
            self.title = "a"
            self.result = {"train_time_ms": {"mean": 8000}, "speed": {"relative": [gain]}}

    text = render.staircase("mini", [Link(None), Link(-0.5), Link(-0.75)])
    picture = ElementTree.fromstring(text)
    dots = [float(dot.get("cx")) for dot in picture.iter(f"{SVG}circle")]
    assert (dots[1] - dots[2]) / (dots[0] - dots[1]) == pytest.approx(2, rel=0.01)
    assert "prefers-color-scheme: dark" in text and "8.0 s" in text and "1.0 s, -75 %" in text


def test_this_repository_s_ladder_is_on_its_page():
    repository = made.Repository.at()
    readme = (repository.home / "README.md").read_text()
    for track, records in repository.records.items():
        if len(chain(records)) > 1:
            assert f"]({track}.svg)" in readme


def test_markdown_is_escaped(repository):
    text = next((repository.root / "records" / "mini").glob("*_Zevil/README.md")).read_text()
    for page in (text, (repository.home / "README.md").read_text()):
        assert "<script" not in page and "<img" not in page and "](javascript" not in page


def test_a_record_that_fails_is_told(repository, tmp_path, capsys):
    root = shutil.copytree(repository.root, tmp_path / "copy")
    next(root.glob("records/mini/*_First/README.md")).write_text("")
    words = ["report", "--out", str(tmp_path / "r.html")]
    assert main(words, made.Repository(root, repository.rules)) == 2
    assert "_First: README.md: only what stands" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_report_that_cannot_be_written_leaves_nothing(repository, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    status, _, err = made.call(repository, capsys, "report", "--out", tmp_path / "report.html")
    assert status == 2 and err.startswith("records: ")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# ----- in a browser

# What is added to a copy of the page, whose policy would not let it run: it measures the page.
MEASURE = """<script>
const height = (element) => element.getBoundingClientRect().height;
const seen = {};
seen.width = [document.documentElement.scrollWidth, window.innerWidth];
seen.heads = [...document.querySelectorAll("th")].map(height);
seen.stairs = document.querySelector(".stairs").getBoundingClientRect().width;
seen.curves = document.querySelector("img").naturalWidth;
const page = {id: "seen", textContent: JSON.stringify(seen)};
document.body.append(Object.assign(document.createElement("pre"), page));
</script></body>"""


@pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium or Chrome is installed; on Debian: apt-get install chromium",
)
@pytest.mark.parametrize("width", [500, 1200])
def test_nothing_is_wider_than_the_screen(page, tmp_path, width):
    """500 pixels is the narrowest that Chromium's window gets."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", MEASURE)
    (tmp_path / "page.html").write_text(text)
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    words += [f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    words.append((tmp_path / "page.html").as_uri())
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "<title>GPT speedrun records</title>" in done.stdout, done.stderr[-500:]
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)[1]
    seen = json.loads(found.replace("&quot;", '"'))
    assert seen["width"][0] <= seen["width"][1]
    assert max(seen["heads"]) < 40  # no header breaks inside a word, nor at all
    assert seen["stairs"] <= 640 and seen["curves"] == 1000
