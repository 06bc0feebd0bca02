"""The records tool on logs of the trainer itself: what it writes is what `records` reads. A copy of
the trainer gets a tiny track, so that its runs need no overrides and make a record. And the lines
of the README, with a script that writes a log in no time."""

import re
import shutil
from dataclasses import replace

import pytest

import helpers
import records_helpers as made
import train_gpt
from records import files, render
from records_helpers import call, done


@pytest.mark.slow
def test_runs_of_the_trainer_are_a_record(corpus, tmp_path, capsys, monkeypatch):
    for name, value in helpers.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files.LIMITS, "cuts", 1)  # the text is short
    tiny = helpers.tiny_config(
        data=str(corpus), val_tokens=2048, val_every=2, target_loss=30.0, seed=-1
    )
    val_sha256 = train_gpt.validation_hash(train_gpt.open_corpus(tiny).val)
    fixed = {"tokenizer": "bytes", "val_sha256": val_sha256, "target_loss": 30.0}
    rules = {"track": "tiny", "config": {**fixed, "val_tokens": tiny.val_tokens}, "copy_loss": 1e-6}
    rules["manifest_sha256"] = made.sha_of((corpus / "manifest.json").read_text())
    repository = made.Repository(tmp_path, {"tiny": rules})
    (tmp_path / "records").mkdir()
    (tmp_path / "README.md").write_text(made.FIRST_PAGE)
    shutil.copy(helpers.ROOT / "records/gates.py", repository.home)  # whose runs find it there
    (repository.home / "README.md").write_text("<!-- records/tiny -->\n<!-- end -->\n")
    row = f'"tiny": {replace(tiny, track="tiny", val_sha256=val_sha256)!r}'
    code = helpers.TRAINER.read_text().replace("TRACKS = {\n", f"TRACKS = {{\n    {row},\n", 1)
    (tmp_path / "train_gpt.py").write_text(code)
    done(repository, capsys, "run", "--track", "tiny", "--runs", 2)

    first, second = made.runs_in(repository, "tiny-*-0?a")
    result = helpers.Run(0, "", "", first.path.parent).result
    assert (first.counter, second.counter, first.declared, first.start) == (1, 2, 2, 1)
    assert first.seed == made.stats.seed_of(made.sha_of(code), 1, 1)
    assert first.source == code and first.dtype == second.dtype
    assert str(first.tokens) == result["tokens"]
    assert f"{first.val_loss:.5f}" == result["val_loss"]
    assert f"{first.train_time_ms}ms" == result["train_time"]
    assert f"{first.cpu_time_ms}ms" == result["cpu_time"] != "0ms"
    due = [("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 0), ("val", 0)]
    assert list(first.losses) == due

    words = ["--name", "Tiny-start", "--by", "Me", "--track", "tiny"]
    done(repository, capsys, "submit", *words)
    folder = next((tmp_path / "records" / "tiny").glob("*_Tiny-start"))
    assert "does not say why it works" in call(repository, capsys, "verify")[2]
    made.edit(folder / "README.md", render.WHY, made.WHY)
    done(repository, capsys, "table")
    assert call(repository, capsys, "verify") == (0, "verify: ok, 1 record\n", "")


def lines_of(page):
    """The commands of a page's block that submits a record."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (helpers.ROOT / page).read_text(), re.DOTALL | re.M)
    block = next(block for block in blocks if "records submit" in block)
    return [line.partition(" #")[0].strip() for line in block.splitlines()]


def test_what_the_readme_says_makes_a_record(tmp_path, capsys, no_pause):
    """The lines of its block, as they stand there, but for who writes and commits. The first page
    has some of them."""
    lines = lines_of("records/README.md")
    assert {*lines_of("README.md")} <= {*lines}
    repository = made.make_first(tmp_path)
    for line in lines:
        line = line.replace('"Your name"', "Me")
        if line.startswith("$EDITOR"):
            made.edit(next(tmp_path.glob(line.split()[1])), render.WHY, made.WHY)
        for command in line.split(" && "):
            if command.startswith("python -m records "):
                out = done(repository, capsys, *command.split()[3:])
    assert out == "verify: ok, 2 records\n"
    assert re.match(r"git add records( README.md)? && git commit ", lines[-1])
