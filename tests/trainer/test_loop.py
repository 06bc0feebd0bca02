"""Schedules, a run's log and clock, warm-up, and how runs end."""

import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import helpers
import ranks
import train_gpt
from helpers import EOT, LAYERED
from train_gpt import Runtime

draw_plot = train_gpt.plot  # the `cli` fixture replaces it
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


# ----- schedules


def stages(**columns):
    """Rows of stages that begin at the keys of the first column: {start: value}."""
    rows = []
    for start in sorted({start for column in columns.values() for start in column}):
        row = {"start": start}
        for name, column in columns.items():
            row[name] = [value for begin, value in sorted(column.items()) if begin <= start][-1]
        rows.append(row)
    return tuple(rows)


def staged_config(rows, **changes):
    """The tiny Config with rows of stages, whose fields hold as they are."""
    config = helpers.tiny_config(**changes)
    first = dataclasses.asdict(config.stages[0])
    rows = tuple(train_gpt.Stage(**{**first, **row}) for row in rows)
    return dataclasses.replace(config, stages=rows)


def test_schedules_are_functions_of_the_step():
    rows = stages(
        micro_batches={0.0: 2, 0.25: 4, 0.5: 8},
        windows={0.0: (16, 32), 0.3: (32, 32), 0.6: (32, 64)},
        document_cap={0.0: 96, 0.5: 512},
    )
    numbers = {"steps": 10, "cooldown": (0.5, 1.0), "final_lr": 0.1, "untie_at": 0.4}
    config = staged_config(rows, **numbers)
    steps = range(10)
    counts = [train_gpt.stage_at(config, step).micro_batches for step in steps]
    assert counts == [2] * 3 + [4] * 2 + [8] * 5
    rates = [train_gpt.lr_multiplier(config, step) for step in (*steps, 10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1])
    until = [train_gpt.long_windows_until(config, step) for step in (0, 2, 3, 5, 6, 9)]
    assert until == [(32,), (32,), (32,), (32,), (32, 64), (32, 64)]
    phases = [train_gpt.training_phase(config, step) for step in steps]
    windows = [phase.windows for phase in phases]
    assert windows == [(16, 32)] * 3 + [(32, 32)] * 3 + [(32, 64)] * 4
    assert [phase.max_segment for phase in phases] == [96] * 5 + [256] * 5


