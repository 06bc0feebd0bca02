"""Chapters 1, 7 and 9: schedules, a step, the log of a run, warm-up, how runs end."""
import copy
import dataclasses
import datetime
import hashlib
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import INDEX, NO_TABLE, arguments, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import Runtime

# ----- schedules


def test_schedules_are_functions_of_the_step():
    config = tiny_config(steps=10, micro_batches=((0.0, 2), (0.25, 4), (0.5, 8)), cooldown=0.5, final_lr=0.1,
                         windows=((0.0, (16, 32)), (0.3, (32, 32)), (0.6, (32, 64))), momentum=(0.8, 0.9),
                         mtp_weights=((0.0, (1.0, 0.5)), (0.5, (1.0,))), untie_at=0.4)
    assert [train_gpt.at_step(config.micro_batches, step, config) for step in range(10)] == [2] * 3 + [4] * 2 + [8] * 5
    assert [train_gpt.lr_multiplier(config, step) for step in range(10)] == pytest.approx(
        [1, 1, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28])
    assert train_gpt.lr_multiplier(config, 10) == pytest.approx(0.1)
    assert [train_gpt.momentum_at(config, step) for step in range(3)] == pytest.approx([0.8, 0.9, 0.9])
    assert [train_gpt.windows_until(config, step) for step in (0, 2, 3, 5, 6, 9)] == [
        (32,), (32,), (32,), (32,), (32, 64), (32, 64)]
    phases = [train_gpt.phase_at(config, step) for step in range(10)]
    assert [phase.windows for phase in phases] == [(16, 32)] * 3 + [(32, 32)] * 3 + [(32, 64)] * 4
    assert [phase.mtp_weights for phase in phases] == [(1.0, 0.5)] * 5 + [(1.0,)] * 5
    assert [phase.tied for phase in phases] == [True] * 4 + [False] * 6


