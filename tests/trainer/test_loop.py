"""Chapters 2, 11, 14, 17 and 18: schedules, a step, the log and the console of a run, warm-up, how
runs end."""

import copy
import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import (
    EOT,
    INDEX,
    LAYERED,
    MATMUL_RATE,
    NO_TABLE,
    ONE_LAYER,
    arguments,
    assert_bitwise,
    byte_documents,
    make_corpus,
    make_trainer,
    read,
    started,
    tiny_config,
    with_manifest,
    write_shard,
)
from train_gpt import Runtime

draw_plot = train_gpt.plot  # the `cli` fixture replaces it


def of_log(run):
    """The lines of a run's log behind the source."""
    return (run.folder / "log.txt").read_text().split("\n===== END OF CODE =====\n")[1].splitlines()


# ----- schedules


def stages(**columns):
    """Rows of stages that begin at the keys of the first column: {start: value}."""
    starts = sorted({start for column in columns.values() for start in column})
    rows = []
    for start in starts:
        row = {"start": start}
        for name, column in columns.items():
            row[name] = [value for begin, value in sorted(column.items()) if begin <= start][-1]
        rows.append(row)
    return tuple(rows)


def staged_config(rows, **changes):
    """The tiny Config with rows of stages, whose fields hold as they are."""
    config = tiny_config(**changes)
    first = dataclasses.asdict(config.stages[0])
    rows = tuple(train_gpt.Stage(**{**first, **row}) for row in rows)
    return dataclasses.replace(config, stages=rows)


def sizes_of(phases):
    """The sizes of the layers' windows in each phase."""
    return [tuple(window.size for window in phase.windows) for phase in phases]


def test_windows_of_layers():
    """Layers whose heads see each other's keys have two positions a token, in the same window."""
    config = tiny_config(**LAYERED)
    assert [tuple(window) for window in train_gpt.layer_windows(config, (16, 48))] == [
        (16, 1),
        (16, 2),
        (16, 1),
        (48, 2),
    ]


def test_schedules_are_functions_of_the_step():
    rows = stages(
        micro_batches={0.0: 2, 0.25: 4, 0.5: 8},
        windows={0.0: (16, 32), 0.3: (32, 32), 0.6: (32, 64)},
        mtp_weights={0.0: (1.0, 0.5), 0.5: (1.0,)},
        document_cap={0.0: 96, 0.5: 512},
    )
    config = staged_config(
        rows, steps=10, cooldown=0.5, final_lr=0.1, untie_at=0.4, momentum_start=0.8
    )
    steps = range(10)
    counts = [train_gpt.stage_at(config, step).micro_batches for step in steps]
    assert counts == [2] * 3 + [4] * 2 + [8] * 5
    rates = [train_gpt.lr_multiplier(config, step) for step in (*steps, 10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1])
    until = [train_gpt.long_windows_until(config, step) for step in (0, 2, 3, 5, 6, 9)]
    assert until == [(32,), (32,), (32,), (32,), (32, 64), (32, 64)]
    phases = [train_gpt.training_phase(config, step) for step in steps]
    assert sizes_of(phases) == [(16, 32)] * 3 + [(32, 32)] * 3 + [(32, 64)] * 4
    assert [phase.mtp_weights for phase in phases] == [(1.0, 0.5)] * 5 + [(1.0,)] * 5
    assert [phase.max_segment for phase in phases] == [96] * 5 + [256] * 5
    assert [phase.is_tied for phase in phases] == [True] * 4 + [False] * 6


