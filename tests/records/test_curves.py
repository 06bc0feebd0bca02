"""plot and report: pictures of synthetic records; the page escapes all that comes from logs, needs
no network, and its controls work in headless Chromium where one is installed."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import records_helpers as made
from records import curves, foreign, render
from records.__main__ import main
from records.submit import submit

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
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
    assert (
        main(
            ["report", "--out", str(repository.root / "site" / "report.html")],
            made.fresh(repository),
        )
        == 0
    )
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
    assert "holds no file that ends in .log, .out" in capsys.readouterr().err


# A log by its name: its text, and what of it is drawn, [(step, loss, time in ms), ...] of val and
# of train.
FOREIGN = {
    "sentinels.txt": (
        f"""import torch  # a source
    print(f"step:{{step}}/{{steps}} val_loss:{{loss:.4f}}")
{"=" * 100}
Running Python 3.12
{"=" * 100}
step:0/300 val_loss:10.8258 train_time:0ms step_avg:nanms
step:125/300 val_loss:4.6104 train_time:11250ms step_avg:90.00ms
step:300/300 val_loss:3.2791 train_time:27000ms step_avg:90.00ms
peak memory allocated: 30000 MiB
""",
        [(0, 10.8258, 0), (125, 4.6104, 11250), (300, 3.2791, 27000)],
        [],
    ),
    "training.txt": (
        "step:1/9 train_loss:10.5 train_time:100ms step_avg:nanms\nstep:2/9 train_time:1ms\n"
        "step:9/9 train_loss:nan train_time:1000ms\n"
        "step:9/9 val_loss:3.5 lr:0.1 train_time:1.5s step_avg:7ms\n",
        [(9, 3.5, 1500)],
        [(1, 10.5, 100)],
    ),
    "older.log": (
        "s:0 tel:11.0092\ns:0 trl:11.0 lr:0.000001 norm:15.37\ns:250 tel:5.25\n"
        "s:500 val_loss:4.5 step_avg:20.0ms\n",
        [(0, 11.0092, None), (250, 5.25, None), (500, 4.5, 10000)],
        [(0, 11.0, None)],
    ),
    "two runs.out": (
        "step:0/9 val_loss:9.0 train_time:1ms\nstep:9/9 val_loss:8.0 train_time:2ms\n"
        "step:0/9 val_loss:7.0 train_time:3ms\nstep:9/9 val_loss:6.0 train_time:4ms\n",
        [(0, 7.0, 3), (9, 6.0, 4)],
        [],
    ),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A folder of other trainers' logs, one of them with bytes that are no text."""
    folder = tmp_path_factory.mktemp("others")
    for name, (text, *_) in FOREIGN.items():
        (folder / name).write_bytes(text.encode() + b"\xff\x1b[2J\0\n" * (name != "sentinels.txt"))
    return folder


@pytest.mark.parametrize("name", FOREIGN)
def test_other_trainers_logs_are_read(others, name):
    _, val, train = FOREIGN[name]
    curves = foreign.read(others / name).curves
    for kind, expected in (("val", val), ("train", train)):
        assert [(point.step, point.loss, point.time_ms) for point in curves[kind]] == expected


