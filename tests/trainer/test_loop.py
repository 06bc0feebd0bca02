"""Schedules, a run's log and clock, warm-up, and how runs end."""

import copy
import dataclasses
import functools
import hashlib
import json
import lzma
import math
import operator
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import helpers
import ranks
import train_gpt
from helpers import EARLY, EOT, LAYERED, tiny_config
from train_gpt import Stage

# ----- schedules

SCHEDULE = (
    Stage(0.0, 2, 96, (16, 32), 1.0, (1.0, 0.5, 0.25)),
    Stage(0.3, 4, 96, (32, 32), 1.5, (1.0, 0.5)),
    Stage(0.6, 8, 896, (32, 64), 2.0, softmax_rows=256),
)


def test_schedules_are_functions_of_the_step():
    """Validation has its own windows at the end alone. Loss weights move in lines."""
    numbers = {"steps": 10, "cooldown": (0.5, 1.0), "final_lr": 0.1, "val_windows": (64, 128)}
    config = tiny_config(stages=SCHEDULE, **numbers)
    steps = range(10)
    counts = [train_gpt.stage_at(config, step).micro_batches for step in steps]
    assert counts == [2] * 3 + [4] * 3 + [8] * 4
    rates = [train_gpt.lr_multiplier(config, step) for step in (*steps, 10)]
    falling = [2 * left + 0.1 * (1 - left) for left in (0.8, 0.6, 0.4, 0.2)]
    assert rates == pytest.approx([1, 1, 1, 1.5, 1.5, 1.5, *falling, 0.1])
    windows = [(16, 32)] * 3 + [(32, 32)] * 3 + [(32, 64)] * 4
    phases = [train_gpt.training_phase(config, step) for step in steps]
    assert [phase.windows for phase in phases] == windows
    assert [phase.max_segment for phase in phases] == [96] * 6 + [256] * 4
    until = [train_gpt.long_windows_until(config, step) for step in (*steps, 10)]
    assert until == [(32,)] * 6 + [(32, 64)] * 5
    phases = [train_gpt.evaluation_phase(config, step, 256) for step in (*steps, 10)]
    assert [phase.windows for phase in phases] == [*windows, (64, 128)]
    assert {(phase.softmax_rows, phase.max_segment) for phase in phases} == {(0, 256)}
    for step, weights in {
        0: (1, 0.5, 0.25),
        1: (1, 0.5, 0.5 / 3),
        3: (1, 0.5),
        5: (1, 0.5 / 3),
        6: (1,),
        9: (1,),
    }.items():
        assert train_gpt.loss_weights_at(config, step) == pytest.approx(weights)


def test_a_cooldown_may_end_early_or_not_be_there():
    for cooldown, rates in ((1.0, 1.0), [1] * 5), ((0.4, 0.8), [0.8, 0.6, 0.4, 0.2, 0.2]):
        config = tiny_config(steps=10, cooldown=cooldown, final_lr=0.2)
        found = [train_gpt.lr_multiplier(config, step) for step in range(10)]
        assert found == pytest.approx([1] * 5 + rates)


def test_momentum_rises_and_falls():
    config = tiny_config(steps=1285, momentum=0.95)
    steps = (0, 75, 150, 300, 1235, 1260, 1285)
    momenta = [train_gpt.momentum_at(config, step) for step in steps]
    assert momenta == pytest.approx([0.85, 0.875, 0.9, 0.95, 0.95, 0.9, 0.85])


# ----- the log and the clock of a run


def only(kind, lines):
    """The one line of that kind."""
    (line,) = (line for line in lines if re.match(rf"{kind}\b", line))
    return line