def test_stages_scale_the_rates_ahead_of_the_cooldown():
    rows = stages(lr_mul={0.0: 1.0, 0.3: 1.5, 0.6: 2.0})
    config = staged_config(rows, steps=10, cooldown=(0.5, 1.0), final_lr=0.1)
    rates = [train_gpt.lr_multiplier(config, step) for step in range(11)]
    falling = [2 * left + 0.1 * (1 - left) for left in (0.8, 0.6, 0.4, 0.2)]
    assert rates == pytest.approx([1, 1, 1, 1.5, 1.5, 1.5, *falling, 0.1])
    config = helpers.tiny_config(steps=5, cooldown=(1.0, 1.0), final_lr=0.0)
    assert [train_gpt.lr_multiplier(config, step) for step in range(5)] == [1.0] * 5
    config = helpers.tiny_config(steps=10, cooldown=(0.4, 0.8), final_lr=0.2)
    rates = [train_gpt.lr_multiplier(config, step) for step in range(10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_loss_weights_move_towards_those_of_the_next_stage():
    """A weight that the next stage lacks falls to 0 on the way, and the last stage's stand."""
    rows = stages(mtp_weights={0.0: (1.0, 0.5, 0.25), 0.4: (1.0, 0.5), 0.8: (1.0,)})
    config = staged_config(rows, steps=10)
    found = [train_gpt.loss_weights_at(config, step) for step in (0, 2, 4, 7, 8, 9)]
    expected = [(1, 0.5, 0.25), (1, 0.5, 0.125), (1, 0.5), (1, 0.125), (1,), (1,)]
    for weights, wanted in zip(found, expected, strict=True):
        assert weights == pytest.approx(wanted)


def test_momentum_rises_and_falls():
    config = helpers.tiny_config(steps=1285)
    steps = (0, 75, 150, 300, 1235, 1260, 1285)
    momenta = [train_gpt.momentum_at(config, step) for step in steps]
    assert momenta == pytest.approx([0.85, 0.875, 0.9, 0.95, 0.95, 0.9, 0.85])


def test_windows_of_validation():
    """On the way it has the windows of training, at the end its own, which YaRN, that follows
    training, does not know."""
    rows = stages(windows={0.0: (16, 32), 0.5: (32, 64)})
    config = staged_config(rows, steps=8, val_windows=(64, 128), softmax_rows=256)
    phases = [train_gpt.evaluation_phase(config, step, 256) for step in (0, 4, 7, 8)]
    windows = [phase.windows for phase in phases]
    assert windows == [(16, 32), (32, 64), (32, 64), (64, 128)]
    assert {(phase.softmax_rows, phase.max_segment) for phase in phases} == {(0, 256)}
    assert [train_gpt.long_windows_until(config, step) for step in (7, 8)] == [(32, 64)] * 2


# ----- the log of a run


def only(kind, lines):
    """The one line of that kind."""
    (line,) = (line for line in lines if re.match(rf"{kind}\b", line))
    return line


def test_the_log_opens_with_the_source_and_comes_in_order(rich_run):
    log = (rich_run.folder / "log.txt").read_text()
    source, mark, _ = log.partition("\n===== END OF CODE =====\n")
    assert mark and source == rich_run.source.rstrip("\n")
    assert log.count("\n===== END OF CODE =====\n") == log.count("\n===== START =====\n") == 1
    kinds = [re.match(r"===== START =====|[a-z]+", line)[0] for line in rich_run.log]
    assert kinds[:6] == ["run", "config", "overrides", "data", "size", "===== START ====="]
    assert kinds[-6:] == ["comms", "gates", "bits", "validity", "final", "status"]
    assert {*kinds[6:-6]} == {"step"}
    # The console shows the same behind a few lines for the reader.
    assert rich_run.code == 0 and "status:" not in rich_run.stderr
    assert "\x1b" not in rich_run.stdout
    shown = [line for line in rich_run.log if not line.startswith("config:")]
    lines = [line for line in rich_run.lines if not line.startswith("warm-up: ")]
    assert lines == shown


def test_the_header_makes_a_run_reproducible(rich_run, rich, corpus):
    log = rich_run.log
    run = re.fullmatch(
        r"run:rich track:english commit:([0-9a-f]{40}|none) dirty:[01] "
        r"code_sha256:(?P<code>[0-9a-f]{64}) seed:1 world_size:1 device:.+ x\d+ "
        r"torch:(?P<torch>\S+) cuda:\S+ triton:\S+ started:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
        log[0],
    )
    assert run["code"] == hashlib.sha256(rich_run.source.encode()).hexdigest()
    assert run["torch"] == torch.__version__
    words = helpers.arguments({**rich, "run_id": "rich"})
    config = train_gpt.config_from(train_gpt.parse_command_line(words))
    logged = json.loads(only("config", log).removeprefix("config:"))
    assert logged == json.loads(json.dumps(dataclasses.asdict(config)))
    logged = json.loads(only("overrides", log).removeprefix("overrides:"))
    assert logged == json.loads(json.dumps(train_gpt.overrides_of(config)))
    assert {"steps", "data", "model_dim", "untie_at", "stages"} <= logged.keys()
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    assert (
        f"data:{manifest} shards:ok passes:1 backends:attention=sdpa,matmul=torch-float32" in log[3]
    )


def test_the_final_lines_agree_with_the_result(rich_run, rich):
    result = rich_run.result
    assert result["tokens"] == str(20 * 6 * 128)
    assert int(result["peak_memory"].removesuffix("MiB")) > 50
    seconds = int(result["train_time"].removesuffix("ms")) / 1000
    assert int(result["tokens_per_s"]) == pytest.approx(20 * 6 * 128 / seconds, rel=0.01)
    assert int(result["cpu_time"].removesuffix("ms")) > 0
    val = train_gpt.open_corpus(helpers.tiny_config(data=rich["data"])).val
    sha = hashlib.sha256(val[:1025].tobytes()).hexdigest()
    count = np.count_nonzero(val[1:1025] != EOT)  # of bytes, which each other token is one of
    bits, said = re.fullmatch(
        r"bits_per_byte:(\S+) val_bytes:(\d+)", only("bits_per_byte", rich_run.log)
    ).groups()
    assert float(bits) == pytest.approx(
        rich_run.val_losses[20] * 1024 / count / math.log(2), abs=2e-5
    )
    assert said == str(count)
    gates = "causal:ok normalised:ok local:ok unmoved:ok"
    validity = f"validity: {gates} val_tokens:1024 val_sha256:{sha}"
    assert only("validity", rich_run.log) == validity
    assert result["val_loss"] == f"{rich_run.val_losses[20]:.5f}"


def test_a_run_of_a_record_says_which_it_is(tiny, cli, monkeypatch):
    neutral = ("seed", "device", "log_every")
    values = {key: value for key, value in tiny.items() if key not in neutral}
    track = dataclasses.replace(helpers.tiny_config(**values), log_every=20)
    monkeypatch.setitem(train_gpt.TRACKS, "english", track)
    own = {"track": "english", "run_of": "1:3/8:2"}
    run = cli(**own, run_id="third", seed=5, device="cpu", log_every=2)
    assert run.code == 0 and "overrides:" not in run.stdout
    assert run.log[2] == "batch:1 counter:3/8 start:2"
    run = cli(**own, run_id="other", steps=3)
    assert run.code == 0 and 'overrides:{"steps": 3}' in run.lines and "batch:" not in run.stdout


def test_a_logged_training_loss_is_the_mean_since_the_last_one(tiny, cli):
    """Over the tokens: later steps have more of them."""
    rows = stages(micro_batches={0.0: 2, 0.5: 4}, document_cap={0.0: 128})
    values = {key: tiny[key] for key in tiny if key not in ("micro_batches", "document_cap")}
    values.update(steps=7, stages=rows)
    each, some = (
        cli(**{**values, "run_id": f"every{every}", "log_every": every}).train_losses
        for every in (1, 3)
    )
    weights = {4: 2, 5: 4, 6: 4}
    middle = sum(each[step] * weight for step, weight in weights.items()) / 10
    first = sum(each[step] for step in (1, 2, 3)) / 3
    assert some == pytest.approx({3: first, 6: middle, 7: each[7]}, abs=2e-5)


def test_a_seed_gives_the_same_run_twice_and_is_drawn_if_not_given(tiny, cli, tmp_path):
    values = {**tiny, "dtype": "bfloat16"}
    seeds = {"a": 5, "b": 5, "c": 6}
    a, b, c = (cli(**{**values, "run_id": name, "seed": seeds[name]}) for name in seeds)
    assert a.train_losses == b.train_losses != c.train_losses
    drawn = []
    for _ in range(2):
        run = cli(**{**tiny, "seed": -1, "steps": 1})
        named = re.match(r"run:(\S+) .* seed:(\d+) ", only("run", run.lines))
        run.folder = tmp_path / "logs" / named[1]
        assert run.code == 0 and f" log:logs/{named[1]}/log.txt" in run.lines[-1]
        drawn.append(named[2])
    assert drawn[0] != drawn[1] and len(list((tmp_path / "logs").iterdir())) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {**helpers.NO_TABLE, "layers": ({},)},
        {"val_every": 1, "log_every": 100, "matrix_decay": 0.0, "cooldown": (1.0, 1.0), **LAYERED},
        {"layers": ({"exclusive": True},), "matrix_update": "soap", "steps": 1, "seed": 2**63 - 1},
        {"dtype": "bfloat16", "untie_at": 1.0},
        {"mtp_weights": (1.0, 0.5, 0.25), "adam_every": 3, "softmax_rows": 256},
    ],
    ids=str,
)
def test_unusual_configurations_complete(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "unusual", **changes})
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout
    assert "causal:ok normalised:ok local:ok unmoved:ok" in only("validity", run.lines)


