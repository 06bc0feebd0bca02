"""benchmarks/published.py: runs of both sides are added up, and compared on the same seeds."""

import json

import train_gpt
from benchmarks import published


def test_runs_are_added_and_compared_on_the_seeds_that_both_have(tmp_path, monkeypatch):
    # No corpus has to be there.
    monkeypatch.setattr(train_gpt, "fitting_val_tokens", lambda config: config.val_tokens)
    monkeypatch.setattr(published.common, "trained", lambda config: (3 + config.seed / 10, 200.0))
    config = published.config_of("english", 1285, "ours", 1)
    assert 128 * train_gpt.training_tokens(config) == 338_821_120  # the published tokens
    theirs = {"text": "english", "steps": 400, "arm": "published", "seed": 2}
    theirs |= {"loss": 3.4, "seconds": 200.0}
    (tmp_path / "published.jsonl").write_text(json.dumps(theirs) + "\n")
    for seed in ("1", "2"):
        published.main(["--seeds", seed, "--results", str(tmp_path)])
    page = (tmp_path / "published.md").read_text()
    assert "| english | 400 | ours | 3.1500 ± 0.0707 | 2 | 200 |" in page
    assert "`english ours:3.2000 published:3.4000 seeds:1 steps:400` (ours; published)" in page