def test_the_log_of_a_run_makes_it_reproducible(rich_run, rich, corpus):
    log = rich_run.log
    text = (rich_run.folder / "log.txt").read_text()
    assert text.startswith(rich_run.source.rstrip("\n") + "\n===== END OF CODE =====\nrun:rich ")
    words = helpers.arguments({**rich, "run_id": "rich"})
    config = train_gpt.config_from(train_gpt.parse_command_line(words))
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert json.loads(only("config", log).removeprefix("config:")) == values
    overrides = json.loads(only("overrides", log).removeprefix("overrides:"))
    assert overrides.items() <= values.items()
    assert {"steps", "data", "model_dim", "untie_at", "stages"} <= overrides.keys()
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    backends = "attention=sdpa,matmul=torch-float32"
    assert log[3].startswith(f"data:{manifest} shards:ok passes:1 backends:{backends}")
    val = train_gpt.open_corpus(tiny_config(data=rich["data"])).val
    sha = hashlib.sha256(val[:1025].tobytes()).hexdigest()
    count = np.count_nonzero(val[1:1025] != EOT)  # of bytes, which each other token is one of
    (bits,) = re.fullmatch(
        rf"bits_per_byte:(\S+) val_bytes:{count}", only("bits_per_byte", log)
    ).groups()
    expected = rich_run.val_losses[20] * 1024 / count / math.log(2)
    assert float(bits) == pytest.approx(expected, abs=2e-5)
    gates = "causal:ok normalised:ok local:ok unmoved:ok"
    assert only("validity", log) == f"validity: {gates} val_tokens:1024 val_sha256:{sha}"
    assert rich_run.result["val_loss"] == f"{rich_run.val_losses[20]:.5f}"
    # The console shows the same.
    shown = [line for line in log if not line.startswith("config:")]
    assert [line for line in rich_run.lines if not line.startswith("warm-up:")] == shown


def test_a_run_on_own_text_says_how_it_can_be_judged(rich_run, rich, corpus):
    """lzma packs the bytes that are scored; steps and seconds grow with what is read."""
    tokens = np.fromfile(corpus / "tiny_val_000000.bin", "<u2")[512:][1:1025]
    text = tokens[tokens != EOT].astype(np.uint8).tobytes()
    bits = 8 * len(lzma.compress(text)) / len(text)
    assert only("lzma", rich_run.log) == f"lzma bits_per_byte:{bits:.5f}"
    shards = [np.fromfile(path, "<u2")[512:] for path in corpus.glob("*_train_*.bin")]
    config = train_gpt.with_values(train_gpt.TRACKS["english"], rich)
    length = config.micro_batch_tokens
    held = sum((len(tokens) - 1) // length * length for tokens in shards)
    share = held / int(rich_run.result["tokens"])
    seconds = float(rich_run.result["train_time"].removesuffix("ms")) / 1000
    words = re.fullmatch(
        r"your text has (\S+) tokens; --steps (\d+) reads it once, about (\d+) s here",
        only("your text", rich_run.log),
    )
    assert words[1] == f"{held:,}" and int(words[2]) == round(share * 20)
    assert int(words[3]) == pytest.approx(share * seconds, abs=0.51)


def test_a_terminal_shows_the_time_that_is_left(tiny, cli, monkeypatch):
    """By the tokens, of which later steps have more. The log has none of it, and no pipe."""
    stages = ({**EARLY, "micro_batches": 2}, {**EARLY, "start": 0.5, "micro_batches": 4})
    values = {**tiny, "steps": 4, "stages": stages, "log_every": 1}
    monkeypatch.setattr(train_gpt.Clock, "seconds", lambda self: 3600.0)
    assert "left:" not in cli(**values, run_id="pipe").stdout
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 1)
    run = cli(**values, run_id="terminal")
    assert re.findall(r"^step:.* left:(.*)$", run.stdout, re.M) == ["5:00:00", "2:00:00", "0:30:00"]
    assert "left:" not in "\n".join(run.log)


def test_a_logged_training_loss_is_the_mean_since_the_last_one(rich, cli):
    """Over the tokens: later steps have more of them."""
    stages = ({**EARLY, "micro_batches": 2}, {**EARLY, "start": 0.5, "micro_batches": 4})
    values = {**rich, "steps": 7, "stages": stages, "val_every": 0, "save_every": 0}
    each, some = (
        cli(**{**values, "run_id": f"every{every}", "log_every": every}).train_losses
        for every in (1, 3)
    )
    middle = (2 * each[4] + 4 * each[5] + 4 * each[6]) / 10
    first = (each[1] + each[2] + each[3]) / 3
    assert some == pytest.approx({3: first, 6: middle, 7: each[7]}, abs=2e-5)