# ----- clock


def test_steps_and_their_data_are_timed_and_nothing_else(tiny, cli, monkeypatch):
    """On a clock that stands still but in the functions named here: seconds of each call, and of
    all that are timed."""
    now, timed, has_started = [0.0], [0.0], [False]
    clocks = {"perf_counter": lambda: now[0], "process_time": lambda: 2 * now[0]}
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(**{**vars(time), **clocks}))
    warm_up = train_gpt.warm_up

    def spend(place, name, seconds, counts):
        honest = getattr(place, name)

        def spending(*words):
            now[0] += seconds
            timed[0] += seconds * (counts and has_started[0])
            return honest(*words)

        monkeypatch.setattr(place, name, spending)

    def warm_up_and_begin(*words):
        warm_up(*words)
        has_started[0] = True

    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_begin)
    spend(train_gpt.Trainer, "step", 1.0, True)
    spend(train_gpt.TrainLoader, "open_shard", 1000.0, False)
    spend(train_gpt.TrainLoader, "next_batch", 10.0, True)
    spend(train_gpt.Trainer, "evaluate", 1000.0, False)
    spend(train_gpt.Run, "check_validity", 1000.0, False)
    for name in ("save_checkpoint", "warm_up", "validation_hash", "open_corpus"):
        spend(train_gpt, name, 1000.0, False)
    run = cli(**{**tiny, "run_id": "slow", "val_every": 1, "save_every": 1})
    assert run.code == 0 and now[0] > 12_000
    assert timed[0] == 54
    assert (run.result["train_time"], run.result["cpu_time"]) == ("54000ms", "108000ms")
    times = [event["train_time"] for event in run.events if "val_loss" in event]
    assert times == [21_000, 32_000, 43_000, 54_000]


