"""plot and report: pictures of synthetic records; the page escapes all that comes from logs, needs no network, and its
controls work in headless Chromium where one is installed."""
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

import records_helpers as made
from records import render
from records.__main__ import main
from records.submit import submit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'`|[a](javascript:1)"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two good records, one that fails verify, and one whose device is HTML."""
    repository = made.make_repository(tmp_path_factory.mktemp("curves"))
    made.add_first(repository)
    made.add_faster(repository)
    logs = made.write_logs(repository.root / "logs", made.source_of("evil"), rng=9, device=EVIL)
    record, failures = submit(made.fresh(repository), "Zevil", logs)
    assert not failures, failures
    made.edit(record.folder / "README.md", render.WHY, made.WHY)
    shutil.copytree(record.folder, record.folder.with_name(f"{record.date}_Zzbroken"))
    assert main(["report", "--out", str(repository.root / "site" / "report.html")], made.fresh(repository)) == 0
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


def test_plot_is_a_png(repository, tmp_path, capsys):
    folders = sorted((repository.root / "records" / "nano").glob("*_F*"))
    out = tmp_path / "new" / "plot.png"
    assert main(["plot", *map(str, folders), "--out", str(out)], made.fresh(repository)) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    assert main(["plot", str(tmp_path), "--out", str(out)], made.fresh(repository)) == 2
    assert "log.txt: cannot be read: No such file" in capsys.readouterr().err


def test_page_has_no_code_but_its_own(page):
    found = Page(page.read_text())
    assert found.tags.count("script") == 2 and "img" not in found.tags and "link" not in found.tags
    assert not [name for name in found.attributes if name.startswith("on")]
    assert not [address for address in found.addresses if ":" in address]
    assert "default-src 'none'" in page.read_text()


def test_page_links_to_logs(repository, page):
    logs = [address for address in Page(page.read_text()).addresses if address.endswith(".txt")]
    assert len(logs) == 4 + 8 + 4
    assert all((page.parent / address).resolve().is_file() for address in logs)


def test_records_that_fail_are_left_out(page):
    """The copy and what it copied share their runs; the copy is the one that fails."""
    text = page.read_text()
    assert "1 records do not pass verify" in text and "Zzbroken" not in text


def test_markdown_is_escaped(repository):
    text = next((repository.root / "records" / "nano").glob("*_Zevil/README.md")).read_text()
    assert "<script" not in text and "<img" not in text and "](javascript" not in text
    assert main(["table"], made.fresh(repository)) == 1  # the broken copy


# ----- in a browser

def dom(path, *options):
    """The page as Chromium has it after its scripts ran."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent}/profile", *options,
         "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    assert "</html>" in done.stdout, done.stderr[-500:]
    return done.stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome is installed; on Debian: "
                                                            "apt-get install chromium")


@browser
def test_curves_are_drawn(page):
    text = dom(page)
    assert text.count("<polyline") == 16 and "training time, s</text>" in text
    assert "<title>GPT speedrun records</title>" in text  # the evil device's script did not run


@browser
def test_controls_work(page, tmp_path):
    """A visitor's clicks, by a script that is added to a copy of the page (whose policy would not let it run)."""
    clicks = """<script>
    const change = (selector, value) => {
      const control = document.querySelector(selector);
      if (control.type === "checkbox") control.checked = value; else control.value = value;
      control.dispatchEvent(new Event("input"));
    };
    const count = (name) => document.querySelectorAll(name).length;
    const seen = {before: [count("polyline"), count("circle")]};
    change("input[type=checkbox]", false);
    seen.hidden = count("polyline");
    change("select[name=losses]", "train");
    seen.train = [count("polyline"), count("circle")];
    change("select[name=against]", "step");
    seen.axis = [...document.querySelectorAll("svg text")].map((text) => text.textContent);
    change("input[name=from]", 50);
    seen.from = document.querySelector("polyline").getAttribute("points").split(" ").length;
    const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
    const [x, y] = document.querySelector("polyline").getAttribute("points").split(" ")[0].split(",");
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width / 1000,
                                                       clientY: box.top + y * box.width / 1000}));
    seen.reading = document.querySelector(".reading").textContent;
    document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
    </script></body>"""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", clicks)
    (tmp_path / "page.html").write_text(text)
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', dom(tmp_path / "page.html"))[1].replace("&quot;", '"'))
    assert seen["before"] == [16, 16] and seen["hidden"] == 8
    assert seen["train"] == [8, 0]
    assert "step" in seen["axis"] and "60" in seen["axis"]
    assert seen["from"] == 2  # of the steps 20, 40 and 60
    assert re.search(r"seed \d+: step 40, \d+\.\d s, loss \d\.\d{5}", seen["reading"])
