"""benchmarks/plain_gpt.py: the loss against float64, an interrupted tuning, and turns beside our
trainer."""

import json
import types

import pytest
import torch

from benchmarks import common, plain_gpt


@torch.no_grad()
def test_the_loss_against_float64():
    model = plain_gpt.PlainGPT(50, 64, 1, 12)
    model.initialise(0)
    tokens = torch.arange(12) ** 2 % 50
    for param in model.parameters():
        param.normal_(0, 0.3)
    found = model(tokens[None, :-1], tokens[None, 1:])[0]
    block = model.double().blocks[0]
    x = model.embed.weight[tokens[:-1]] + model.position.weight[:11]
    inner = block.norm1(x) @ block.self_attn.in_proj_weight.T + block.self_attn.in_proj_bias
    q, k, v = inner.view(11, 3, 2, 32).unbind(1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5
    hidden = torch.ones(11, 11).triu(1).bool()
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    x = x + block.self_attn.out_proj(mixed.flatten(1))
    x = x + block.linear2(torch.nn.functional.gelu(block.linear1(block.norm2(x))))
    expected = (model.norm(x) @ model.embed.weight.T).log_softmax(-1)[range(11), tokens[1:]]
    torch.testing.assert_close(found.double(), -expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bound", "steps"), [(9.0, 20), (0.0, 16)])
def test_a_tuning_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, bound, steps):
    text = {"vocab_size": 50, "train": torch.arange(999) % 50, "val": torch.arange(257) % 50}
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # later forks would hang
    monkeypatch.setattr(plain_gpt.Corpus, "__init__", lambda self, _: vars(self).update(text))
    monkeypatch.setattr(plain_gpt, "calibrate", lambda few, _: {one.shape: 15.0 for one in few})
    monkeypatch.setattr(plain_gpt, "GRID", [plain_gpt.Setting(32, 1, 16, 64, 0.01)])
    monkeypatch.setattr(plain_gpt, "FINALISTS", plain_gpt.GRID)
    monkeypatch.setattr(plain_gpt, "LENGTHS", (300, plain_gpt.LONG))
    monkeypatch.setattr(plain_gpt, "GIVE_UP", {0.4: 9.0, 0.8: bound})
    # This machine is twice as fast as the first, on which the reference shape took 30 seconds.
    known = {"runs": [], "step_seconds": {plain_gpt.REFERENCE.shape: 30.0}}
    (tmp_path / "plain_gpt.json").write_text(json.dumps(known))
    ends = []
    for _ in range(2):
        plain_gpt.main(["--results", str(tmp_path)])
        content = json.loads((tmp_path / "plain_gpt.json").read_text())
        ends.append(list(content["runs"]))
        content["runs"] = content["runs"][:3]
        (tmp_path / "plain_gpt.json").write_text(json.dumps(content))
    assert ends[0] == ends[1]
    taken = [(run["seconds"], run["seed"], run["steps"], run["planned"]) for run in ends[0]]
    long = [(600, seed, steps, 20) for seed in (1, 2)]
    assert taken == [(60, 1, 2, 2), long[0], (300, 1, 10, 10), (300, 2, 10, 10), long[1]]
    cell = "20" if steps == 20 else f"{steps} of 20"
    assert f"| {cell} |" in (tmp_path / "plain_gpt.md").read_text()


def runs_of(losses):
    """Figures of runs of one setting: {seconds: losses of its seeds}."""
    run = plain_gpt.Setting(128, 2, 128, 2048, 0.003)._asdict()
    return [
        {**run, "seconds": seconds, "seed": seed, "planned": 16 * seconds, "loss": loss}
        for seconds, own in losses.items()
        for seed, loss in enumerate(own, start=1)
    ]


def test_the_time_to_the_target_lies_between_two_lengths():
    target = common.TRACK.target_loss
    runs = runs_of({600: (target - 0.03, target - 0.01)})
    assert plain_gpt.contenders_of(runs) == []  # not all lengths are there
    runs += runs_of({540: (target + 0.06, target)})
    (found,) = plain_gpt.contenders_of(runs)
    # 0.03 above the target at 540 seconds, and 0.02 below it at 600.
    assert found["seconds"] == pytest.approx(576) and found["steps"] == 16 * 576
    assert found["tokens"] == 16 * 576 * 2048 and found["seeds"] == 2
    earlier = [{**run, "width": 192, "loss": run["loss"] - 0.01} for run in runs]
    assert [one["width"] for one in plain_gpt.contenders_of([*runs, *earlier])] == [192, 128]
    # Time is never extrapolated.
    assert plain_gpt.contenders_of([{**run, "loss": target - 0.1} for run in runs]) == []


def test_the_yardstick_is_first_by_the_products_of_the_turns(monkeypatch):
    """It needs fewer steps, of a shape that takes longer."""
    times = {128: 0.03, 192: 0.05}
    monkeypatch.setattr(
        plain_gpt,
        "calibrate",
        lambda settings, _: {one.shape: times[one.width] for one in settings},
    )
    (first,) = runs_of({600: [2.9]})
    contenders = [{**first, "steps": 9000}, {**first, "width": 192, "steps": 5000}]
    assert plain_gpt.yardstick_of(contenders, None)["width"] == 192


def test_the_plain_gpt_stops_where_its_smoothed_loss_is_no_higher():
    def training(loss_of):
        steps = []

        def step(number):
            steps.append(number)
            return 0.5

        return types.SimpleNamespace(steps=400, step=step, loss=lambda: loss_of(len(steps)))

    # A look every ten steps: the mean of 3.7, 3.6 and 3.5 is the first that is low enough.
    falling = training(lambda count: 5.0 - count / 100)
    assert plain_gpt.seconds_to_loss(falling, 3.6) == (0.5 * 140, pytest.approx(3.6))
    # One lucky look at step 200 does not do.
    lucky = training(lambda count: 3.0 if count == 200 else 4.0)
    assert plain_gpt.seconds_to_loss(lucky, 3.5)[1] == 4.0


def test_turns_replace_those_of_the_call_before(tmp_path, monkeypatch, capsys):
    """A folder has the tuned setting; the steps of both sides are not taken."""
    corpus = types.SimpleNamespace(vocab_size=50)
    monkeypatch.setattr(plain_gpt, "Corpus", lambda folder: corpus)
    monkeypatch.setattr(plain_gpt, "seconds_of_steps", lambda setting, steps, corpus: steps / 91.2)
    monkeypatch.setattr(plain_gpt, "Training", lambda setting, seed, steps, corpus: seed)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setattr(plain_gpt, "calibrate", lambda few, _: {one.shape: 1.0 for one in few})
    # They reach the target in the middle between 540 seconds and 600.
    target = common.TRACK.target_loss
    runs = runs_of({600: [target - 0.01], 540: [target + 0.01], 480: [9.0]})
    content = {"runs": runs, "step_seconds": {}}
    (tmp_path / "plain_gpt.json").write_text(json.dumps(content))
    calls = []

    def train(folder, run_id, words, world_size, script):
        calls.append(words)
        (tmp_path / "log.txt").write_text("final val_loss:2.94000 train_time:25000ms tokens:1\n")
        return tmp_path

    monkeypatch.setattr(common, "train", train)

    def last_line(*words):
        plain_gpt.main([*words, "--results", str(tmp_path)])
        return capsys.readouterr().out.strip()

    for turns in (3, 2):
        line = f"english factor:4.00 low:4.00 high:4.00 turns:{turns}"
        assert last_line("--turns", str(turns)) == line
    assert calls[-1] == ["--track", common.TRACK.track, "--device", "cpu", "--seed", "2"]
    content = json.loads((tmp_path / "plain_turns.json").read_text())["turns"]
    assert [turn["plain_loss"] for turn in content["english"]] == [target, target]
    monkeypatch.setattr(
        plain_gpt, "looks_at", lambda training: [(2280, 7.0, 4.5), (4560, 9.0, 4.0)]
    )
    plain_gpt.main(["--curve", "--results", str(tmp_path)])
    curve = json.loads((tmp_path / "plain_curve.json").read_text())
    assert (curve["seconds"], curve["loss"]) == ([25.0, 50.0], [4.5, 4.0])
    verse = ["--corpus", "data/verse"]
    monkeypatch.setattr(plain_gpt, "seconds_to_loss", lambda training, loss: (50.0 * training, 2.9))
    assert last_line("--turns", "2", *verse) == "verse factor:3.00 low:2.00 high:4.00 turns:2"
    assert calls[-1][-2:] == ["--data", "data/verse"]
    # A plain GPT that never comes as low has no time.
    monkeypatch.setattr(plain_gpt, "seconds_to_loss", lambda training, loss: (50.0, 2.95))
    assert last_line("--turns", "1", *verse) == "verse factor:inf low:inf high:inf turns:1"