# ----- warm-up

PHASES = {
    "steps": 8,
    "stages": stages(windows={0.0: (32, 64), 0.5: (64, 128)}, micro_batches={0.0: 2}),
    "untie_at": 0.25,
}


def phases_trainer(**changes):
    """A trainer whose phases are several, of the numbers that runs begin with."""
    changes = {**PHASES, **changes}
    config = staged_config(changes.pop("stages"), **changes)
    return train_gpt.Trainer(config, Runtime("cpu"))


def tensors_of(trainer):
    """{name: tensor} of all that steps change."""
    return {
        f"{group.name}.{name}": tensor
        for group in trainer.optimizer.groups
        for name, tensor in group.tensors().items()
    }


def whole_state(trainer):
    """Copies of it, with the random numbers."""
    return copy.deepcopy({**tensors_of(trainer), "rng": torch.get_rng_state()})


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16", "matrix_update": "soap"}, helpers.NO_TABLE],
    ids=str,
)
def test_warm_up_leaves_no_trace(changes, corpus):
    config = {"adam_every": 2, "val_every": 2, "data": str(corpus), **changes}
    warm, cold = phases_trainer(**config), phases_trainer(**config)
    shards = train_gpt.open_corpus(warm.config).shards
    before, seen, step, score = whole_state(warm), set(), warm.step, warm.score

    def evaluated(number):
        return train_gpt.evaluation_phase(warm.config, number, 256), number == 8

    def recorded_step(number, *rest):
        seen.add(train_gpt.training_phase(warm.config, number))
        torch.rand(3)  # which a step that is not of the warm-up draws anew
        return step(number, *rest)

    def recorded_score(number, *rest):
        seen.add(evaluated(number))
        return score(number, *rest)

    warm.step, warm.score = recorded_step, recorded_score
    train_gpt.warm_up(warm)
    warm.step = step
    stepped = {train_gpt.training_phase(warm.config, number) for number in range(8)}
    assert seen == stepped | {evaluated(number) for number in (2, 4, 6, 8)} and len(stepped) == 2
    helpers.assert_bitwise(whole_state(warm), before)
    # Nor does it show later: the next steps are bitwise those of a trainer that was not warmed up.
    loader = train_gpt.TrainLoader(warm.config, shards, warm.table)
    for number in range(4):
        batch = loader.next_batch()
        warm.step(number, batch)
        plan = dataclasses.replace(batch.rows, pulled=None)  # else it has values of the other table
        cold.step(number, batch._replace(rows=plan))
    loader.close()
    after = whole_state(warm)
    helpers.assert_bitwise(after, whole_state(cold))
    assert not torch.equal(after["matrices.mlp.param"], before["matrices.mlp.param"])


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
    assert seen == {(name, 1) for name in ("small", "embeddings", "ngram_table", "matrices")}