def test_stages_scale_the_rates_ahead_of_the_cooldown():
    config = tiny_config(steps=10, lr_stages=((0.0, 1.0), (0.3, 1.5), (0.6, 2.0)), cooldown=0.5, final_lr=0.1)
    factors = [1, 1, 1, 1.5, 1.5, 1.5, 2, 2, 2, 2]
    left = [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert [train_gpt.lr_multiplier(config, step) for step in range(10)] == pytest.approx(
        [factor * part + 0.1 * (1 - part) for factor, part in zip(factors, left)])
    assert train_gpt.lr_multiplier(config, 10) == pytest.approx(0.1)


def test_momentum_rises_and_falls():
    config = tiny_config(steps=20, momentum=(0.8, 0.9, 0.2, 0.1))
    assert [train_gpt.momentum_at(config, step) for step in (0, 1, 2, 4, 10, 18, 19, 20)] == pytest.approx(
        [0.8, 0.825, 0.85, 0.9, 0.9, 0.9, 0.85, 0.8])


def test_windows_of_the_final_validation():
    """An entry at 1 is of no training step, and YaRN, which follows training, does not know it."""
    config = tiny_config(steps=8, windows=((0.0, (16, 32)), (0.5, (32, 64)), (1.0, (64, 128))))
    assert [train_gpt.phase_at(config, step).windows for step in (0, 4, 7, 8)] == [
        (16, 32), (32, 64), (32, 64), (64, 128)]
    assert train_gpt.windows_until(config, 8) == train_gpt.windows_until(config, 7) == (32, 64)


def test_validation_in_longer_pieces_cuts_fewer_documents(corpus):
    """Each piece is scored as the longer text that it is, by as many tokens as before, and the gates hold on it."""
    tokens = train_gpt.open_shard(next(corpus.glob("*_val_*")))
    short, long = (make_trainer(val_batch_tokens=length, document_cap=((0.0, 1024),)) for length in (0, 1024))
    text = train_gpt.Text(tokens, long.config)
    pieces = [torch.cat([short.score(0, text, low)[0] for low in range(0, 1024, 256)]), long.score(0, text, 0)[0]]
    document = text.starts[text.documents(np.arange(1024))]
    cut = np.arange(1024) // 256 * 256 > document  # where a document began in an earlier short piece
    differs = (pieces[0] - pieces[1]).abs().numpy() > 1e-5
    assert cut.any() and differs[cut].any() and not differs[~cut].any()
    assert long.evaluate(0, tokens) == pytest.approx(pieces[1].double().mean().item(), abs=1e-6)
    assert all(gate(long, 0, tokens) for gate in train_gpt.GATES.values())


def test_warm_up_takes_every_group_through_its_step():
    """Else what compiles an update would compile it on the clock."""
    trainer = make_trainer(random_weights=False, **{**PHASES, "steps": 9, "adam_every": 4})
    seen, groups = set(), trainer.optimizer.groups
    for group in groups:
        update = group.update
        group.update = lambda step, lr_mul, group=group, update=update: (
            seen.add((group.name, step % group.every + 1)), update(step, lr_mul))
    train_gpt.warm_up(trainer)
    # Of Adam's steps the last is on one step's gradients, all others are on four.
    assert seen == {("small", 4), ("small", 1), ("embeddings", 4), ("embeddings", 1), ("ngram_table", 1),
                    ("matrices", 1)}


def test_the_learning_rate_without_cooldown_is_constant():
    config = tiny_config(steps=5, cooldown=0.0, final_lr=0.0)
    assert [train_gpt.lr_multiplier(config, step) for step in range(5)] == [1.0] * 5


# ----- the log of a run

@pytest.fixture(scope="module")
def log(rich_run):
    return (rich_run.folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def events(log):
    """The log's lines after the source."""
    return log.split("\n===== END OF CODE =====\n")[1].splitlines()


def event_of(kind, lines):
    """The one line of that kind."""
    line, = (line for line in lines if re.match(rf"{kind}\b", line))
    return line


def test_the_log_opens_with_the_source(log, rich_run):
    source, mark, _ = log.partition("\n===== END OF CODE =====\n")
    assert mark and source == rich_run.source.rstrip("\n")
    assert log.count("\n===== END OF CODE =====\n") == log.count("\n===== START =====\n") == 1


def test_the_run_line(log, events, rich_run):
    run = re.fullmatch(r"run:rich track:nano commit:(?P<commit>[0-9a-f]{40}|none) dirty:[01] "
                       r"code_sha256:(?P<sha>[0-9a-f]{64}) seed:1 world_size:1 device:(?P<device>.+) "
                       r"torch:(?P<torch>\S+) cuda:\S+ triton:\S+ started:(?P<started>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)",
                       events[0])
    assert run
    source = log.partition("===== END OF CODE =====\n")[0]
    assert run["sha"] == hashlib.sha256(source.encode()).hexdigest() == rich_run.result["code_sha256"]
    assert run["torch"] == torch.__version__ == rich_run.result["torch"]
    for key in ("device", "commit", "started"):
        assert run[key] == rich_run.result[key]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(run["started"])
    assert datetime.timedelta() <= age < datetime.timedelta(hours=3)  # it is UTC


def test_the_config_line_holds_every_field(events, rich_run, rich):
    logged = json.loads(event_of("config", events).removeprefix("config:"))
    assert list(logged) == [field.name for field in dataclasses.fields(train_gpt.Config)]
    assert logged == rich_run.result["config"]
    config, _ = train_gpt.config_from(train_gpt.parse_arguments(arguments({**rich, "run_id": "rich"})))
    assert logged == json.loads(json.dumps(dataclasses.asdict(config)))


def test_the_overrides_line_holds_what_makes_it_no_record(events, rich_run):
    logged = json.loads(event_of("overrides", events).removeprefix("overrides:"))
    nano = train_gpt.TRACKS["nano"]
    assert logged == rich_run.result["overrides"]
    assert {"steps", "data", "model_dim", "val_tokens", "untie_at"} <= set(logged)
    assert not {"seed", "device", "log_every", "save_every", "run_id"} & set(logged)
    for key, value in logged.items():
        assert value != json.loads(json.dumps(getattr(nano, key)))


def test_the_data_line(events, corpus):
    sha = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    assert f"data:{sha} shards:ok backends:attention=sdpa,matmul=torch-float32,compile=off" in events


def test_lines_come_in_order(events):
    kinds = [re.match(r"===== START =====|[a-z]+", line)[0] for line in events]
    assert kinds[:6] == ["run", "config", "overrides", "data", "size", "===== START ====="]
    assert kinds[-4:] == ["comms", "validity", "final", "status"]
    assert set(kinds[6:-4]) == {"step"}


def test_the_size_line_counts_the_values_of_each_group(events, rich_run):
    model, table = rich_run.checkpoint()["model"], 1000 * 32
    groups = {"matrices": ("attention", "mlp"), "embeddings": ("embed", "head", "value_embed")}
    sizes = {key: sum(model[name].numel() for name in names) for key, names in groups.items()}
    small = sum(value.numel() for value in model.values()) - sum(sizes.values())
    assert event_of("size", events) == (f"size: small={small:,} embeddings={sizes['embeddings']:,} "
                                        f"ngram_table={table:,} matrices={sizes['matrices']:,}")


def test_step_lines_agree_with_the_metrics(events, rich_run):
    train = re.compile(r"step:(\d+)/20 train_loss:(\d+\.\d{5}) lr_mul:(\d\.\d{3}) train_time:(\d+)ms "
                       r"step_avg:(\d+\.\d\d)ms")
    val = re.compile(r"step:(\d+)/20 val_loss:(\d+\.\d{5}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
    lines = [line for line in events if line.startswith("step:")]
    assert len(lines) == len(rich_run.metrics) == 22
    times = []
    for line, event in zip(lines, rich_run.metrics):
        if "train_loss" in event:
            step, loss, lr, milliseconds, average = train.fullmatch(line).groups()
            assert loss == f"{event['train_loss']:.5f}"
            assert float(lr) == pytest.approx(event["lr_mul"], abs=6e-4)
        else:
            step, loss, milliseconds, average = val.fullmatch(line).groups()
            assert loss == f"{event['val_loss']:.5f}"
        assert int(step) == event["step"]
        assert int(milliseconds) == pytest.approx(event["train_time"], abs=1)
        assert float(average) == pytest.approx(event["train_time"] / event["step"], abs=0.01)
        times.append(event["train_time"])
    assert times == sorted(times) and times[0] > 0
    assert [event["step"] for event in rich_run.metrics if "val_loss" in event] == [10, 20]
    assert rich_run.metrics[-1].keys() == {"step", "val_loss", "train_time", "step_avg"}


def test_the_final_lines_agree_with_the_result(events, rich_run, rich):
    result = rich_run.result
    final = re.fullmatch(r"final val_loss:(\S+) train_time:(\d+)ms tokens:(\d+) peak_memory:(\d+)MiB "
                         r"tokens_per_s:(\d+) mfu:(\d+\.\d)% cpu_time:(\d+)ms", event_of("final", events))
    assert final[1] == f"{result['val_loss']:.5f}" and result["val_loss"] == rich_run.metrics[-1]["val_loss"]
    assert int(final[2]) == pytest.approx(result["train_time_ms"], abs=1)
    assert int(final[3]) == result["tokens"] == 20 * 12 * 256
    assert int(final[4]) == max(result["peak_memory_mib_by_rank"]) > 50
    assert len(result["peak_memory_mib_by_rank"]) == 1
    assert int(final[5]) == pytest.approx(1000 * result["tokens"] / result["train_time_ms"], abs=1)
    assert float(final[6]) == pytest.approx(result["mfu_percent"], abs=0.051) and 0 < result["mfu_percent"] < 100
    assert int(final[7]) == pytest.approx(result["cpu_time_ms"], abs=1)
    validity = re.match(r"validity: causal:ok normalised:ok local:ok val_tokens:1024 val_sha256:([0-9a-f]{64})",
                        event_of("validity", events))
    *_, val = train_gpt.open_corpus(tiny_config(data=rich["data"]))
    assert validity[1] == result["val_sha256"] == hashlib.sha256(val[:1025].tobytes()).hexdigest()
    assert result["validity"] == {"causal": True, "normalised": True, "local": True}
    assert (result["run"], result["track"], result["seed"], result["steps"]) == ("rich", "nano", 1, 20)


def test_the_status_is_the_last_line(events, rich_run):
    assert rich_run.code == 0 and rich_run.stderr == ""
    assert events[-1].startswith("status:ok ") and rich_run.lines[-1] == events[-1]
    assert rich_run.lines == events  # the console shows what the log holds, less the source


@pytest.mark.parametrize("world_size", [1, 2])
def test_throughput_and_mfu_follow_from_the_clock(world_size, tiny, tmp_path):
    """Four steps of two micro-batches of 256 tokens in two seconds, by ranks that do 1e9 operations a second."""
    def before():
        train_gpt.Clock.seconds = lambda self: 2.0
        train_gpt.matmul_rate = lambda device, dtype: 1e9 if dtype == torch.float32 else 0.0
    run = ranks.train(tmp_path, {**tiny, "run_id": "clocked"}, world_size=world_size, before=before)
    assert run.code == 0, run.stderr
    matrices, head = 2 * (4 * 32 * 32 + 2 * 64 * 32), 257 * 32  # what a token is multiplied with
    mfu = 100 * 6 * (matrices + head) * 1024 / (1e9 * world_size)
    assert run.result["tokens_per_s"] == 1024 and run.result["mfu_percent"] == pytest.approx(mfu)
    assert f" train_time:2000ms tokens:2048 peak_memory:{max(run.result['peak_memory_mib_by_rank'])}MiB " \
           f"tokens_per_s:1024 mfu:{mfu:.1f}% cpu_time:" in run.lines[-2]


def test_processor_time_is_that_of_work_alone():
    clock = train_gpt.Clock(Runtime("cpu"))
    clock.start()
    time.sleep(0.3)
    slept = time.process_time()
    while time.process_time() < slept + 0.1:
        pass
    clock.stop()
    assert 0.1 <= clock.processor < 0.25 and clock.seconds() >= 0.3 + 0.1


def test_a_matrix_product_is_timed():
    """A rate that some machine could have: the fake of the test above stands for it."""
    rate = train_gpt.matmul_rate(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e15


def test_a_run_of_a_record_says_which_it_is(tiny, cli, monkeypatch):
    values = {key: value for key, value in tiny.items() if key not in ("seed", "device", "log_every")}
    monkeypatch.setitem(train_gpt.TRACKS, "nano", tiny_config(**values, log_every=20))
    run = cli(run_id="third", run_of="1:3/8:2", seed=5, device="cpu", log_every=2)
    assert run.code == 0 and run.result["overrides"] == {}
    lines = (run.folder / "log.txt").read_text().split("===== END OF CODE =====\n")[1].splitlines()
    assert lines[2] == "batch:1 counter:3/8 start:2"
    run = cli(run_id="other", run_of="1:3/8:2", steps=3)
    assert run.code == 0 and "overrides:{\"steps\": 3}" in run.lines and "batch:" not in run.stdout


def test_the_validation_loss_is_the_mean_over_the_first_tokens(rich_run, rich):
    content = rich_run.checkpoint()
    trainer, step = train_gpt.Trainer(train_gpt.config_of_checkpoint(content), Runtime("cpu")), content["step"]
    train_gpt.restore(trainer, content)
    *_, val = train_gpt.open_corpus(trainer.config)
    text, total = train_gpt.Text(val, trainer.config), 0.0
    for low in range(0, 1024, 256):
        total += trainer.score(step, text, low)[0].double().sum().item()
    assert rich_run.result["val_loss"] == pytest.approx(total / 1024, abs=1e-9)


def test_the_logged_training_loss_is_that_of_the_global_batch(tiny, cli):
    """The first loss of a run, worked out without the training loop."""
    run = cli(**{**tiny, "run_id": "first", "steps": 2, "micro_batches": ((0.0, 4),)})
    trainer = make_trainer(random_weights=False, steps=2, micro_batches=((0.0, 4),))
    shards, *_ = train_gpt.open_corpus(dataclasses.replace(trainer.config, data=tiny["data"]))
    loader = train_gpt.TrainLoader(trainer.config, shards, trainer.runtime)
    losses = [trainer.model(micro_batch, trainer.table.lookup(micro_batch, trainer.table.weight),
                            trainer.context(0, micro_batch))[1] for micro_batch in loader.next().micro_batches]
    loader.close()
    assert run.train_losses[1] == pytest.approx(torch.cat(losses).double().mean().item(), abs=1e-5)


def test_a_logged_training_loss_is_the_mean_since_the_last_one(tiny, cli):
    values = {**tiny, "steps": 7, "micro_batches": ((0.0, 2), (0.5, 4))}
    each, some = (cli(**{**values, "run_id": f"every{every}", "log_every": every}) for every in (1, 3))
    losses, counts = each.train_losses, {step: 2 if step <= 4 else 4 for step in range(1, 8)}
    def mean(steps):
        return sum(losses[step] * counts[step] for step in steps) / sum(counts[step] for step in steps)
    assert some.train_losses == pytest.approx({3: mean((1, 2, 3)), 6: mean((4, 5, 6)), 7: losses[7]}, abs=1e-9)


def test_a_step_takes_the_gradient_of_the_mean_loss():
    trainer = make_trainer(mtp_weights=((0.0, (1.0, 0.5)),))
    tokens = byte_documents(1100)
    micro_batches, ngrams = zip(*(read(trainer, tokens, low) for low in (0, 256, 512)))
    optimizer, table, taken = trainer.optimizer, trainer.table, {}
    optimizer.step = lambda step, lr_mul: taken.update(lr_mul=lr_mul, plans=(table.plan, table.upcoming))
    upcoming = train_gpt.Batch([], "next plan", {})
    summed, returned = trainer.step(2, train_gpt.Batch(list(micro_batches), "plan", {}), lambda: upcoming)
    assert returned is upcoming and taken["plans"] == ("plan", "next plan")
    outputs = [trainer.model(micro_batch, ngram, trainer.context(2, micro_batch, training=True))
               for micro_batch, ngram in zip(micro_batches, ngrams)]
    loss = sum(loss for loss, *_ in outputs) / 3
    params = dict(trainer.model.named_parameters())
    *grads, first, second, third = torch.autograd.grad(loss, [*params.values(), *ngrams])
    assert optimizer.layouts.keys() == params.keys()
    for name, grad in zip(params, grads):
        torch.testing.assert_close(optimizer.layouts[name].grad, grad, atol=1e-6, rtol=1e-4)
    assert [tokens for _, tokens in table.grads] == [768] * 3  # of the step, whose mean the loss is
    torch.testing.assert_close([grad for grad, _ in table.grads], [first, second, third])
    torch.testing.assert_close(summed, sum(losses.sum() for _, losses, _ in outputs))
    assert taken["lr_mul"] == train_gpt.lr_multiplier(trainer.config, 2)


# ----- unusual but good runs

@pytest.mark.parametrize("changes", [
    NO_TABLE,
    {"value_embedding_layers": ()},
    {"num_layers": 1, "long_layers": (), "value_embedding_layers": ()},
    {"steps": 1, "seed": 2**63 - 1},
    {"dtype": "bfloat16", "untie_at": 1.0},
    {"mtp_weights": ((0.0, (1.0, 0.5, 0.25)),), "adam_every": 3},
    {"val_every": 1, "log_every": 100, "matrix_decay": 0.0, "cooldown": 0.0},
], ids=str)
def test_unusual_configurations_complete(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "unusual", **changes})
    assert run.code == 0, run.stdout
    assert run.lines[-1].startswith("status:ok ")
    assert "causal:ok normalised:ok local:ok" in event_of("validity", run.lines)


def test_a_seed_is_drawn_and_logged(tiny, cli):
    seeds = []
    for run_id in ("one", "two"):
        run = cli(**{**tiny, "seed": -1, "steps": 1, "run_id": run_id})
        seeds.append(int(re.search(r" seed:(-?\d+) ", run.lines[0])[1]))
        assert run.result["seed"] == run.result["config"]["seed"] == seeds[-1]
    assert min(seeds) >= 0 and seeds[0] != seeds[1]


def test_a_run_names_itself_when_it_is_not_told(tiny, cli, tmp_path):
    run = cli(**{**tiny, "steps": 1})
    names = [path.name for path in (tmp_path / "logs").iterdir()]
    assert len(names) == 1 and f"run:{names[0]} " in run.lines[0] and names[0] in run.lines[-1]


def test_a_seed_gives_the_same_run_twice(tiny, cli):
    values = {**tiny, "dtype": "bfloat16"}
    losses = [cli(**{**values, "run_id": run_id, "seed": seed}).train_losses
              for run_id, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert losses[0] == losses[1] and losses[0] != losses[2]


def test_validation_before_the_head_is_untied_scores_the_tied_model(tiny, cli):
    """Untying at step 2 or at step 3 makes no difference to the model after two steps."""
    losses = []
    for run_id, untie_at in (("two", 0.5), ("three", 0.75)):
        run = cli(**{**tiny, "run_id": run_id, "untie_at": untie_at, "val_every": 2})
        losses.append(run.val_losses[2])
    assert losses[0] == losses[1]


def test_steps_and_their_data_are_timed_and_nothing_else(tiny, cli, monkeypatch):
    """On a clock that stands still but in the functions named here: seconds of each call, and of all that are timed."""
    now, timed = [0.0], [0.0]
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(perf_counter=lambda: now[0],
                                                           process_time=lambda: 2 * now[0]))
    monkeypatch.setattr(train_gpt, "matmul_rate", lambda device, dtype: 1e9)

    def spend(place, name, seconds, counts):
        honest = getattr(place, name)
        def spending(*words):
            now[0] += seconds
            timed[0] += seconds * (counts and started[0])
            return honest(*words)
        monkeypatch.setattr(place, name, spending)

    started, warm_up = [False], train_gpt.warm_up
    def warm_up_and_begin(trainer):
        warm_up(trainer)
        started[0] = True

    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_begin)
    spend(train_gpt.Trainer, "step", 1.0, True)
    spend(train_gpt.TrainLoader, "_open_shard", 0.25, True)
    spend(train_gpt.TrainLoader, "next", 10.0, True)
    spend(train_gpt.TextIndex, "read", 0.5, True)
    for place, name in ((train_gpt.Trainer, "evaluate"), (train_gpt, "save_checkpoint"), (train_gpt, "warm_up"),
                        (train_gpt, "validation_hash"), (train_gpt, "open_corpus")):
        spend(place, name, 1000.0, False)
    run = cli(**{**tiny, **INDEX, "run_id": "slow", "val_every": 1, "save_every": 1})
    assert run.code == 0 and now[0] == 12_000 + 4 + 44.75  # four steps were of the warm-up, an evaluation of a gate
    assert timed[0] == 44.75 and run.result["train_time_ms"] == run.result["cpu_time_ms"] / 2 == 44_750
    assert [event["train_time"] for event in run.metrics if "val_loss" in event] == [21_750, 32_750, 43_750, 44_750]


# ----- warm-up

def whole_state(trainer):
    """Copies of everything that a step could have changed."""
    return copy.deepcopy({"params": dict(trainer.model.state_dict()), "rng": torch.get_rng_state(),
                          "groups": {group.name: group.tensors() for group in trainer.optimizer.groups},
                          "table": trainer.table.full_state(), "waiting": trainer.table.grads})


PHASES = dict(windows=((0.0, (32, 64)), (0.5, (64, 128))), mtp_weights=((0.0, (1.0, 0.5)), (0.5, (1.0,))),
              untie_at=0.25)


@pytest.mark.parametrize("changes", [
    {}, {"dtype": "bfloat16", "ngram_comms": "sharded"}, {"matrix_update": "soap"},
    {"ngram_comms": "sharded", "ngram_host": True}, NO_TABLE], ids=str)
def test_warm_up_leaves_no_trace(changes, corpus):
    config = {"steps": 8, "adam_every": 2, "ngram_decay": 0.5, "index_orders": (4,), "data": str(corpus), **PHASES,
              **changes}
    warm, cold = (make_trainer(random_weights=False, **config) for _ in range(2))
    shards, indexed, _ = train_gpt.open_corpus(warm.config)
    for trainer in (warm, cold):
        trainer.table.index.read(indexed, trainer.runtime)
    before = whole_state(warm)
    step, stepped = warm.step, []

    def recorded_step(number, *rest):
        stepped.append(train_gpt.phase_at(warm.config, number))
        return step(number, *rest)

    warm.step = recorded_step
    train_gpt.warm_up(warm)
    warm.step = step
    assert set(stepped) == {train_gpt.phase_at(warm.config, number) for number in range(8)}  # all were run
    assert_bitwise(whole_state(warm), before)
    # Nor does it show later: the next steps are bitwise those of a trainer that was never warmed up.
    loader = train_gpt.TrainLoader(warm.config, shards, warm.runtime, index=warm.table.index)
    for number in range(4):
        batch = loader.next()
        warm.step(number, batch), cold.step(number, batch)
    loader.close()
    assert_bitwise(whole_state(warm), whole_state(cold))
    assert not torch.equal(whole_state(warm)["params"]["mlp"], before["params"]["mlp"])


@pytest.mark.parametrize("which, adam_every", [
    (lambda trainer: trainer.model.embed, 1),
    (lambda trainer: trainer.model.residual_scale, 1),
    (lambda trainer: trainer.optimizer.matrices.state["mlp"]["momentum"], 1),
    (lambda trainer: trainer.optimizer.embeddings.layouts["head"].grad, 4),
], ids=["weight", "scalar", "momentum", "waiting gradient"])
def test_a_restore_that_misses_a_tensor_is_noticed(which, adam_every, monkeypatch):
    trainer = make_trainer(**PHASES, steps=8, adam_every=adam_every)
    forgotten = which(trainer).data_ptr()
    train_gpt.warm_up(trainer)  # all is well
    honest = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, *rest: (
        self if self.data_ptr() == forgotten and self.numel() > 0 else honest(self, source, *rest)))
    with pytest.raises(RuntimeError, match="warm-up"):
        train_gpt.warm_up(trainer)


def test_a_table_row_that_is_not_restored_is_noticed(monkeypatch):
    trainer = make_trainer(**PHASES)
    honest = train_gpt.adagrad_rows_update

    def careless(table, second, rows, *rest):
        honest(table, second, rows, *rest)
        untouched = ~torch.isin(torch.arange(len(table)), rows)
        table[untouched.nonzero()[0]] += 1

    monkeypatch.setattr(train_gpt, "adagrad_rows_update", careless)
    with pytest.raises(RuntimeError, match="warm-up"):
        train_gpt.warm_up(trainer)


def test_a_changed_scale_of_the_table_is_noticed(monkeypatch):
    trainer = make_trainer(**PHASES, ngram_decay=0.5)
    keep = train_gpt.NgramTable.keep

    def careless(self):
        put_back = keep(self)
        def put_back_less():
            put_back()
            self.scale *= 1 - 2**-50
        return put_back_less

    monkeypatch.setattr(train_gpt.NgramTable, "keep", careless)
    with pytest.raises(RuntimeError, match="warm-up"):
        train_gpt.warm_up(trainer)


# ----- how runs end

@pytest.mark.parametrize("changes", [{"adam_lr": 1e30}, {"matrix_lr": 1e30}], ids=str)
def test_a_loss_that_is_not_finite_ends_the_run(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "diverged", "steps": 20, **changes})
    assert run.code == 1
    assert run.lines[-1].startswith("status:nan ") and "learning rate" in run.lines[-1]
    assert (run.folder / "log.txt").read_text().splitlines()[-1] == run.lines[-1]
    assert len(run.train_losses) < 20
    assert not (run.folder / "result.json").exists() and not (run.folder / "checkpoint.pt").exists()