def test_a_seed_gives_the_same_run_twice_and_is_drawn_if_not_given(tiny, cli, tmp_path):
    values = {**tiny, "dtype": "bfloat16"}
    a, b = (cli(**{**values, "run_id": name, "seed": 5}) for name in "ab")
    assert a.train_losses == b.train_losses
    losses, seeds = [a.train_losses], {5}
    for _ in range(2):
        run = cli(**{**values, "seed": -1})
        named = re.match(r"run:(\S+) .* seed:(\d+) ", only("run", run.lines))
        run.folder = tmp_path / "logs" / named[1]
        assert run.code == 0 and f" log:logs/{named[1]}/log.txt" in run.lines[-1]
        assert run.train_losses not in losses
        losses.append(run.train_losses)
        seeds.add(int(named[2]))
    assert len(seeds) == 3 and len(list((tmp_path / "logs").iterdir())) == 4


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


def test_steps_and_their_data_are_timed_and_nothing_else(tiny, cli, monkeypatch):
    """On a clock that stands still but in the functions named here: seconds of each call."""
    now = [0.0]
    clocks = {"perf_counter": lambda: now[0], "process_time": lambda: 2 * now[0]}
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(**{**vars(time), **clocks}))
    monkeypatch.setattr(train_gpt, "warm_up", lambda *words: None)
    timed = {"Trainer.step": 1.0, "TrainLoader.next_batch": 10.0}
    others = ["TrainLoader.__init__", "Trainer.evaluate", "Run.check_validity", "warm_up"]
    others += ["save_checkpoint", "validation_hash", "open_corpus"]
    for name, seconds in {**timed, **dict.fromkeys(others, 1000.0)}.items():
        honest = operator.attrgetter(name)(train_gpt)

        def spending(*words, honest=honest, seconds=seconds):
            now[0] += seconds
            return honest(*words)

        monkeypatch.setattr(f"train_gpt.{name}", spending)
    run = cli(**{**tiny, "run_id": "slow", "val_every": 1, "save_every": 1})
    assert run.code == 0 and now[0] > 12_000
    assert (run.result["train_time"], run.result["cpu_time"]) == ("54000ms", "108000ms")
    times = [event["train_time"] for event in run.events if "val_loss" in event]
    assert times == [21_000, 32_000, 43_000, 54_000]


# ----- warm-up


def phases_trainer(**changes):
    """A trainer with two stages, of the numbers that runs begin with."""
    stages = ({**EARLY, "micro_batches": 2}, {**EARLY, "start": 0.5, "windows": (64, 128)})
    values = {"steps": 8, "stages": stages, "untie_at": 0.25, "val_windows": (96, 192)}
    return helpers.make_trainer(random_weights=False, **{**values, **changes})


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
    """It takes each kind of step and of validation, and each group through its update, else these
    were compiled on the clock."""
    config = {"adam_every": 2, "val_every": 2, "data": str(corpus), **changes}
    warm, cold = phases_trainer(**config), phases_trainer(**config)
    before, seen = whole_state(warm), set()

    def watch(place, name, kind_of):
        honest = getattr(place, name)

        def watched(step, *rest):
            seen.add(kind_of(step))
            torch.rand(3)  # which what is not of the warm-up draws anew
            return honest(step, *rest)

        setattr(place, name, watched)

    def evaluated(step):
        return train_gpt.evaluation_phase(warm.config, step, 256)

    def trained(step):
        return train_gpt.training_phase(warm.config, step)

    watch(warm, "step", trained)
    watch(warm, "score", evaluated)
    groups = [group for group in warm.optimizer.groups if not group.is_frozen]
    for group in groups:
        watch(group, "update", lambda step, name=group.name: name)
    train_gpt.warm_up(warm)
    stepped = {trained(step) for step in range(8)}
    validated = {evaluated(step) for step in (2, 4, 6, 8)}
    assert seen == stepped | validated | {group.name for group in groups} and len(stepped) == 2
    helpers.assert_bitwise(whole_state(warm), before)
    # Nor does it show later: the next steps are bitwise those of a trainer that was not warmed up.
    shards = train_gpt.open_corpus(warm.config).shards
    loader = train_gpt.TrainLoader(warm.config, shards, warm.runtime)
    for number in range(4):
        batch = loader.next_batch()
        warm.step(number, batch)
        plan = dataclasses.replace(batch.rows, pulled=None)  # else it has values of the other table
        cold.step(number, batch._replace(rows=plan))
    loader.close()
    after = whole_state(warm)
    helpers.assert_bitwise(after, {**whole_state(cold), "rng": after["rng"]})
    name = "matrices.blocks.0.mlp.param"
    assert not torch.equal(after[name], before[name])


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

    def forgetful(self, index, source):
        if self.data_ptr() != forgotten:
            honest(self, index, source)

    monkeypatch.setattr(torch.Tensor, "__setitem__", forgetful)
    with pytest.raises(RuntimeError, match="after warm-up is not bitwise"):
        train_gpt.warm_up(trainer)