def test_a_digest_sees_any_bit():
    trainer = phases_trainer(dtype="bfloat16")
    digests = [train_gpt.state_digest(trainer)]
    tensors = {name: each for name, each in tensors_of(trainer).items() if each.numel()}
    for tensor in tensors.values():
        integers = torch.int32 if tensor.element_size() == 4 else torch.int16
        tensor.view(-1).view(integers)[-1] ^= 1
        digests.append(train_gpt.state_digest(trainer))
    weights = tensors["embeddings.embed.param"]
    weights[0, :2] = weights[0, :2].flip(0)  # the same bits, in other places
    digests.append(train_gpt.state_digest(trainer))
    assert len({*digests}) == len(tensors) + 2


def test_a_restore_that_misses_a_tensor_is_noticed(monkeypatch):
    """Any one, since the digest sees each."""
    trainer = phases_trainer(adam_every=4)
    momentum = tensors_of(trainer)["matrices.mlp.momentum"]
    forgotten, honest = momentum.data_ptr(), torch.Tensor.__setitem__
    train_gpt.warm_up(trainer)  # all is well

    def forgetful(self, index, source):
        if self.data_ptr() != forgotten:
            honest(self, index, source)

    monkeypatch.setattr(torch.Tensor, "__setitem__", forgetful)
    with pytest.raises(RuntimeError, match="after warm-up is not bitwise"):
        train_gpt.warm_up(trainer)


# ----- how runs end


def test_a_loss_that_is_not_finite_ends_the_run(tiny, cli):
    run = cli(**{**tiny, "run_id": "diverged", "steps": 20, "adam_lr": 1e30})
    assert run.code == 1 and run.log[-1] == run.lines[-1] and len(run.train_losses) < 20
    assert run.lines[-1].startswith("status:nan ") and "learning rate" in run.lines[-1]
    assert not list(run.folder.glob("*.pt"))


@pytest.mark.parametrize("at, last", [(2, 6), (7, 8)])
def test_a_gradient_whose_norm_overflows_ends_the_run(at, last, tiny, cli, monkeypatch):
    """One entry of one gradient is 1e30: finite, as all losses are. The matrix would stand still
    for 400 steps, until Muon's momentum has forgotten it. In the last step it is the validation
    that shows it."""
    honest = train_gpt.Optimizer.step

    def step(self, number, lr_mul):
        if number == at:
            self.matrices.tensors()["mlp.grad"][1, 2, 3] = 1e30
        honest(self, number, lr_mul)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt.Optimizer, "step", step)
    run = cli(**{**tiny, "run_id": "huge", "steps": 8, "log_every": 3})
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.lines[-1]
    assert max(run.train_losses) == last


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
        (MemoryError("full"), 1, "oom full; lower micro_batches_a_pass, .*", False),
        (torch.OutOfMemoryError("full"), 1, "oom full; .*", False),
        (no_memory(), 1, "oom .*can't allocate memory.*; .*", False),
        (OSError(28, "No space", "f"), 1, "error .*'f'; .* disk is not full", False),
        (ZeroDivisionError("x" * 9000), 1, "error ZeroDivisionError: x+ ... x+", True),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, BaseException) else "",
)
def test_errors_end_a_run_in_one_line(error, status, words, is_bug, capsys):
    code, said = train_gpt.ending_of(error)
    assert code == status and ("ZeroDivisionError" in capsys.readouterr().err) == is_bug
    assert re.fullmatch(words, said) and len(said) < 1100


# ----- signals: the first one sets a flag, which is looked at between steps


@pytest.fixture
def interrupt(tiny, tmp_path):
    """interrupt(method, step, signals, values): a run whose last rank gets these signals
    ahead of a method of Trainer at a step; nobody warms up."""

    def run(name, at, signals=(signal.SIGTERM,), world_size=1, **changes):
        def before():
            def signalled(self, number, *rest):
                if number == at and self.runtime.rank == world_size - 1:
                    for one in signals:
                        os.kill(os.getpid(), one)
                return honest(self, number, *rest)

            honest = getattr(train_gpt.Trainer, name)
            setattr(train_gpt.Trainer, name, signalled)
            train_gpt.warm_up = lambda *_: None
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # background jobs may ignore it

        values = {**tiny, "run_id": "stopped", **changes}
        return ranks.train(tmp_path, values, world_size=world_size, before=before)

    return run