def in_the_third_step(act):
    """What a rank calls first to have `act` called in its third step after the warm-up."""
    def before():
        warm_up, step = train_gpt.warm_up, train_gpt.Trainer.step

        def acting_step(self, number, *rest):
            if number == 2:
                act()
            return step(self, number, *rest)

        def warm_up_then_act(trainer):
            warm_up(trainer)
            train_gpt.Trainer.step = acting_step

        train_gpt.warm_up = warm_up_then_act
    return before


class Dropped:
    """Its end sends a signal, where Python drops the exception that the handler raises."""
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two of these
            pass


@pytest.mark.parametrize("act", [
    lambda: os.kill(os.getpid(), signal.SIGINT), lambda: os.kill(os.getpid(), signal.SIGTERM), Dropped,
], ids=["SIGINT", "SIGTERM", "SIGINT in a destructor"])
def test_an_interrupted_run_says_so(act, tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "steps": 40, "run_id": "stopped"}, before=in_the_third_step(act))
    assert run.code == 130, run.stderr
    assert run.lines[-1] == "status:interrupted"
    assert run.stderr == "" or act is Dropped and "Exception ignored in" in run.stderr
    assert (run.folder / "log.txt").read_text().splitlines()[-1] == "status:interrupted"
    assert list(run.train_losses) in ([1, 2], [1, 2, 3] if act is Dropped else [])


