"""README.md and the pages beside it: their tables are current and follow from the results, and
what they name exists."""

import dataclasses
import json
import re
import subprocess

import pytest

import train_gpt
from benchmarks import common, plain_gpt, plain_turns, published, readme
from continual import ContinualConfig
from helpers import ROOT

TEXT = (ROOT / "README.md").read_text()
PAGES = ["README.md", "records/README.md", "CONTRIBUTING.md", "records/NOTES.md"]
PAGES.append("benchmarks/README.md")
# Keys of other commands than the trainer's.
ELSEWHERE = "help check checkpoint prompt eval out nproc_per_node max_restarts nnodes rdzv_backend"
ELSEWHERE += " rdzv_endpoint name by runs world_size yes tree val_share samples top_k"
RESULTS = (ROOT / "benchmarks/README.md").read_text()


def test_tables_are_current():
    assert len(TEXT.splitlines()) <= 160
    for text in (TEXT, RESULTS):
        assert readme.BLOCK.search(text) and readme.with_results(text) == text
    banners = re.findall(r"^# (\d+)\. (.+?) =+$", (ROOT / "train_gpt.py").read_text(), re.MULTILINE)
    assert re.findall(r"^\| (\d+) ([^|]+?) \|", TEXT, re.MULTILINE) == banners
    assert re.findall(r"^ +(\d+)\. (.+?) {2,}", train_gpt.__doc__, re.MULTILINE) == banners


def gpu_rows(name):
    """{item: value} of what a call of gpu_checks.py has found."""
    content = json.loads((ROOT / f"benchmarks/results/gpu_{name}.json").read_text())
    return {row["item"]: row["value"] for row in content["rows"]}


def test_sentences_on_a_gpu_are_of_its_results():
    found = gpu_rows("profile")
    milliseconds, host = found["ms a step, and of the host alone"]
    before, _ = gpu_rows("profile_before")["ms a step, and of the host alone"]
    idle = found["idle, ms a step"]
    kinds = found["ms a step by kinds of kernels"]
    attention = sum(time for name, time in found.items() if "flash" in name)
    (peak,) = found["peak memory, MiB"]
    errors = [value for name, value in gpu_rows("attention").items() if "error" in name]
    assert max(errors) < 0.003
    for words in (
        f"it does: {milliseconds:.0f} ms a step of stage 1, {peak / 1024:.1f} GiB",
        f"took {milliseconds:.0f} ms, and {before:.0f} in an earlier call",
        f"Kernels take {milliseconds - idle:.0f} of the {milliseconds:.0f} ms",
        f"{kinds['products'] - attention:.0f} products, {attention:.0f} attention",
        f"{kinds['written by the compiler']:.0f}\n  what the compiler wrote",
        f"wrote, {kinds['other']:.0f} others",
        f"For {idle:.0f} ms the GPU idles**, while the host takes {host:.0f} to launch",
    ):
        assert words in RESULTS, words
    assert "run on an H200" in TEXT


