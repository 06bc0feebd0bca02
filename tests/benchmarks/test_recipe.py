"""benchmarks/recipe.py: what its arms change, and what its tables say of made-up runs."""

import dataclasses
import json

import pytest

import train_gpt
from benchmarks import common, recipe
from helpers import ROOT

pytestmark = pytest.mark.slow


def made_up(arm, seed, loss, steps=280, tokens=1000, seconds=2.0):
    points = {str(steps): loss}
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "tokens": tokens,
        "points": points,
        "loss": loss,
        "seconds": seconds,
    }


def differences(left, right):
    """The names of the fields in which two configurations differ."""
    fields = dataclasses.fields(left)
    return {
        field.name for field in fields if getattr(left, field.name) != getattr(right, field.name)
    }


def test_each_arm_without_a_feature_changes_that_alone():
    fewer = recipe.config_of("fewer", 1)
    changed = [
        differences(fewer, recipe.config_of(f"without {name}", 1)) for name in recipe.FEATURES
    ]
    assert all(len(fields) == 1 for fields in changed)
    assert len(set().union(*changed)) == len(recipe.FEATURES)


def test_the_tracks_own_arms_change_nothing_of_its_model():
    mini = train_gpt.TRACKS["mini"]
    how_it_runs = {"seed", "steps", "device", "workers"}
    for arm, steps in (("track", 402), ("track twice", 805)):
        config = recipe.config_of(arm, 1)
        assert config.steps == steps and differences(mini, config) == how_it_runs


def test_arms_see_the_published_trainers_tokens():
    assert train_gpt.training_tokens(recipe.config_of("ours", 1)) == 824_320
    assert train_gpt.training_tokens(recipe.config_of("fewer", 1)) < 0.85 * 824_320
    assert recipe.config_of("ours", 1).ngram_orders == (2,)


def test_target_is_the_published_trainers_mean():
    losses = [run["points"][recipe.STEPS] for run in recipe.published(recipe.STEPS)]
    assert len(losses) == 3
    assert train_gpt.TRACKS["mini"].target_loss == pytest.approx(sum(losses) / 3, abs=5e-4)


def test_every_price_is_of_a_feature():
    assert set(recipe.PRICES) <= recipe.FEATURES.keys() | recipe.EARLIER.keys()


def test_readme_says_what_was_measured():
    runs = json.loads((ROOT / "benchmarks/results/recipe.json").read_text())["runs"]
    ours = [run["loss"] for run in recipe.of_arm(runs, "ours")]
    published = [run["points"][recipe.STEPS] for run in recipe.published(recipe.STEPS)]
    words = f"({common.spread(ours, 3)} and {common.spread(published, 3)}, n = 3 each)"
    assert words in (ROOT / "README.md").read_text()
    assert len(ours) == 3 and recipe.summary(runs).endswith("tokens_ratio:0.70")


def test_summary():
    assert recipe.summary([]) == "ours:not measured"
    runs = [made_up("ours", seed, 1.0 + seed / 10, 400, 1000) for seed in (1, 2, 3)]
    assert recipe.summary(runs).endswith("seeds:3 tokens_ratio:not measured")
    runs.append(made_up("fewer", 1, 1.27, tokens=700))
    assert recipe.summary(runs) == "ours:1.2000 published:1.2789 seeds:3 tokens_ratio:0.70"
    runs.append(made_up("fewer", 2, 1.3, tokens=700))
    assert recipe.summary(runs).endswith("tokens_ratio:not reached")


def test_worth_is_of_pairs_with_one_seed():
    name = "pairs of heads"
    runs = [made_up("fewer", seed, 1.0) for seed in (1, 2, 3)]
    runs += [made_up(f"without {name}", seed, 1.0 + seed / 10) for seed in (2, 3, 4)]
    row = "| pairs of heads | +0.2500 | 0.0500 | +0.2000, +0.3000 |"
    assert row in recipe.features_table(runs).splitlines()


@pytest.mark.parametrize(
    ("left", "right", "correlation", "share"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0, 2 / 24),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0, 2 / 24),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6, 10 / 24),
    ],
)
def test_rank_correlation(left, right, correlation, share):
    found = recipe.rank_correlation(left, right)
    assert found == pytest.approx((correlation, share))


@pytest.mark.parametrize("arm", ["ours", "plain"])
def test_a_short_run_of_an_arm(arm, corpus, monkeypatch):
    small = {"steps": 2, "val_tokens": 2048, "val_batch_tokens": 2048, "val_sha256": ""}
    config = dataclasses.replace(recipe.config_of(arm, 1), data=str(corpus), **small)
    monkeypatch.setattr(recipe.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(recipe, "config_of", lambda arm, seed: config)
    found = recipe.measure(arm, 1)
    assert found["tokens"] == train_gpt.training_tokens(config)
    assert 1 < found["loss"] == found["points"][2] < 7