def test_stages_scale_the_rates_ahead_of_the_cooldown():
    rows = stages(lr_mul={0.0: 1.0, 0.3: 1.5, 0.6: 2.0})
    config = staged_config(rows, steps=10, cooldown=0.5, final_lr=0.1)
    factors = [1, 1, 1, 1.5, 1.5, 1.5, 2, 2, 2, 2]
    left = [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    expected = [
        factor * part + 0.1 * (1 - part) for factor, part in zip(factors, left, strict=True)
    ]
    rates = [train_gpt.lr_multiplier(config, step) for step in range(11)]
    assert rates == pytest.approx([*expected, 0.1])


def test_the_learning_rate_without_cooldown_is_constant():
    config = tiny_config(steps=5, cooldown=0.0, final_lr=0.0)
    assert [train_gpt.lr_multiplier(config, step) for step in range(5)] == [1.0] * 5


def test_momentum_rises_and_falls():
    shares = {"momentum_warmup": 0.2, "momentum_cooldown": 0.1}
    config = tiny_config(steps=20, momentum_start=0.8, momentum_peak=0.9, **shares)
    steps = (0, 1, 2, 4, 10, 18, 19, 20)
    momenta = [train_gpt.momentum_at(config, step) for step in steps]
    assert momenta == pytest.approx([0.8, 0.825, 0.85, 0.9, 0.9, 0.9, 0.85, 0.8])


def test_windows_of_validation():
    """On the way it has the windows of training, at the end its own, which YaRN, that follows
    training, does not know."""
    rows = stages(windows={0.0: (16, 32), 0.5: (32, 64)})
    config = staged_config(rows, steps=8, val_windows=(64, 128), softmax_rows=50)
    phases = [train_gpt.evaluation_phase(config, step, 256) for step in (0, 4, 7, 8)]
    assert sizes_of(phases) == [(16, 32), (32, 64), (32, 64), (64, 128)]
    assert {(phase.softmax_rows, phase.mtp_weights) for phase in phases} == {(0, (1.0,))}
    assert {phase.max_segment for phase in phases} == {256}
    until = [train_gpt.long_windows_until(config, step) for step in (7, 8)]
    assert until == [(32, 64), (32, 64)]


def test_validation_in_longer_pieces_cuts_fewer_documents(corpus):
    """Each piece is scored as the longer text that it is, by as many tokens as before, and the
    gates hold on it."""
    val = train_gpt.open_validation(tiny_config(), sorted(corpus.glob("*_val_*")), None)
    short, long = (make_trainer(val_batch_tokens=length) for length in (256, 1024))
    text = train_gpt.Text(val, long.config)
    pieces = [short.score(0, text, low)[0] for low in range(0, 1024, 256)]
    in_short, in_long = torch.cat(pieces), long.score(0, text, 0)[0]
    document = text.starts[np.searchsorted(text.starts, np.arange(1024), side="right") - 1]
    is_cut = np.arange(1024) // 256 * 256 > document  # it began in an earlier short piece
    differs = (in_short - in_long).abs().numpy() > 1e-5
    assert is_cut.any() and differs[is_cut].any() and not differs[~is_cut].any()
    loss = long.evaluate(0, val)
    assert loss == pytest.approx(in_long.double().mean().item(), abs=1e-6)
    assert all(train_gpt.check_gates(long, 0, val, loss).values())


# ----- the log of a run


@pytest.fixture(scope="module")
def log(rich_run):
    return (rich_run.folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def events(rich_run):
    return of_log(rich_run)


def event_of(kind, lines):
    """The one line of that kind."""
    (line,) = (line for line in lines if re.match(rf"{kind}\b", line))
    return line


def test_the_log_opens_with_the_source(log, rich_run):
    source, mark, _ = log.partition("\n===== END OF CODE =====\n")
    assert mark and source == rich_run.source.rstrip("\n")
    assert log.count("\n===== END OF CODE =====\n") == log.count("\n===== START =====\n") == 1


def test_the_run_line(log, events, rich_run):
    run = re.fullmatch(
        r"run:rich track:nano commit:(?P<commit>[0-9a-f]{40}|none) dirty:[01] "
        r"code_sha256:(?P<sha>[0-9a-f]{64}) seed:1 world_size:1 device:(?P<device>.+) "
        r"torch:(?P<torch>\S+) cuda:\S+ triton:\S+ "
        r"started:(?P<started>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)",
        events[0],
    )
    assert run
    source = log.partition("===== END OF CODE =====\n")[0]
    sha = hashlib.sha256(source.encode()).hexdigest()
    assert run["sha"] == sha == rich_run.result["code_sha256"]
    assert run["torch"] == torch.__version__ == rich_run.result["torch"]
    for key in ("device", "commit", "started"):
        assert run[key] == rich_run.result[key]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(run["started"])
    assert datetime.timedelta() <= age < datetime.timedelta(hours=3)  # it is UTC


def test_the_config_line_holds_every_field(events, rich_run, rich):
    logged = json.loads(event_of("config", events).removeprefix("config:"))
    assert list(logged) == [field.name for field in dataclasses.fields(train_gpt.Config)]
    assert logged == rich_run.result["config"]
    words = arguments({**rich, "run_id": "rich"})
    config, _ = train_gpt.config_from(train_gpt.parse_command_line(words))
    assert logged == json.loads(json.dumps(dataclasses.asdict(config)))


def test_the_overrides_line_holds_what_makes_it_no_record(events, rich_run):
    logged = json.loads(event_of("overrides", events).removeprefix("overrides:"))
    nano = json.loads(json.dumps(dataclasses.asdict(train_gpt.TRACKS["nano"])))
    assert logged == rich_run.result["overrides"]
    assert {"steps", "data", "model_dim", "val_tokens", "untie_at", "stages"} <= set(logged)
    neutral = {"seed", "device", "log_every", "save_every", "run_id", "val_sha256", "dtype"}
    assert not neutral & set(logged)
    for key, value in logged.items():
        assert value != nano[key]


def test_the_data_line(events, corpus):
    sha = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    back_ends = "backends:attention=sdpa,matmul=torch-float32,compile=off"
    assert f"data:{sha} shards:ok {back_ends}" in events


def test_lines_come_in_order(events):
    kinds = [re.match(r"===== START =====|[a-z]+", line)[0] for line in events]
    assert kinds[:6] == ["run", "config", "overrides", "data", "size", "===== START ====="]
    assert kinds[-4:] == ["comms", "validity", "final", "status"]
    assert set(kinds[6:-4]) == {"step"}


def test_the_size_line_counts_the_values_of_each_group(events, rich_run):
    model, table = rich_run.checkpoint()["model"], 1000 * 32
    groups = {
        "matrices": ("query_key", "value_output", "mlp"),
        "embeddings": ("embed", "head", "value_embed"),
    }
    sizes = {key: sum(model[name].numel() for name in names) for key, names in groups.items()}
    small = sum(value.numel() for value in model.values()) - sum(sizes.values())
    assert event_of("size", events) == (
        f"size: small={small:,} embeddings={sizes['embeddings']:,} "
        f"ngram_table={table:,} matrices={sizes['matrices']:,}"
    )


def test_step_lines_agree_with_the_metrics(events, rich_run):
    times_of = r"train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    train = re.compile(rf"step:(\d+)/20 train_loss:(\d+\.\d{{5}}) lr_mul:(\d\.\d{{3}}) {times_of}")
    val = re.compile(rf"step:(\d+)/20 val_loss:(\d+\.\d{{5}}) {times_of}")
    lines = [line for line in events if line.startswith("step:")]
    assert len(lines) == len(rich_run.metrics) == 22
    times = []
    for line, event in zip(lines, rich_run.metrics, strict=True):
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
    final = re.fullmatch(
        r"final val_loss:(\S+) train_time:(\d+)ms tokens:(\d+) peak_memory:(\d+)MiB "
        r"tokens_per_s:(\d+) mfu:(\d+\.\d)% cpu_time:(\d+)ms",
        event_of("final", events),
    )
    assert final[1] == f"{result['val_loss']:.5f}"
    assert result["val_loss"] == rich_run.metrics[-1]["val_loss"]
    assert int(final[2]) == pytest.approx(result["train_time_ms"], abs=1)
    assert int(final[3]) == result["tokens"] == 20 * 6 * 128
    assert int(final[4]) == max(result["peak_memory_mib_by_rank"]) > 50
    assert len(result["peak_memory_mib_by_rank"]) == 1
    rate = 1000 * result["tokens"] / result["train_time_ms"]
    assert int(final[5]) == pytest.approx(rate, abs=1)
    assert float(final[6]) == pytest.approx(result["mfu_percent"], abs=0.051)
    assert 0 < result["mfu_percent"] < 100
    assert int(final[7]) == pytest.approx(result["cpu_time_ms"], abs=1)
    gates = {name: True for name in ("causal", "normalised", "local", "unmoved")}
    verdicts = " ".join(f"{name}:ok" for name in gates)
    validity = re.fullmatch(
        rf"validity: {verdicts} val_tokens:1024 val_sha256:([0-9a-f]{{64}})",
        event_of("validity", events),
    )
    val = train_gpt.open_corpus(tiny_config(data=rich["data"])).val
    sha = hashlib.sha256(val[:1025].tobytes()).hexdigest()
    assert validity[1] == result["val_sha256"] == sha and result["validity"] == gates
    named = (result["run"], result["track"], result["seed"], result["steps"])
    assert named == ("rich", "nano", 1, 20)


def test_the_console_shows_the_log_behind_a_few_lines_for_the_reader(events, rich_run):
    assert rich_run.code == 0 and rich_run.stderr == "" and "\x1b" not in rich_run.stdout
    words = [line.split(" ")[0] for line in rich_run.lines]
    assert words[:6] == ["device:", "back", "corpus:", "parameters:", "memory", "disk"]
    assert rich_run.lines[6:] == [line for line in events if not line.startswith("config:")]
    assert events[-1].startswith("status:ok ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_throughput_and_mfu_follow_from_the_clock(world_size, tiny, tmp_path):
    """Four steps of two micro-batches of 256 tokens in two seconds, by ranks that do 1e9 operations
    a second."""

    def before():
        train_gpt.Clock.seconds = lambda self: 2.0
        train_gpt.matmul_rate = lambda device, dtype, size: 1e9 if dtype == torch.float32 else 0.0

    values = {**tiny, "run_id": "clocked"}
    run = ranks.train(tmp_path, values, world_size=world_size, before=before)
    assert run.code == 0, run.stderr
    matrices, head = 2 * (4 * 32 * 32 + 2 * 64 * 32), 257 * 32  # what a token is multiplied with
    mfu = 100 * 6 * (matrices + head) * 1024 / (1e9 * world_size)
    assert run.result["tokens_per_s"] == 1024
    assert run.result["mfu_percent"] == pytest.approx(mfu)
    memory = max(run.result["peak_memory_mib_by_rank"])
    expected = f" train_time:2000ms tokens:2048 peak_memory:{memory}MiB tokens_per_s:1024 "
    assert f"{expected}mfu:{mfu:.1f}% cpu_time:" in run.lines[-2]


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
    """A rate that some machine could have: the fakes of other tests stand for it."""
    rate = MATMUL_RATE(torch.device("cpu"), torch.float32, 256)
    assert 1e7 < rate < 1e15


def test_a_run_of_a_record_says_which_it_is(tiny, cli, monkeypatch):
    neutral = ("seed", "device", "log_every")
    values = {key: value for key, value in tiny.items() if key not in neutral}
    track = dataclasses.replace(tiny_config(**values), log_every=20)
    monkeypatch.setitem(train_gpt.TRACKS, "nano", track)
    own = {"track": "nano", "run_of": "1:3/8:2"}
    run = cli(**own, run_id="third", seed=5, device="cpu", log_every=2)
    assert run.code == 0 and run.result["overrides"] == {}
    assert of_log(run)[2] == "batch:1 counter:3/8 start:2"
    run = cli(**own, run_id="other", steps=3)
    assert run.code == 0 and 'overrides:{"steps": 3}' in run.lines and "batch:" not in run.stdout


def test_the_validation_loss_is_the_mean_over_the_first_tokens(rich_run, rich):
    content = rich_run.checkpoint()
    config, step = train_gpt.config_of_checkpoint(content), content["step"]
    trainer = train_gpt.Trainer(config, Runtime("cpu"))
    train_gpt.restore(trainer, content)
    text, total = train_gpt.Text(train_gpt.open_corpus(config).val, config), 0.0
    for low in range(0, 1024, 256):
        total += trainer.score(step, text, low)[0].double().sum().item()
    assert rich_run.result["val_loss"] == pytest.approx(total / 1024, abs=1e-9)


def forward(trainer, step, micro_batch, ngram):
    """(summed loss, losses, hidden states) of a training micro-batch."""
    phase = train_gpt.training_phase(trainer.config, step)
    return trainer.model(micro_batch, ngram, *trainer.inputs(step, micro_batch, phase))


def test_the_logged_training_loss_is_that_of_the_global_batch(tiny, cli):
    """The first loss of a run, worked out without the training loop."""
    run = cli(**{**tiny, "run_id": "first", "steps": 2, "micro_batches": 4})
    trainer = make_trainer(random_weights=False, steps=2, micro_batches=4, data=tiny["data"])
    shards, table = train_gpt.open_corpus(trainer.config).shards, trainer.table
    loader = train_gpt.TrainLoader(trainer.config, shards, trainer.runtime, table.index)
    losses = []
    for micro_batch in loader.next_batch().micro_batches:
        ngram = table.lookup(micro_batch, table.weight)
        losses.append(forward(trainer, 0, micro_batch, ngram)[1])
    loader.close()
    expected = torch.cat(losses).double().mean().item()
    assert run.train_losses[1] == pytest.approx(expected, abs=1e-5)


def test_a_logged_training_loss_is_the_mean_since_the_last_one(tiny, cli):
    rows = stages(micro_batches={0.0: 2, 0.5: 4}, document_cap={0.0: 128})
    values = {key: tiny[key] for key in tiny if key not in ("micro_batches", "document_cap")}
    values.update(steps=7, stages=rows)
    each, some = (
        cli(**{**values, "run_id": f"every{every}", "log_every": every}) for every in (1, 3)
    )
    losses, counts = each.train_losses, {step: 2 if step <= 4 else 4 for step in range(1, 8)}

    def mean(steps):
        tokens = sum(counts[step] for step in steps)
        return sum(losses[step] * counts[step] for step in steps) / tokens

    expected = {3: mean((1, 2, 3)), 6: mean((4, 5, 6)), 7: losses[7]}
    assert some.train_losses == pytest.approx(expected, abs=1e-9)


def test_a_step_takes_the_gradient_of_the_mean_loss():
    """Gradients are sums over tokens until the groups divide them by the step's number of tokens,
    once; those of the table stay sums."""
    trainer = make_trainer(mtp_weights=(1.0, 0.5))
    tokens = byte_documents(1100)
    pairs = [read(trainer, tokens, low) for low in (0, 256, 512)]
    optimizer, table, seen = trainer.optimizer, trainer.table, []
    rows = {id(micro_batch): ngram for micro_batch, ngram in pairs}
    table.lookup = lambda micro_batch, values: rows[id(micro_batch)]
    table.values_of = table.start_pull = seen.append
    micro_batches, ngrams = zip(*pairs, strict=True)
    optimizer.step = lambda step, lr_mul: seen.append(lr_mul)
    batch = train_gpt.Batch(list(micro_batches), "plan", 768, {})
    upcoming = train_gpt.Batch([], "next plan", 768, {})
    summed = trainer.step(2, batch, upcoming)
    assert seen == ["plan", train_gpt.lr_multiplier(trainer.config, 2), "next plan"]
    outputs = [forward(trainer, 2, *pair) for pair in pairs]
    params = dict(trainer.model.named_parameters())
    loss = sum(loss for loss, *_ in outputs)
    *grads, first, second, third = torch.autograd.grad(loss, [*params.values(), *ngrams])
    assert optimizer.layouts.keys() == params.keys()
    for name, grad in zip(params, grads, strict=True):
        total = optimizer.layouts[name].grad
        torch.testing.assert_close(total, grad, atol=1e-3, rtol=1e-4)
    assert {group.tokens for group in optimizer.parameter_groups} == {768}
    torch.testing.assert_close(table.grads, [first, second, third])
    torch.testing.assert_close(summed, sum(losses.sum() for _, losses, _ in outputs))


# ----- unusual but good runs


@pytest.mark.parametrize(
    "changes",
    [
        {**NO_TABLE, **ONE_LAYER, "long_layers": (), "value_embedding_layers": ()},
        {"val_every": 1, "log_every": 100, "matrix_decay": 0.0, "cooldown": 0.0, **LAYERED},
        {"exclusive_layers": (0,), "matrix_update": "soap"},
        {"steps": 1, "seed": 2**63 - 1},
        pytest.param({"dtype": "bfloat16", "untie_at": 1.0}, marks=pytest.mark.slow),
        {"mtp_weights": (1.0, 0.5, 0.25), "adam_every": 3, "softmax_rows": 200},
    ],
    ids=str,
)
def test_unusual_configurations_complete(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "unusual", **changes})
    assert run.code == 0, run.stdout
    assert run.lines[-1].startswith("status:ok ")
    validity = event_of("validity", run.lines)
    assert "causal:ok normalised:ok local:ok unmoved:ok" in validity


def test_a_corpus_of_very_short_documents_is_trained_on(cli, tiny, tmp_path):
    """There is always room for the bounds of as many documents as come."""
    folder = make_corpus(tmp_path / "corpus")
    write_shard(folder / "tiny_train_000000.bin", np.tile([EOT, 65, 66], 20_000))
    run = cli(**{**tiny, "data": str(with_manifest(folder)), "run_id": "short"})
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout


def test_what_a_run_is_not_told_is_drawn_and_logged(tiny, cli, tmp_path):
    seeds = []
    for _ in range(2):
        run = cli(**{**tiny, "seed": -1, "steps": 1})
        (line,) = [line for line in run.lines if line.startswith("run:")]
        run.folder = tmp_path / "logs" / re.match(r"run:(\S+) ", line)[1]
        assert run.code == 0 and f" log:logs/{run.folder.name}/log.txt" in run.lines[-1]
        seeds.append(int(re.search(r" seed:(\d+) ", line)[1]))
        assert run.result["seed"] == run.result["config"]["seed"] == seeds[-1]
    assert seeds[0] != seeds[1] and len(list((tmp_path / "logs").iterdir())) == 2


def test_a_seed_gives_the_same_run_twice(tiny, cli):
    values = {**tiny, "dtype": "bfloat16"}
    losses = [
        cli(**{**values, "run_id": run_id, "seed": seed}).train_losses
        for run_id, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    assert losses[0] == losses[1] and losses[0] != losses[2]


def test_validation_before_the_head_is_untied_scores_the_tied_model(tiny, cli):
    """Untying at step 2 or at step 3 makes no difference to the model after two steps."""
    losses = []
    for run_id, untie_at in (("two", 0.5), ("three", 0.75)):
        run = cli(**{**tiny, "run_id": run_id, "untie_at": untie_at, "val_every": 2})
        losses.append(run.val_losses[2])
    assert losses[0] == losses[1]


def test_steps_and_their_data_are_timed_and_nothing_else(tiny, cli, monkeypatch):
    """On a clock that stands still but in the functions named here: seconds of each call, and of
    all that are timed."""
    now, timed, has_started = [0.0], [0.0], [False]
    clocks = {"perf_counter": lambda: now[0], "process_time": lambda: 2 * now[0]}
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(**clocks, monotonic=time.monotonic))
    monkeypatch.setattr(train_gpt, "matmul_rate", lambda device, dtype, size: 1e9)
    monkeypatch.setattr(train_gpt, "row_fingerprint", lambda config: "")  # it reads an index
    warm_up = train_gpt.warm_up

    def spend(place, name, seconds, counts):
        honest = getattr(place, name)

        def spending(*words):
            now[0] += seconds
            timed[0] += seconds * (counts and has_started[0])
            return honest(*words)

        monkeypatch.setattr(place, name, spending)

    def warm_up_and_begin(trainer):
        warm_up(trainer)
        has_started[0] = True

    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_begin)
    spend(train_gpt.Trainer, "step", 1.0, True)
    spend(train_gpt.TrainLoader, "open_shard", 0.25, True)
    spend(train_gpt.TrainLoader, "next_batch", 10.0, True)
    spend(train_gpt.TextIndex, "read", 0.5, True)
    spend(train_gpt.Trainer, "evaluate", 1000.0, False)
    for name in ("save_checkpoint", "warm_up", "validation_hash", "open_corpus", "check_gates"):
        spend(train_gpt, name, 1000.0, False)
    run = cli(**{**tiny, **INDEX, "run_id": "slow", "val_every": 1, "save_every": 1})
    assert run.code == 0 and now[0] > 12_000
    assert timed[0] == 44.75
    assert run.result["train_time_ms"] == run.result["cpu_time_ms"] / 2 == 44_750
    times = [event["train_time"] for event in run.metrics if "val_loss" in event]
    assert times == [21_750, 32_750, 43_750, 44_750]


def test_other_validation_tokens_than_the_tracks_are_announced(tiny, cli):
    run = cli(**{**tiny, "run_id": "other", "val_sha256": "0" * 64, "steps": 1})
    assert any("validation tokens than track" in line for line in run.lines)
    own = {"val_sha256": run.result["val_sha256"]}
    good = cli(**{**tiny, "run_id": "same", "steps": 1, **own})
    assert good.code == 0 and not any("validation tokens than" in line for line in good.lines)


# ----- warm-up


PHASES = {
    "steps": 8,
    "stages": stages(
        windows={0.0: (32, 64), 0.5: (64, 128)},
        mtp_weights={0.0: (1.0, 0.5), 0.5: (1.0,)},
        micro_batches={0.0: 2},
    ),
    "untie_at": 0.25,
}


def phases_trainer(**changes):
    """A trainer whose phases are several, of the numbers that runs begin with."""
    changes = {**PHASES, **changes}
    config = staged_config(changes.pop("stages"), **changes)
    return train_gpt.Trainer(config, Runtime("cpu"))


def whole_state(trainer):
    """Copies of everything that a step could have changed."""
    groups = trainer.optimizer.groups
    return copy.deepcopy(
        {
            "params": dict(trainer.model.state_dict()),
            "rng": torch.get_rng_state(),
            "groups": {group.name: group.tensors() for group in groups},
            "table": trainer.table.full_state(),
            "waiting": trainer.table.grads,
            "empty": [layout.is_empty for layout in trainer.optimizer.layouts.values()],
            "tokens": [group.tokens for group in trainer.optimizer.parameter_groups],
        }
    )


@pytest.mark.parametrize(
    "changes",
    [{"index_orders": (4,)}, {"dtype": "bfloat16", "matrix_update": "soap"}, NO_TABLE],
    ids=str,
)
def test_warm_up_leaves_no_trace(changes, corpus):
    config = {"adam_every": 2, "data": str(corpus), **changes}
    warm, cold = phases_trainer(**config), phases_trainer(**config)
    shards, indexed, _ = train_gpt.open_corpus(warm.config)
    for trainer in (warm, cold):
        trainer.table.index.read(indexed)
    before, step, stepped = whole_state(warm), warm.step, []

    def recorded_step(number, *rest):
        stepped.append(train_gpt.training_phase(warm.config, number))
        return step(number, *rest)

    warm.step = recorded_step
    train_gpt.warm_up(warm)
    warm.step = step
    all_phases = {train_gpt.training_phase(warm.config, number) for number in range(8)}
    assert set(stepped) == all_phases and len(all_phases) == 3
    assert_bitwise(whole_state(warm), before)
    # Nor does it show later: the next steps are bitwise those of a trainer that was not warmed up.
    loader = train_gpt.TrainLoader(warm.config, shards, warm.runtime, warm.table.index)
    for number in range(4):
        batch = loader.next_batch()
        warm.step(number, batch)
        cold.step(number, batch)
    loader.close()
    assert_bitwise(whole_state(warm), whole_state(cold))
    assert not torch.equal(whole_state(warm)["params"]["mlp"], before["params"]["mlp"])


def test_warm_up_takes_every_group_through_its_step():
    """Else what compiles an update would compile it on the clock."""
    trainer, seen = phases_trainer(steps=9, adam_every=4), set()

    def watch(group):
        update = group.update

        def watched(step, lr_mul, pending):
            seen.add((group.name, step % group.every + 1))
            return update(step, lr_mul, pending)

        group.update = watched

    for group in trainer.optimizer.groups:
        watch(group)
    train_gpt.warm_up(trainer)
    # Of Adam's steps the last is on one step's gradients, all others are on four.
    adam = {(name, count) for name in ("small", "embeddings") for count in (1, 4)}
    assert seen == adam | {("ngram_table", 1), ("matrices", 1)}


FORGOTTEN = {
    "weight": lambda trainer: trainer.model.embed,
    "scalar": lambda trainer: trainer.model.residual_scale,
    "momentum": lambda trainer: trainer.optimizer.matrices.state["mlp"]["momentum"],
    "waiting gradient": lambda trainer: trainer.optimizer.embeddings.layouts["head"].grad,
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_restore_that_misses_a_tensor_is_noticed(name, monkeypatch):
    trainer = phases_trainer(adam_every=4)
    forgotten, honest = FORGOTTEN[name](trainer).data_ptr(), torch.Tensor.copy_
    train_gpt.warm_up(trainer)  # all is well

    def forgetful(self, source, *rest):
        if self.data_ptr() == forgotten and self.numel() > 0:
            return self
        return honest(self, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", forgetful)
    with pytest.raises(RuntimeError, match="after warm-up is not bitwise"):
        train_gpt.warm_up(trainer)


def test_warm_up_puts_the_random_numbers_back(monkeypatch):
    """A step that draws some draws the same ones as without a warm-up."""
    trainer, honest = phases_trainer(), train_gpt.Trainer.step

    def drawing_step(self, *rest):
        torch.rand(3)
        return honest(self, *rest)

    monkeypatch.setattr(train_gpt.Trainer, "step", drawing_step)
    before = torch.get_rng_state()
    train_gpt.warm_up(trainer)
    assert_bitwise(torch.get_rng_state(), before)


def test_a_table_row_that_is_not_restored_is_noticed(monkeypatch):
    trainer, honest = phases_trainer(), train_gpt.adagrad_rows_update

    def careless(table, second, rows, *rest):
        honest(table, second, rows, *rest)
        untouched = ~torch.isin(torch.arange(len(table)), rows)
        table[untouched.nonzero()[0]] += 1

    monkeypatch.setattr(train_gpt, "adagrad_rows_update", careless)
    with pytest.raises(RuntimeError, match="after warm-up is not bitwise"):
        train_gpt.warm_up(trainer)


# ----- how runs end


@pytest.mark.parametrize("changes", [{"adam_lr": 1e30}, {"matrix_lr": 1e30}], ids=str)
def test_a_loss_that_is_not_finite_ends_the_run(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "diverged", "steps": 20, **changes})
    assert run.code == 1
    assert run.lines[-1].startswith("status:nan ") and "learning rate" in run.lines[-1]
    assert of_log(run)[-1] == run.lines[-1] and len(run.train_losses) < 20
    assert not (run.folder / "result.json").exists()
    assert not (run.folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("at, last", [(2, 6), (7, 8)])
def test_a_gradient_whose_norm_overflows_ends_the_run(at, last, tiny, cli, monkeypatch):
    """One entry of one gradient is 1e30: finite, as all losses are. The matrix would stand still
    for 400 steps, until Muon's momentum has forgotten it. In the last step no loss shows it, and
    nothing is saved."""
    honest = train_gpt.Optimizer.step

    def step(self, number, lr_mul):
        if number == at:
            self.layouts["mlp"].grad[1, 2, 3] = 1e30
        honest(self, number, lr_mul)

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt.Optimizer, "step", step)
    run = cli(**{**tiny, "run_id": "huge", "steps": 8, "log_every": 3})
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.lines[-1]
    assert max(run.train_losses) == last
    assert not list(run.folder.glob("*.pt"))


def test_an_unexpected_error_is_the_status_and_has_a_traceback(tiny, cli, monkeypatch, capsys):
    def broken(self, step, val):
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(train_gpt.Trainer, "evaluate", broken)
    with pytest.raises(ZeroDivisionError):  # Python prints it and exits with 1
        cli(**{**tiny, "run_id": "broken"})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "status:error ZeroDivisionError: by accident"


def no_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    return raised.value


@pytest.mark.parametrize(
    "error, status, words, is_bug",
    [
        (KeyboardInterrupt(), 130, "interrupted", False),
        (train_gpt.ConfigError("a\nb"), 2, r"error a\\nb", False),
        (FloatingPointError("x is nan"), 1, "nan x is nan; .*lower learning rate", False),
        (MemoryError("full"), 1, "oom full; lower --micro-batch-tokens .*", False),
        (torch.OutOfMemoryError("full"), 1, "oom full; .*", False),
        (no_memory(), 1, "oom .*can't allocate memory.*; .*", False),
        (BlockingIOError("held"), 2, "error another process writes this run: .*", False),
        (OSError(28, "No space", "f"), 1, "error .*'f'; .* disk is not full", False),
        (RuntimeError("peer"), 1, "error RuntimeError: peer", True),
        (ZeroDivisionError("x" * 9000), 1, "error ZeroDivisionError: x+ ... x+", True),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, BaseException) else "",
)
def test_errors_end_a_run_in_one_line(error, status, words, is_bug):
    ending = train_gpt.ending_of(error)
    assert ending[0] == status and ending[2] is is_bug
    assert re.fullmatch(words, ending[1]) and len(ending[1]) < 1100


# ----- interruption: the first signal sets a flag, which is looked at between steps


@pytest.fixture
def flag():
    """INTERRUPTED, clear before and after."""
    train_gpt.INTERRUPTED.clear()
    yield train_gpt.INTERRUPTED
    train_gpt.INTERRUPTED.clear()


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def handlers():
    """The handlers are put back; background jobs inherit that SIGHUP is ignored."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_nothing_and_sets_the_flag(number, flag, handlers, capfd):
    train_gpt.listen_for_signals()
    for _ in range(3):  # a launcher passes on what its ranks have got, too
        os.kill(os.getpid(), number)
    assert flag.is_set() and capfd.readouterr().err.count("interrupted: ends after") == 1
    train_gpt.listen_for_signals()
    assert not flag.is_set()
    os.kill(os.getpid(), number)
    assert flag.is_set()


def test_a_signal_that_is_ignored_stays_so(flag, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    train_gpt.listen_for_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag.is_set() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_where_no_collective_is_left_an_error_of_a_rank_is_the_signals(flag):
    """Others have ended first; an error that has a cause of its own keeps it."""
    flag.set()
    assert train_gpt.ending_of(RuntimeError("closed by peer")) == (130, "interrupted", False)
    assert train_gpt.ending_of(OSError("disk full"))[0] == 1


def signal_at(monkeypatch, name, at, number=signal.SIGTERM):
    """Send this process a signal in a function of Trainer, at a step, behind the warm-up."""
    honest, warm_up = getattr(train_gpt.Trainer, name), train_gpt.warm_up

    def signalled(self, step, *rest):
        if step == at:
            os.kill(os.getpid(), number)
        return honest(self, step, *rest)

    def warm_up_and_begin(trainer):
        warm_up(trainer)
        monkeypatch.setattr(train_gpt.Trainer, name, signalled)

    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_begin)


@pytest.mark.parametrize("name, at, last", [("step", 0, 1), ("step", 2, 3), ("evaluate", 2, 2)])
def test_a_run_that_saves_nothing_ends_behind_its_step(name, at, last, tiny, cli, monkeypatch):
    signal_at(monkeypatch, name, at)
    run = cli(**{**tiny, "run_id": "stopped", "val_every": 2})
    assert run.code == 130 and run.lines[-1] == of_log(run)[-1] == "status:interrupted"
    assert [*run.train_losses] == [*range(1, last + 1)] and not list(run.folder.glob("*.pt"))


def test_an_interruption_of_the_last_step_comes_before_validation(tiny, cli, monkeypatch):
    """What was trained is saved, whatever the run was told about saving."""
    with monkeypatch.context() as patch:
        signal_at(patch, "step", 3)
        run = cli(**{**tiny, "run_id": "late"})
    assert run.code == 130 and not run.val_losses
    assert [path.name for path in run.folder.glob("*.pt")] == ["checkpoint.pt"]
    assert cli(resume="late").code == 0 and list(run.val_losses) == [4]


def test_warm_up_is_interrupted_between_phases(flag, monkeypatch):
    trainer, steps = phases_trainer(), []

    def step(number, batch):
        steps.append(number)
        flag.set()

    monkeypatch.setattr(trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train_gpt.warm_up(trainer)
    assert steps == [0]


EIGHT = {"steps": 8, "save_every": 100}


@pytest.fixture(scope="module")
def whole_run(tiny, tmp_path_factory):
    """Eight steps that nobody interrupts."""
    run = ranks.train(tmp_path_factory.mktemp("whole"), {**tiny, **EIGHT, "run_id": "whole"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("at, number", [(0, signal.SIGINT), (4, signal.SIGTERM)])
def test_a_run_that_saves_is_saved_first(at, number, whole_run, tiny, cli, monkeypatch):
    with monkeypatch.context() as patch:
        signal_at(patch, "step", at, number)
        run = cli(**{**tiny, **EIGHT, "run_id": "whole"})
    assert run.code == 130 and run.lines[-1] == "status:interrupted" == of_log(run)[-1]
    assert [path.name for path in run.folder.glob("*.pt")] == [f"step_00000{at + 1}.pt"]
    assert cli(resume="whole").code == 0
    assert run.result["val_loss"] == whole_run.result["val_loss"]
    assert run.train_losses == whole_run.train_losses
    for part in ("model", "groups", "loader", "rng"):
        assert_bitwise(run.checkpoint()[part], whole_run.checkpoint()[part], part)


@pytest.mark.parametrize("at, saved", [(1, "step_000004.pt"), (4, "checkpoint.pt")])
def test_an_interruption_waits_for_gradients_that_are_summed(at, saved, tiny, cli, monkeypatch):
    """They are not saved: the run goes on to the end of the cycle."""
    values = {**tiny, "steps": 8, "save_every": 100, "adam_every": 4, "run_id": "summed"}
    signal_at(monkeypatch, "step", at)
    run = cli(**values)
    assert run.code == 130 and [path.name for path in run.folder.glob("*.pt")] == [saved]


def test_a_save_at_an_interruption_that_fails_is_told(tiny, cli, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    signal_at(monkeypatch, "step", 4)
    monkeypatch.setattr(train_gpt, "save_checkpoint", full)
    run = cli(**{**tiny, **EIGHT, "run_id": "full"})
    assert run.code == 1 and run.lines[-1].startswith("status:error [Errno 28]")
    assert "step_000005" in run.lines[-1]


@pytest.mark.parametrize("pause, code", [(0.0, 130), (1.2, -signal.SIGTERM)])
def test_a_second_signal_ends_a_run_at_once_if_it_comes_later(pause, code, tiny, tmp_path):
    """In a process of its own, which hangs in a step until then."""

    def before():
        def step(self, number, *rest):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)
            return honest(self, number, *rest)

        honest, train_gpt.Trainer.step = train_gpt.Trainer.step, step
        train_gpt.warm_up = lambda trainer: None

    run = ranks.train(tmp_path, {**tiny, "run_id": "twice"}, before=before)
    assert run.code == code and run.stderr == (
        "interrupted: ends after the step at hand; again: at once\n"
    )
    assert (of_log(run)[-1] == "status:interrupted") == (code == 130)


def test_a_run_of_two_ranks_is_interrupted(tiny, tmp_path):
    """A launcher's signal reaches all; nothing is saved, and each rank says how it ended."""

    def before():
        def step(self, number, *rest):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return honest(self, number, *rest)

        honest, train_gpt.Trainer.step = train_gpt.Trainer.step, step
        train_gpt.warm_up = lambda trainer: None

    values = {**tiny, "save_every": 100, "run_id": "both"}
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code == 130 and run.lines[-1] == of_log(run)[-1] == "status:interrupted"
    assert "rank 1: status:interrupted" in run.stderr and not list(run.folder.glob("*.pt"))


@pytest.mark.slow
def test_an_interrupted_process_that_saves_goes_on(tiny, tmp_path, cli):
    """The trainer as it is started from a shell."""
    values = {**tiny, "steps": 400, "epochs": 9, "save_every": 1000, "run_id": "shell"}
    log = tmp_path / "logs" / "shell" / "log.txt"
    with started(tmp_path, values) as process:
        deadline = time.monotonic() + 60
        while not (log.exists() and "\nstep:3/" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
    assert process.returncode == 130 and said.splitlines()[-1] == "status:interrupted"
    assert complaints.count("\n") == 1 and complaints.startswith("interrupted: ends after")
    (saved,) = log.parent.glob("step_*.pt")
    assert train_gpt.load_checkpoint(saved)["step"] == int(saved.stem[5:]) >= 3


@pytest.mark.parametrize("when", ["a step", "a signal"])
def test_a_run_goes_on_when_the_console_is_gone(when, tiny, tmp_path):
    """As behind `| head -1`, or in a terminal that is closed, which sends SIGHUP, too."""

    def before():
        def step(self, number, *rest):
            if number == 2:
                here, there = os.pipe()
                for stream in (1, 2):
                    os.dup2(there, stream)
                os.close(here)
                if when == "a signal":
                    os.kill(os.getpid(), signal.SIGHUP)
            return honest(self, number, *rest)

        honest, train_gpt.Trainer.step = train_gpt.Trainer.step, step
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        train_gpt.warm_up = lambda trainer: None

    run = ranks.train(tmp_path, {**tiny, **EIGHT, "run_id": "alone"}, before=before)
    last = of_log(run)[-1]
    if when == "a step":
        assert run.code == 0 and last.startswith("status:ok ") and max(run.train_losses) == 8
    else:
        assert run.code == 130 and last == "status:interrupted"
        assert [path.name for path in run.folder.glob("*.pt")] == ["step_000003.pt"]


# ----- the plot at the end


@pytest.fixture
def plot_run(monkeypatch):
    """plot_run(function): it stands for records.picture.plot_run."""

    def replace(function):
        monkeypatch.setattr(train_gpt, "plot", draw_plot)
        module = function and SimpleNamespace(plot_run=function)
        monkeypatch.setitem(sys.modules, "records.picture", module)

    return replace


def test_the_status_names_the_plot(tiny, cli, plot_run):
    plot_run(lambda folder: folder / "loss.png")
    run = cli(**{**tiny, "steps": 1, "run_id": "drawn"})
    expected = " log:logs/drawn/log.txt plot:logs/drawn/loss.png"
    assert run.code == 0 and run.lines[-1].endswith(expected) and of_log(run)[-1] == run.lines[-1]


def broken_plot(folder):
    raise ZeroDivisionError("no axis")


@pytest.mark.parametrize(
    "function, complaint",
    [(broken_plot, "ZeroDivisionError: no axis"), (None, "ModuleNotFoundError: ")],
    ids=["an error", "no package"],
)
def test_a_plot_that_fails_does_not_end_the_run(function, complaint, tiny, cli, plot_run):
    plot_run(function)
    run = cli(**{**tiny, "steps": 1, "run_id": "undrawn"})
    assert run.code == 0 and run.lines[-1].endswith(" log:logs/undrawn/log.txt")
    assert run.stderr.startswith(f"no plot: {complaint}") and of_log(run)[-1] == run.lines[-1]


def test_a_run_is_drawn(rich_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(rich_run.folder, "logs/rich"))
    assert draw_plot(folder) == " plot:logs/rich/loss.png"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