def test_sentences_on_english_on_a_gpu_are_of_its_logs():
    logs = {
        name: (ROOT / f"benchmarks/results/gpu_english{name}.txt").read_text()
        for name in ("", "_bf16", "_cpu")
    }
    losses = {
        name: [float(loss) for loss in re.findall(r"(?:train|val)_loss:(\S+)", log)]
        for name, log in logs.items()
    }
    assert all(" device:NVIDIA H200 " in logs[name] for name in ("", "_bf16"))
    assert len({re.search(r"code_sha256:\S+", logs[name])[0] for name in ("", "_cpu")}) == 1
    assert f"ends there at {losses[''][-1]:.5f} in float32" in RESULTS
    assert f"at {losses['_bf16'][-1]:.5f} in bfloat16" in RESULTS
    apart = [abs(a - b) for a, b in zip(losses[""], losses["_cpu"], strict=True)]
    assert sorted(apart)[-2:] == [0, pytest.approx(1e-5)]  # "but for 0.00001 of one step"


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_anchors_exist(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for path in re.findall(r"(?<![\w/])(?:data|benchmarks|records)/\w+\.(?:py|sh|md)\b", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"(?:\]\(|src=\"|srcset=\"|href=\")(?!https?:)([^)#\"]+)", text):
        # GitHub serves a workflow and its badge beside the repository's pages.
        workflow = re.match(r"\.\./\.\./actions/workflows/(\w+\.yml)", path)
        target = f".github/workflows/{workflow[1]}" if workflow else path
        assert (folder / target).exists(), path
    for path, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", text):
        headings = re.findall(
            r"^#+ (.+)$", (folder / path if path else ROOT / page).read_text(), re.M
        )
        assert anchor in map(anchor_of, headings), (path, anchor)


@pytest.mark.parametrize("page", PAGES[:2])
def test_named_keys_exist_and_are_spelt_one_way(page):
    fields = {field.name for field in dataclasses.fields(ContinualConfig)}
    fields |= {field.name for field in dataclasses.fields(train_gpt.Stage)}
    written = re.sub(
        r"<!-- results/.*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.DOTALL
    )
    for key in re.findall(r"--([a-z][a-z_-]*)", written):
        if key != "nproc_per_node":  # as torchrun's own users write it
            assert "_" not in key and key.replace("-", "_") in fields | {*ELSEWHERE.split()}, key


# ----- results


def test_every_result_is_shown():
    shown = [match[2] for match in readme.BLOCK.finditer(RESULTS)]
    kept = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")}
    assert sorted(shown) == sorted(kept - {"first_page.md"})  # which is in README.md


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def test_tables_are_of_commits_in_this_history():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no whole clone, so its history is not known")
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        commit = json.loads(path.read_text()).get("environment", {}).get("commit", "HEAD")
        found = git("merge-base", "--is-ancestor", commit, "HEAD")
        assert found.returncode == 0, (path.name, commit)


def results_of(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_the_answers_follow_from_the_results():
    """Those of the page's first table that figures decide."""
    assert "by one unit of the log's last decimal at most" in RESULTS
    sizes = results_of("world_sizes")["losses"]
    assert {key.split("/")[2] for key in sizes} == {"1", "2", "3", "4", "8"}
    for key, losses in sizes.items():
        alone = sizes[f"{key.rsplit('/', 1)[0]}/1"]
        assert losses == pytest.approx(alone, abs=1.1e-5, rel=0), key
    ratios = re.findall(r"\| (1\.\d{3}) \|\n", RESULTS[RESULTS.index("ngram_exchange.md") :])
    assert ratios and max(map(float, ratios)) <= 1.004  # "within 0.4 % of it"
    continual = RESULTS[RESULTS.index("results/continual.md") :]
    assert re.findall(r"\| OSFT 0\.\d+ \| 3 \| [^|]+ \| (-?)", continual) == [""] * 6


def test_the_factor_over_plain_training_is_that_of_its_turns():
    plain = json.loads((ROOT / "records/rules.json").read_text())["boards"]["english"]["plain"]
    _, line = plain_turns.report(results_of("plain_turns")["turns"])
    assert f"record:{plain['record']} factor:{plain['factor']} " in line
    losses = [run["loss"] for run in plain_gpt.finals_of(results_of("plain_gpt")["runs"])]
    assert round(sum(losses) / len(losses), 4) == plain["loss"]


def test_what_is_said_beside_the_published_trainer_follows_from_its_runs():
    runs = published.runs_in(common.RESULTS)
    for run in runs:
        if run["arm"].startswith("ours") and "scales" not in run["arm"]:
            assert run["dirty"] == 0

    def losses_of(text, arm, steps):
        wanted = {"text": text, "arm": arm, "steps": steps}
        return {run["seed"]: run["loss"] for run in runs if wanted.items() <= run.items()}

    def ahead(text, arm, other="published", steps=400, seeds=(1, 2, 3)):
        """How far an arm is below another one, by the seeds that both have."""
        sides = [losses_of(text, side, steps) for side in (arm, other)]
        both = sides[0].keys() & sides[1].keys()
        assert both == set(seeds)
        return sum(sides[1][seed] - sides[0][seed] for seed in both) / len(both)

    page = " ".join(RESULTS[RESULTS.index("## Beside the published trainer on English") :].split())
    texts = "english", "verse"
    both = "{:.3f} on English and {:.3f} on verse"
    form, tuned = "ours, first form", "ours, tuned, first form"
    behind = [-ahead(text, form) for text in texts]
    assert f"ours ended {both.format(*behind)} above the published trainer after 400" in page
    later = -ahead("english", form, steps=1600, seeds=(1,))
    assert f"and {later:.3f} above it on English after 1,600 (seed 1)" in page
    seen = [-ahead("english", "published, neither", steps=n, seeds=(1,)) for n in (1600, 400)]
    words = f"ends {seen[0]:.3f} higher after 1,600 steps, and {-seen[1]:.3f} lower after 400"
    assert words in page
    below = [ahead(text, tuned, "published, tuned, smaller scores") for text in texts]
    assert f"ours ended {both.format(*below)} below the published trainer (n = 3 each)" in page
    far = [ahead(text, tuned, seeds=(1, 2, 3, 4, 5)) for text in texts]
    assert "{:.3f} and {:.3f} below the published trainer at its own".format(*far) in page
    now = "ours, tuned"
    plain, every, before = (
        f"{now}, {words}"
        for words in ("without convolutions", "Adam at every step", "smaller scores")
    )
    lower = [ahead(text, before, tuned, 1600, (1,)) for text in texts]
    assert f"{both.format(*lower)} lower than in the first form, with" in page

    def further(arm, other):
        """As ahead, after 1,600 steps, by seeds 1 and 2 of English and seed 1 of verse."""
        seeds_of = zip(texts, ((1, 2), (1,)), strict=True)
        return [ahead(text, arm, other, 1600, seeds) for text, seeds in seeds_of]

    lead = [ahead(text, now, steps=1600) for text in texts]
    soon = [ahead(text, now, seeds=(1, 2, 3, 4, 5)) for text in texts]
    words = "ours ends {:.3f} on English and {:.3f} on verse below the published trainer at its own"
    words = f"{words.format(*lead)} rates and scores (n = 3 each)"
    assert f"**After 1,600 steps {words}, after 400 {both.format(*soon)} (n = 5 each).**" in page
    of_seeds = losses_of("english", now, 400)
    first = of_seeds.pop(1)
    words = f"{min(of_seeds.values()):.4f} and {max(of_seeds.values()):.4f}"
    assert f"seed 1 ended at {first:.4f} and the other four between {words}" in page
    fair = further(now, "published, tuned")
    words = "{:.3f} below it on English (seeds 1 and 2) and {:.3f} on verse (seed 1), after 1,600"
    assert words.format(*fair) in page
    words = "after 1,600 steps {:.3f} below it on English and {:.3f} on verse (three seeds each);"
    more = "on both sides {:.3f} (two seeds) and {:.3f} (one) |"
    assert f"{words} with rates and scores for 96 channels {more}".format(*lead, *fair) in RESULTS
    first_page = " ".join(TEXT.split())
    assert "it ended [{:.3f} on English and {:.3f} on verse below it]".format(*lead) in first_page
    assert "on both sides {:.3f} and {:.3f} (two seeds and one)".format(*fair) in first_page
    above, below = (ahead(text, now, "published, tuned, smaller scores") for text in texts)
    words = f"ours ends {-above:.3f} above it on English and {below:.3f} below it on verse"
    assert f"{words} (seeds 1 to 3)" in page
    assert f"{-above:.3f} above it after 400 steps of English (n = 3)" in first_page
    below, gap = further(plain, "published, tuned")
    words = f"{below:.3f} below it on English (seeds 1 and 2), and {-gap:.3f} above it on verse"
    assert f"the two were level: {words} (seed 1)" in page
    gains = further(now, plain)
    words = "the loss {:.3f} lower on English (seeds 1 and 2) and {:.3f} on verse (seed 1)"
    assert words.format(*gains) in page
    above = [-gap for gap in further(every, "published, tuned")]
    assert "ours ended {:.3f} and {:.3f} above the published trainer, tuned.".format(*above) in page
    rows = [ahead(text, "ours, tuned, own rows", plain, 1600, (1,)) for text in texts]
    words = f"end {rows[0]:.3f} lower on English and {-rows[1]:.3f} higher on verse (seed 1)"
    assert words in page
    gains = [ahead(text, every, before, 1600, (1,)) for text in texts]
    words = "ours with Adam at every step ended {:.3f} and {:.3f} higher (seed 1)"
    assert words.format(*gains) in page
    gain = ahead("english", "published, tuned", "published, tuned, smaller scores", 1600, (1,))
    assert f"with these rates {gain:.3f} higher on English (seed 1)" in page
    more = [
        ahead(text, form, f"{form}, without scales", seeds=range(1, n))
        for text, n in (("english", 4), ("verse", 3))
    ]
    assert "{:.3f} on English (n = 3) and {:.3f} on".format(*more) in page


def test_the_sentence_about_prices_follows_from_them():
    (line,) = re.findall(r"rank_correlation:(\S+) low:\S+ high:\S+ features:(\d+)", RESULTS)
    assert "[{}](benchmarks/README.md#prices) over {},".format(*line) in TEXT
    of_kind = dict(re.findall(r"^\| scaled_outputs \| (\w+) \| (\S+) ", RESULTS, re.MULTILINE))
    (ends,) = re.findall(
        r"^\| scaled_outputs \| all \| \S+ \| (\S+ to \S+) ", RESULTS, re.MULTILINE
    )
    words = (
        f"{of_kind['model']} by eight seeds; in rules, schedules and losses, no: {line[0]} in all"
    )
    assert f"{words}, {ends} |" in RESULTS
