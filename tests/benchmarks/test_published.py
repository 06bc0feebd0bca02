"""benchmarks/published.py: the published schedule at small sizes, and runs that are added up."""

import dataclasses

import pytest

import train_gpt
from benchmarks import published

RUN = {"text": "english", "steps": 400, "seconds": 200.0}


@pytest.fixture
def corpora(monkeypatch):
    """Any corpus seems to hold all that is scored, so that none has to be there."""
    monkeypatch.setattr(train_gpt, "fitting_val_tokens", lambda config: config.val_tokens)


def test_the_schedule_is_the_published_one_on_a_sixteenth_of_the_tokens(corpora):
    config = published.config_of("english", 1285, "ours", 1)
    assert 128 * train_gpt.training_tokens(config) == 338_821_120
    weights = [train_gpt.loss_weights_at(config, step) for step in range(1285)]
    assert weights[0] == (1.0, 0.5, 0.25, 0.25)
    assert weights[422] == pytest.approx((1.0, 0.5, 0.25 / 423, 0.25))
    assert weights[846] == pytest.approx((1.0, 0.5 / 424, 0.25 / 424))
    assert weights[847] == (1.0, 0.0)
    assert [stage.windows for stage in config.stages] == [
        (32, 96),
        (96, 224),
        (160, 352),
        (192, 416),
    ]


def test_an_arm_changes_what_it_says(corpora):
    plain = dataclasses.asdict(published.config_of("verse", 400, "ours", 1))
    for arm, changes in published.ARMS.items():
        other = dataclasses.asdict(published.config_of("verse", 400, arm, 1))
        assert {name for name, value in other.items() if value != plain[name]} == set(changes)


def test_both_sides_are_compared_on_the_seeds_that_both_have():
    runs = [
        {**RUN, "arm": arm, "seed": seed, "loss": loss}
        for arm, seed, loss in (("ours", 1, 3.0), ("ours", 2, 3.2), ("published", 2, 3.4))
    ]
    table, lines = published.report(runs)
    assert "| english | 400 | ours | 3.1000 ± 0.1414 | 2 | 200 |" in table
    assert lines == ["`english ours:3.2000 published:3.4000 seeds:1 steps:400` (ours; published)"]


def test_a_run_is_added_to_the_others(tmp_path, monkeypatch, corpora):
    folder = ["--results", str(tmp_path)]
    monkeypatch.setattr(published.common, "trained", lambda config: (config.seed / 10, 1.0))
    published.main(["--seeds", "1,2", *folder])
    published.main(["--seeds", "3", "--text", "verse", *folder])
    found = [(run["text"], run["seed"], run["loss"]) for run in published.runs_in(tmp_path)]
    assert found == [("english", 1, 0.1), ("english", 2, 0.2), ("verse", 3, pytest.approx(0.3))]
    assert "| verse | 400 | ours | 0.3000 | 1 | 1 |" in (tmp_path / "published.md").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--text", "absent"], ".*absent/manifest.json: no such file; build it"),
        (["--arm", "hers"], "--arm hers: no such arm; they are ours; ours, tuned"),
    ],
)
def test_what_is_absent_is_named(words, message, tmp_path):
    with pytest.raises(SystemExit, match=f"error: {message}"):
        published.main(["--seeds", "1", *words, "--results", str(tmp_path)])