@pytest.mark.parametrize("when", ["before the first line", "in the third step"])
def test_a_run_goes_on_when_the_console_is_gone(when, tiny, tmp_path):
    def close():  # as `| head -1` does
        here, there = os.pipe()
        os.dup2(there, 1)
        os.close(here)
    before = close if when == "before the first line" else in_the_third_step(close)
    run = ranks.train(tmp_path, {**tiny, "steps": 10, "run_id": "piped"}, before=before)
    assert run.code == 0 and run.stderr == ""
    assert (run.folder / "log.txt").read_text().splitlines()[-1].startswith("status:ok ") and max(run.train_losses) == 10


def test_other_validation_tokens_than_the_tracks_are_announced(tiny, cli):
    run = cli(**{**tiny, "run_id": "other", "val_sha256": "0" * 64})
    assert any("validation tokens" in line for line in run.lines)
    good = cli(**{**tiny, "run_id": "same", "val_sha256": run.result["val_sha256"]})
    assert good.code == 0 and not any("validation tokens" in line for line in good.lines)


def test_an_unexpected_error_is_the_status_and_has_a_traceback(tiny, cli, monkeypatch, capsys):
    def broken(self, step, val):
        raise ZeroDivisionError("by accident")
    monkeypatch.setattr(train_gpt.Trainer, "evaluate", broken)
    with pytest.raises(ZeroDivisionError):  # main() lets it through: Python prints it and exits with 1
        cli(**{**tiny, "run_id": "broken"})
    assert capsys.readouterr().out.splitlines()[-1] == "status:error ZeroDivisionError: by accident"