@pytest.mark.parametrize("name, at, last", [("step", 0, 1), ("step", 2, 3), ("evaluate", 2, 2)])
def test_a_run_that_saves_nothing_ends_behind_its_step(name, at, last, interrupt):
    run = interrupt(name, at, SIGNALS, val_every=2)  # a launcher passes on what it gets
    assert run.code == 130 and run.lines[-1] == run.log[-1] == "status:interrupted"
    assert run.stderr.count("interrupted: ends after the step at hand; again: at once\n") == 1
    assert [*run.train_losses] == [*range(1, last + 1)] and not list(run.folder.glob("*.pt"))


@pytest.mark.parametrize(
    "at, changes, saved, world_size",
    [
        (0, {"save_every": 100}, "step_000001.pt", 1),
        # gradients that wait are not saved: it goes on to the end of Adam's cycle
        (1, {"adam_every": 4, "save_every": 100}, "step_000004.pt", 1),
        (7, {"save_every": 0}, "checkpoint.pt", 1),  # what was trained is saved in any case
        (2, {"steps": 30, "save_every": 100}, "", 2),  # ranks agree on the step
    ],
    ids=str,
)
def test_an_interrupted_run_is_saved_and_goes_on(
    at, changes, saved, world_size, interrupt, tiny, tmp_path
):
    values = {"steps": 8, **changes}
    run = interrupt("step", at, world_size=world_size, **values)
    assert run.code == 130 and run.log[-1] == "status:interrupted" and not run.val_losses
    (path,) = run.folder.glob("*.pt")
    assert saved in path.name
    values = {**tiny, **values, "run_id": "whole"}
    whole = ranks.train(tmp_path, values, world_size=world_size)
    assert ranks.train(tmp_path, {"resume": "stopped"}, world_size=world_size).code == 0
    helpers.assert_same_end(run, whole)


def test_warm_up_is_interrupted_between_phases(monkeypatch):
    def step(number, *rest):
        steps.append(number)
        train_gpt.INTERRUPTED.set()

    trainer, steps = phases_trainer(), []
    monkeypatch.setattr(trainer, "step", step)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_gpt.warm_up(trainer)
        assert steps == [0]
        # A collective that fails now does so because others have ended; other causes are told.
        assert train_gpt.ending_of(RuntimeError("closed by peer")) == (130, "interrupted")
        assert train_gpt.ending_of(OSError("disk full"))[0] == 1
    finally:
        train_gpt.INTERRUPTED.clear()


@pytest.mark.parametrize("handler, code", [(signal.SIG_IGN, 0), (signal.SIG_DFL, 130)])
def test_a_run_goes_on_when_the_console_is_gone(handler, code, tiny, tmp_path):
    """As behind `| head -1`, and in a terminal that is closed, which sends SIGHUP, too: under nohup
    that is ignored."""

    def before():
        def step(self, number, *rest):
            if number == 2:
                here, there = os.pipe()
                for stream in (1, 2):
                    os.dup2(there, stream)
                os.close(here)
                os.kill(os.getpid(), signal.SIGHUP)
            return honest(self, number, *rest)

        signal.signal(signal.SIGHUP, handler)
        train_gpt.warm_up = lambda *_: None
        honest, train_gpt.Trainer.step = train_gpt.Trainer.step, step

    run = ranks.train(tmp_path, {**tiny, "run_id": "alone", "save_every": 4}, before=before)
    assert run.code == code
    assert run.log[-1].startswith("status:interrupted" if code else "status:ok ")


# ----- the plot at the end


@pytest.mark.parametrize("can_draw", [True, False])
def test_the_status_names_the_plot_where_there_is_one(can_draw, tiny, cli, monkeypatch):
    """A plot that fails, as where a package is absent, ends nothing."""
    monkeypatch.setattr(train_gpt, "plot", draw_plot)
    picture = SimpleNamespace(plot_run=lambda folder: folder / "loss.png") if can_draw else None
    monkeypatch.setitem(sys.modules, "records.picture", picture)
    run = cli(**{**tiny, "steps": 1, "run_id": "drawn"})
    assert run.code == 0 and run.log[-1] == run.lines[-1]
    assert run.lines[-1].endswith(" plot:logs/drawn/loss.png" if can_draw else "log.txt")