def test_plot_draws_other_trainers_logs_and_says_so(
    repository, others, tmp_path, monkeypatch, capsys
):
    """Dashed, with a mark in the legend; those without times against steps alone."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.plot",
        lambda axes, xs, ys, **style: drawn.append((xs, ys, style)) or [],
    )
    ours = sorted((repository.root / "records" / "nano").glob("*_First"))
    assert (
        main(
            ["plot", *map(str, ours), str(others), "--out", str(tmp_path / "p.png")],
            made.fresh(repository),
        )
        == 0
    )
    assert {style["linestyle"] for _, _, style in drawn[:16]} == {"-"}
    assert len(drawn) == 2 * 2 * (4 + 4) and {style["linestyle"] for _, _, style in drawn[16:]} == {
        "--"
    }
    labels = [style["label"] for _, _, style in drawn if style["label"]]
    assert sum("another trainer's, not verified" in label for label in labels) == 2 * 4
    assert any(len(xs) == 3 and all(math.isnan(x) for x in xs[:2]) for xs, _, _ in drawn)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("nothing\n", "holds no curve"),
        ("", "holds no curve"),
        ("step:x/9 val_loss:3.0\n", "holds no curve"),
        (made.log_text("cut")[:-400], "the last line is cut"),
    ],
)
def test_what_holds_no_curve_is_refused(repository, tmp_path, capsys, text, reason):
    (tmp_path / "odd.txt").write_text(text)
    status, _, err = made.call(
        repository, capsys, "plot", tmp_path / "odd.txt", "--out", tmp_path / "p.png"
    )
    assert status == 2 and reason in err and err.count("\n") == 1
    os.mkfifo(tmp_path / "pipe.txt")
    status, _, err = made.call(
        repository, capsys, "report", tmp_path / "pipe.txt", "--out", tmp_path / "r.html"
    )
    assert status == 2 and "no regular file" in err


def test_nothing_else_reads_them(repository, others, capsys):
    for words in (
        ["submit", "--name", "Theirs"],
        ["diff"],
        ["ab", "--yes"],
        ["reproduce", "--yes"],
    ):
        status, _, err = made.call(repository, capsys, *words, others / "sentinels.txt")
        assert (
            status == 2
            and "another trainer's, which only `plot` and `report` read" in err
            and err.count("\n") == 1
        )
    folder = next((repository.root / "records" / "nano").glob("*_First"))
    log = next((folder / "logs").iterdir())
    kept = log.read_text()
    log.write_text(FOREIGN["sentinels.txt"][0])
    status, out, _ = made.call(repository, capsys, "verify", folder)
    log.write_text(kept)
    assert status == 1 and f"logs/{log.name}: no line '===== END OF CODE ====='" in out


def test_report_draws_them_in_a_track_s_chart(repository, others, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert made.call(repository, capsys, "report", others, "--track", "nano", "--out", out)[0] == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text())[1])
    names = [record["name"] for record in data["nano"]["records"] if record["foreign"]]
    assert len(names) == 4 and all(
        name.endswith(" (another trainer's, not verified)") for name in names
    )
    assert made.call(repository, capsys, "report", others, "--out", out)[0] == 0
    text = out.read_text()
    assert "<h2>fineweb: 3.28 nats per token</h2><p>No records yet.</p>" in text
    assert made.call(repository, capsys, "report", others, "--track", "nono", "--out", out)[0] == 2


def test_ladder_shows_each_record_s_time_and_reason(repository, page):
    text = page.read_text()
    rows = re.findall(
        r"<tr>(.*?)</tr>", re.search(r'<table class="ladder">(.*?)</table>', text)[1]
    )[1:]
    assert [re.search(r">(\w+)</a>", row)[1] for row in rows] == [
        "First",
        "Zevil",
        "Faster",
    ]  # as they began
    times = [float(re.search(r"(\d+\.\d) s \(\d+\.\d to \d+\.\d\)", row)[1]) for row in rows]
    assert times == [pytest.approx(seconds, abs=0.2) for seconds in (60, 60, 50)]
    widths = [float(re.search(r'class="mean" x="0" y="3" width="(\S+)"', row)[1]) for row in rows]
    assert widths[2] / widths[0] == pytest.approx(times[2] / times[0], rel=0.01)
    assert all(
        "<td>It takes fewer steps, since each of them does more.</td>" in row
        for row in (rows[0], rows[2])
    )


def test_what_changed_is_one_line(repository):
    record = SimpleNamespace(readme="# A\n\n## Why\n\nIt <b>is</b>\nfast.\n\nMore.\n\n## Figures\n")
    assert curves.what_changed(record) == "It <b>is</b> fast."
    record.readme = "# A\n\n## Why\n\n" + "word " * 99 + "\n\n## Figures\n"
    assert len(curves.what_changed(record)) < 204 and curves.what_changed(record).endswith(
        "word ..."
    )
    record.readme = "nothing"
    assert curves.what_changed(record) == ""


def test_page_fits_a_phone(page):
    """No table is wider than the screen: the leaderboard scrolls, the ladder's rows stack."""
    text = page.read_text()
    assert text.count('<div class="wide"><table>') == 1 == len(re.findall("<table>", text))
    assert (
        ".wide { overflow-x: auto; }" in text
        and ".ladder tr, .ladder td, .ladder th { display: block;" in text
    )


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
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={path.parent}/profile",
            *options,
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "</html>" in done.stdout, done.stderr[-500:]
    return done.stdout


browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium or Chrome is installed; on Debian: apt-get install chromium",
)


@browser
def test_curves_are_drawn(page):
    text = dom(page)
    assert (
        text.count("<polyline") == 16
        and "training time, s</text>" in text
        and "loss, nats per token</text>" in text
    )
    assert "<title>GPT speedrun records</title>" in text  # the evil device's script did not run


@browser
def test_controls_work(page, tmp_path):
    """A visitor's clicks, by a script that is added to a copy of the page (whose policy would not
    let it run)."""
    clicks = """<script>
    const change = (selector, value) => {
      const control = document.querySelector(selector);
      if (control.type === "checkbox") control.checked = value; else control.value = value;
      control.dispatchEvent(new Event("input"));
    };
    const count = (name) => document.querySelectorAll(name).length;
    const seen = {slider: [], drawn: count("polyline")};
    seen.opens = document.querySelector("select[name=losses]").value;
    const slider = () => seen.slider.push(document.querySelector("output").textContent);
    slider();
    change("select[name=losses]", "val");
    seen.before = [count("polyline"), count("circle")];
    change("input[type=checkbox]", false);
    seen.hidden = count("polyline");
    change("select[name=losses]", "train");
    seen.train = [count("polyline"), count("circle")];
    change("select[name=against]", "step");
    seen.axis = [...document.querySelectorAll(".chart svg text")].map((text) => text.textContent);
    change("input[name=from]", 50);
    slider();
    const table = document.querySelector("table.ladder").getBoundingClientRect();
    seen.table = table.width <= window.innerWidth;
    seen.overflow = document.documentElement.scrollWidth <= window.innerWidth;
    const points = document.querySelector("polyline").getAttribute("points").split(" ");
    seen.from = points.length;
    const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
    const wide = svg.viewBox.baseVal.width;
    const [x, y] = points[0].split(",");
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width / wide,
                                                       clientY: box.top + y * box.width / wide}));
    seen.reading = document.querySelector(".reading").textContent;
    const page = {id: "seen", textContent: JSON.stringify(seen)};
    document.body.append(Object.assign(document.createElement("pre"), page));
    </script></body>"""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", clicks)
    (tmp_path / "page.html").write_text(text)
    seen = json.loads(
        re.search(r'<pre id="seen">(.*?)</pre>', dom(tmp_path / "page.html"))[1].replace(
            "&quot;", '"'
        )
    )
    assert seen["before"] == [16, 16] and seen["hidden"] == 8
    assert seen["train"] == [8, 0]
    assert seen["opens"] == "train"  # a run has one validation point
    assert (
        "optimizer steps" in seen["axis"]
        and "loss, nats per token" in seen["axis"]
        and "60" in seen["axis"]
    )
    assert (
        seen["slider"] == [" 0 % (0 s)", " 50 % (30 steps)"] and seen["table"] and seen["overflow"]
    )
    assert seen["from"] == 2  # of the steps 20, 40 and 60
    assert re.search(r"seed \d+: step 40, \d+\.\d s, loss \d\.\d{5} nats", seen["reading"])


def test_a_report_that_cannot_be_written_leaves_nothing(repository, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    status, _, err = made.call(repository, capsys, "report", "--out", tmp_path / "report.html")
    assert status == 2 and err.startswith("records: ")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