def test_warm_up_tells_attention_of_the_longest_segment(monkeypatch):
    """Where caps are below a micro-batch: FlashAttention writes no rows behind what it is told."""
    stages = tuple(
        {**EARLY, "start": low, "document_cap": cap} for low, cap in ((0, 48), (0.5, 96))
    )
    trainer = phases_trainer(stages=stages)
    honest, lengths = trainer.forward_pass, []

    def watched(step, phase, weights, micro_batch, ngram):
        longest = micro_batch.segment_bounds.diff().max().item()
        lengths.append((longest, phase.max_segment))
        return honest(step, phase, weights, micro_batch, ngram)

    monkeypatch.setattr(trainer, "forward_pass", watched)
    train_gpt.warm_up(trainer)
    assert all(longest <= told for longest, told in lengths)
    assert (48, 48) in lengths and (48, 96) in lengths


# ----- the mean of the last weights


def test_a_run_takes_the_mean_or_tells_its_loss(tiny, cli):
    """Both runs take the same steps; what one reports is what the other would have reported."""
    values = {**tiny, "mean_share": 0.75, "steps": 6}
    taken = cli(**{**values, "run_id": "taken", "takes_mean": True})
    told = cli(**{**values, "run_id": "told", "takes_mean": False})
    assert taken.train_losses == told.train_losses
    losses = [re.findall(r" mean_val_loss:(\S+)", "\n".join(run.log)) for run in (taken, told)]
    assert losses == [[], [taken.result["val_loss"]]]
    assert told.result["val_loss"] != taken.result["val_loss"]
    raw, mean = (run.checkpoint()["groups"]["matrices"]["mlp"] for run in (told, taken))
    helpers.assert_bitwise(raw["mean"], mean["mean"])


# ----- how runs end

COMPILER = torch._dynamo.exc.BackendCompilerFailed(str, OSError("a kernel"), None)


@pytest.mark.parametrize("at, last", [(2, 6), (7, 8)])
def test_a_gradient_whose_norm_overflows_ends_the_run(at, last, tiny, cli, monkeypatch):
    """One entry of one gradient is 1e30, which is finite. The matrix would stand still until Muon's
    momentum has forgotten it. In the last step the validation shows it."""
    honest = train_gpt.Optimizer.step

    def step(self, number, lr_mul):
        if number == at:
            self.matrices.params["mlp"].grad[1, 2, 3] = 1e30
        honest(self, number, lr_mul)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    monkeypatch.setattr(train_gpt.Optimizer, "step", step)
    run = cli(**{**tiny, "run_id": "huge", "steps": 8, "log_every": 3})
    assert run.code == 1 and run.log[-1] == run.lines[-1] and max(run.train_losses) == last
    assert run.lines[-1].startswith("status:nan ") and "learning rate" in run.lines[-1]


