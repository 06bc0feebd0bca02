"""benchmarks/recipe.py: what its arms change, and what its tables say of made-up runs."""

import json

import pytest

import train_gpt
from benchmarks import common, recipe
from helpers import ROOT

pytestmark = pytest.mark.slow


def made_up(arm, seed, loss, tokens=1000):
    facts = {"steps": recipe.STEPS_OF[arm], "tokens": tokens, "seconds": 2.0}
    return {"arm": arm, "seed": seed, "loss": loss, **facts}


def test_arms_see_the_published_trainers_tokens():
    assert train_gpt.training_tokens(recipe.config_of("ours", 1)) == recipe.TOKENS == 824_320
    assert train_gpt.training_tokens(recipe.config_of("fewer", 1)) < 0.85 * recipe.TOKENS
    assert recipe.config_of("ours", 1).ngram_orders == (2,)


def test_target_is_the_published_trainers_mean():
    runs = recipe.of_arm([], "published", recipe.STEPS)
    mean = pytest.approx(recipe.mean_loss(runs), abs=5e-4)
    assert len(runs) == 3 and train_gpt.TRACKS["mini"].target_loss == mean


def test_the_page_says_what_was_measured():
    runs = json.loads((ROOT / "benchmarks/results/recipe.json").read_text())["runs"]
    text = (ROOT / "benchmarks/results/recipe.md").read_text()
    assert text.startswith(recipe.losses_table(runs)) and recipe.summary(runs) in text
    ours = [run["loss"] for run in recipe.of_arm(runs, "ours")]
    assert f"| ours | 400 | {common.spread(ours, 4)} |" in text and len(ours) == 3


def test_summary():
    assert recipe.summary([]) == "ours:not measured"
    runs = [made_up("ours", seed, 1.0 + seed / 10) for seed in (1, 2, 3)]
    assert recipe.summary(runs).endswith("seeds:3 tokens_ratio:not measured")
    runs.append(made_up("fewer", 1, 1.27, tokens=700))
    assert recipe.summary(runs) == "ours:1.2000 published:1.2789 seeds:3 tokens_ratio:0.70"
    runs.append(made_up("fewer", 2, 1.3, tokens=700))
    assert recipe.summary(runs).endswith("tokens_ratio:not reached")
