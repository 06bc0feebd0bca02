"""Prices: their statistics against slow forms, and that each variant is one."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import train_gpt
from benchmarks import prices

SMALL = {
    "steps": 20,  # so that the last tenth of them are two
    "tokenizer": "bytes",
    "vocab_size": 257,
    "eot_token": 256,
    "micro_batch_tokens": 128,
    "val_batch_tokens": 256,
    "val_tokens": 1024,
    "val_sha256": "",
    "index_order": 0,
}


def figures(change, seed, loss, configuration="plain_table"):
    own = {"configuration": configuration, "change": change, "seed": seed}
    return {**own, "loss": loss, "core_seconds": 1.0}


def test_gains_are_paired_and_have_the_sign_of_the_feature():
    runs = [figures("control", 1, 3.0), figures("control", 2, 3.1), figures("control", 3, 9.0)]
    runs += [figures("Muon", 1, 3.2), figures("Muon", 2, 3.4)]  # the track has it: it is left out
    runs += [figures("KL-SOAP", 2, 3.0)]  # the track lacks it: it is put in
    gains = prices.gains_of(prices.losses_of(runs, "plain_table"))
    assert gains["Muon"] == pytest.approx([0.2, 0.3])
    assert gains["KL-SOAP"] == pytest.approx([0.1])


def test_a_gain_as_a_share_of_steps():
    """A loss of a - k ln(steps): steps saved are those that reach the old loss sooner."""
    fewer, more = 125, 195
    runs = [figures(str(steps), 1, 5 - 0.3 * np.log(steps)) for steps in (fewer, more)]
    fall = prices.fall_of_loss(prices.losses_of(runs, "plain_table"), (fewer, more))
    assert fall == pytest.approx(0.3)
    gain = 0.3 * np.log(200 / 150)  # 200 steps without are worth 150 with
    assert prices.shares(gain, fall) == pytest.approx(25.0)


def test_the_area_against_all_pairs():
    helpful = [0.3, 0.1, 0.2]
    dropped = [0.2, -0.1]
    pairs = itertools.product(helpful, dropped)
    wins = [1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in pairs]
    assert prices.area(helpful, dropped) == pytest.approx(sum(wins) / 6)


def test_the_verdict_on_prices_that_agree_and_on_ones_that_do_not():
    priced = [name for name, feature in prices.FEATURES.items() if "saved" in feature]
    rightly = {name: np.full(3, 0.01 * prices.FEATURES[name]["saved"]) for name in priced}
    found = prices.verdict(rightly, 1.0, priced)
    assert found["rank_correlation"] == pytest.approx(1)
    assert found["signs"] == found["features"] == len(priced)
    assert found["area"] == 1
    wrongly = {name: -gain for name, gain in rightly.items()}
    found = prices.verdict(wrongly, 1.0, priced)
    assert found["rank_correlation"] == pytest.approx(-1)
    assert found["low"] <= found["high"] < 0
    assert found["signs"] == 0


def test_a_plan_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    all_runs = prices.missing([])
    assert len(set(all_runs)) == len(all_runs)
    known = [figures(*run[1:], 3.0 + run.seed, run.configuration) for run in all_runs[:100]]
    made = {**prices.common.environment("cpu"), "date": "when they were run"}
    (tmp_path / "prices.json").write_text(
        json.dumps({"environment": made, "tracks": prices.fingerprints(), "runs": known})
    )
    assert prices.missing(known) == all_runs[100:]
    prices.main(["--minutes", "0", "--results", str(tmp_path)])
    written = json.loads((tmp_path / "prices.json").read_text())
    assert written["runs"] == known and written["environment"] == made
    assert "rank_correlation:" in (tmp_path / "prices.md").read_text()
    (tmp_path / "prices.json").write_text(json.dumps({"tracks": {}, "runs": known}))
    with pytest.raises(SystemExit, match="has runs of .* as it was; close it in prices.toml"):
        prices.main(["--minutes", "0", "--results", str(tmp_path)])


@pytest.mark.slow
def test_each_variant_changes_the_loss(corpus):
    """And no two do the same, so that none is without effect."""
    variants = [name for name, feature in prices.FEATURES.items() if "variant" in feature]
    losses = {}
    for change in [prices.CONTROL, *variants]:
        run = prices.Run("plain_table", change, 1)
        losses[change] = prices.measure(run, **SMALL, data=str(corpus))["loss"]
    assert len(set(losses.values())) == len(losses) == 1 + len(prices.VARIANTS)


def test_runs_of_other_numbers_do_not_mix(monkeypatch):
    """But for what a configuration does not use, or sets itself."""
    name, *_ = prices.open_ones()
    before = prices.fingerprint(name)
    for values, is_same in [
        ({"index_tokens": 9, "steps": 9, "log_every": 2}, True),
        ({"mlp_dim": 32}, False),
        ({"cooldown": (0.5, 1.0)}, False),
    ]:
        track = train_gpt.with_values(train_gpt.TRACKS["english"], values)
        monkeypatch.setattr(prices, "TRACK", track)
        assert (prices.fingerprint(name) == before) == is_same, values


def test_runs_of_other_models_do_not_mix(monkeypatch):
    name, *_ = prices.open_ones()
    before = prices.fingerprint(name)
    own = train_gpt.GPT.__init__

    def changed(model, config, back_end):
        own(model, config, back_end)
        model.smear_scale.rule = dataclasses.replace(model.smear_scale.rule, lr_mul=4.0)

    monkeypatch.setattr(train_gpt.GPT, "__init__", changed)
    assert prices.fingerprint(name) != before


def test_each_value_is_one_that_the_track_has_not():
    def configured(change):
        values, replaced = prices.changes_of(prices.Run("plain_table", change, 1))
        return train_gpt.with_values(train_gpt.TRACKS["english"], values), replaced

    control, _ = configured(prices.CONTROL)
    for name in prices.FEATURES:
        config, replaced = configured(name)
        assert config != control or replaced