@pytest.mark.parametrize(
    "error, status, words",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (train_gpt.ConfigError("a\nb"), 2, r"error a\\nb"),
        (FloatingPointError("x is nan"), 1, "nan x is nan; .*lower learning rate"),
        (MemoryError("full"), 1, "oom full; lower micro_batches_a_pass to 1, then ngram_rows"),
        (torch.OutOfMemoryError("full"), 1, "oom full; .*"),
        (OSError(28, "No space", "f"), 1, "error .*'f'; .* disk is not full"),
        (COMPILER, 2, "error .*a kernel.*--compile false, or delete its cache, /.*"),
        (ZeroDivisionError("x" * 9000), 1, "error ZeroDivisionError: x+ ... x+"),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, BaseException) else "",
)
def test_errors_end_a_run_in_one_line(error, status, words, capsys):
    code, said = train_gpt.ending_of(error)
    is_bug = isinstance(error, ZeroDivisionError)
    assert code == status and ("ZeroDivisionError" in capsys.readouterr().err) == is_bug
    assert re.fullmatch(words, said) and len(said) < 1100


# ----- signals: the first one sets a flag, which is looked at between steps


def signal_all():
    """As a launcher, which passes on what it gets."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("name, at, last", [("step", 0, 1), ("step", 2, 3), ("evaluate", 2, 2)])
def test_a_run_that_saves_nothing_ends_behind_its_step(name, at, last, tiny, tmp_path):
    values = {**tiny, "run_id": "stopped", "val_every": 2}
    run = ranks.train(tmp_path, values, before=ranks.acting(signal_all, at, name=name))
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
        (2, {"steps": 14, "save_every": 100}, "", 2),  # ranks agree on the step
    ],
    ids=str,
)
def test_an_interrupted_run_is_saved_and_goes_on(at, changes, saved, world_size, tiny, tmp_path):
    def train(before=None, **values):
        return ranks.train(tmp_path, values, world_size=world_size, before=before)

    values = {**tiny, "steps": 8, **changes}
    before = ranks.acting(lambda: os.kill(os.getpid(), signal.SIGTERM), at, world_size - 1)
    run = train(before, **values, run_id="stopped")
    assert run.code == 130 and run.log[-1] == "status:interrupted" and not run.val_losses
    (path,) = run.folder.glob("*.pt")
    assert saved in path.name
    whole = train(**values, run_id="whole")
    assert train(resume="stopped").code == 0
    helpers.assert_same_end(run, whole)


def test_warm_up_is_interrupted_between_phases(monkeypatch):
    def step(number, *rest):
        steps.append(number)
        train_gpt.INTERRUPTED.set()

    trainer, steps = phases_trainer(), []
    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(train_gpt, "INTERRUPTED", threading.Event())
    run = SimpleNamespace(log=train_gpt.Log(is_main=False))
    with pytest.raises(KeyboardInterrupt):
        train_gpt.warm_up(trainer, 0, functools.partial(train_gpt.Run.tell, run))
    assert steps == [0]
    # A collective that fails now does so because others have ended; other causes are told.
    for error in (RuntimeError("closed by peer"), COMPILER):
        assert train_gpt.ending_of(error) == (130, "interrupted")
    assert train_gpt.ending_of(OSError("disk full"))[0] == 1


@pytest.mark.parametrize("handler, code", [(signal.SIG_IGN, 0), (signal.SIG_DFL, 130)])
def test_a_run_goes_on_when_the_console_is_gone(handler, code, tiny, tmp_path):
    """As behind `| head -1`, and in a terminal that is closed; nohup ignores its SIGHUP."""

    def hang_up():
        here, there = os.pipe()
        for stream in (1, 2):
            os.dup2(there, stream)
        os.close(here)
        os.kill(os.getpid(), signal.SIGHUP)

    def before():
        signal.signal(signal.SIGHUP, handler)
        ranks.acting(hang_up, 2)()

    run = ranks.train(tmp_path, {**tiny, "run_id": "alone", "save_every": 4}, before=before)
    assert run.code == code
    assert run.log[-1].startswith("status:interrupted" if code else "status:ok ")
