"""benchmarks/plain_gpt.py: the loss against float64 and at the start, and a tuning that was
interrupted; and plain_turns.py: a factor that is of turns with one record."""

import json
import math
import types

import pytest
import torch

from benchmarks import common, plain_gpt, plain_turns


@torch.no_grad()
def test_the_loss_against_float64():
    model = plain_gpt.PlainGPT(plain_gpt.Shape(50, 64, 1), 12)
    model.initialise(0)
    tokens = torch.arange(12) ** 2 % 50
    begun = model(tokens[None, :-1], tokens[None, 1:]).mean().item()
    assert begun == pytest.approx(math.log(50), abs=0.2)
    for param in model.parameters():
        param.normal_(0, 0.3)
    found = model(tokens[None, :-1], tokens[None, 1:])[0]
    block = model.double().blocks[0]
    x = model.embed.weight[tokens[:-1]] + model.position.weight[:11]
    inner = block.norm1(x) @ block.self_attn.in_proj_weight.T + block.self_attn.in_proj_bias
    heads = inner.view(11, 3, 2, 32).unbind(1)
    mixed = common.reference_attention(*heads, torch.zeros(11), 11, 32**-0.5)
    x = x + block.self_attn.out_proj(mixed.flatten(1))
    x = x + block.linear2(torch.nn.functional.gelu(block.linear1(block.norm2(x))))
    expected = (model.norm(x) @ model.embed.weight.T).log_softmax(-1)[range(11), tokens[1:]]
    torch.testing.assert_close(found.double(), -expected, rtol=1e-4, atol=1e-4)


def test_a_tuning_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    text = {"vocab_size": 50, "train": torch.arange(999) % 50, "val": torch.arange(257) % 50}
    monkeypatch.setattr(
        torch, "set_num_threads", lambda _: None
    )  # ranks that are forked later hang
    monkeypatch.setattr(plain_gpt.Corpus, "__init__", lambda self, _: vars(self).update(text))
    monkeypatch.setattr(plain_gpt, "calibrate", lambda grid, _: {grid[0].shape: 30.0})
    monkeypatch.setattr(plain_gpt, "GRID", [plain_gpt.Setting(32, 1, 16, 64, 0.01)])
    ends = []
    for _ in range(2):
        plain_gpt.main(["--results", str(tmp_path)])
        content = json.loads((tmp_path / "plain_gpt.json").read_text())
        ends.append([{**run, "fastest_step": 0} for run in content["runs"]])
        content["runs"] = content["runs"][:3]
        (tmp_path / "plain_gpt.json").write_text(json.dumps(content))
    assert ends[0] == ends[1] and len(ends[0]) == 1 + 5


def turn(record, plain_seconds, seconds):
    return {"record": record, "plain_seconds": plain_seconds, "seconds": seconds, "loss": 2.95}


def test_a_factor_is_the_median_over_turns_of_the_last_record():
    turns = [turn("old", 600.0, 600.0), turn("new", 600.0, 20.0), turn("new", 1000.0, 20.0)]
    turns += [turn("new", 700.0, 20.0)]
    page, line = plain_turns.report(turns)
    assert line == "plain_turns record:new factor:35.0 low:30.0 high:50.0 turns:3"
    assert page.count("\n") == 4 and "| 3 | 700 | 20.0 | 35.0 |" in page


def test_the_plain_seconds_are_those_of_all_its_tokens(monkeypatch):
    text = types.SimpleNamespace(vocab_size=50, train=torch.arange(999) % 50)
    setting = plain_gpt.Setting(32, 1, 16, 64, 0.01)
    monkeypatch.setattr(plain_gpt.Training, "step", lambda self, number: 0.5)
    assert plain_turns.plain_seconds(setting, text, 3.0, 640) == 0.5 * 10


def test_the_plain_seconds_elsewhere_end_at_the_first_look_at_no_higher_a_loss():
    def training(loss_of):
        steps = []

        def step(number):
            steps.append(number)
            return 0.5

        return types.SimpleNamespace(steps=400, step=step, loss=lambda: loss_of(len(steps)))

    passed = training(lambda count: 5.0 - count / 100)
    assert plain_turns.seconds_to_loss(passed, 3.65) == (0.5 * 140, 3.6)  # a look every 10 steps
    assert plain_turns.seconds_to_loss(training(lambda count: 4.0), 3.65) == (0.5 * 400, 4.0)


def test_a_factor_elsewhere_is_of_a_plain_gpt_that_was_looked_at():
    run = {"corpus": "verse", "val_tokens": 4096, "plain_loss": 3.8, "loss": 3.9}
    run |= {"plain_seconds": 90.0, "seconds": 0.5}
    page = plain_turns.report_elsewhere([run, {**run, "looks": plain_turns.LOOKS}])
    assert [line.split(" | ")[-1] for line in page.splitlines()[2:]] == ["- |", "180.0 |"]
