"""Chapters 6, 7 and 9: schedules, validity gates, warm-up, the log, and how runs end."""
import copy
import dataclasses
import functools
import hashlib
import json
import math
import re
import signal
import time

import numpy as np
import pytest
import torch

import train_gpt
from helpers import arguments, assert_bitwise, byte_documents, make_trainer, ranks, read, started, tiny_config

# ----- schedules


def test_schedules_are_functions_of_the_step():
    config = tiny_config(steps=10, micro_batches=((0.0, 2), (0.25, 4), (0.5, 8)), cooldown=0.5, final_lr=0.1,
                         windows=((0.0, (16, 32)), (0.3, (32, 32)), (0.6, (32, 64))), momentum=(0.8, 0.9),
                         mtp_weights=((0.0, (1.0, 0.5)), (0.5, (1.0,))), untie_at=0.4)
    assert [train_gpt.micro_batches_at(config, step) for step in range(10)] == [2, 2, 2, 4, 4, 8, 8, 8, 8, 8]
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
                       r"torch:(?P<torch>\S+) cuda:\S+ triton:\S+", events[0])
    assert run
    source = log.partition("===== END OF CODE =====\n")[0]
    assert run["sha"] == hashlib.sha256(source.encode()).hexdigest() == rich_run.result["code_sha256"]
    assert run["torch"] == torch.__version__ == rich_run.result["torch"]
    assert run["device"] == rich_run.result["device"] and run["commit"] == rich_run.result["commit"]


def test_the_config_line_holds_every_field(events, rich_run, rich):
    logged = json.loads(event_of("config", events).removeprefix("config:"))
    assert list(logged) == [field.name for field in dataclasses.fields(train_gpt.Config)]
    assert logged == rich_run.result["config"]
    assert train_gpt.config_of_checkpoint({"config": logged}) == train_gpt.config_from(
        train_gpt.parse_arguments(arguments({**rich, "run_id": "rich"})))[0]


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
    assert f"data:{sha} backends:attention=sdpa,matmul=torch-float32,compile=off" in events


def test_lines_come_in_order(events):
    kinds = [re.match(r"===== START =====|[a-z]+", line)[0] for line in events]
    assert kinds[:3] == ["run", "config", "overrides"]
    assert kinds.index("data") < kinds.index("===== START =====") < kinds.index("step")
    assert kinds[-5:] == ["comms", "validity", "optimizer", "final", "status"]
    assert set(kinds[kinds.index("===== START =====") + 1:-5]) == {"step"}


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
    final = re.fullmatch(r"final val_loss:(\S+) train_time:(\d+)ms tokens:(\d+) peak_memory:(\d+)MiB",
                         event_of("final", events))
    assert final[1] == f"{result['val_loss']:.5f}" and result["val_loss"] == rich_run.metrics[-1]["val_loss"]
    assert int(final[2]) == pytest.approx(result["train_time_ms"], abs=1)
    assert int(final[3]) == result["tokens"] == 20 * 12 * 256
    assert int(final[4]) == max(result["peak_memory_mib_by_rank"]) > 50
    assert len(result["peak_memory_mib_by_rank"]) == 1
    validity = re.match(r"validity: causal:ok normalised:ok val_tokens:1024 val_sha256:([0-9a-f]{64})",
                        event_of("validity", events))
    _, val = train_gpt.open_corpus(tiny_config(data=rich["data"]))
    assert validity[1] == result["val_sha256"] == hashlib.sha256(val[:1025].tobytes()).hexdigest()
    assert all(result["validity"].values()) and {"causal", "normalised"} <= set(result["validity"])
    assert (result["run"], result["track"], result["seed"], result["steps"]) == ("rich", "nano", 1, 20)


def test_the_status_is_the_last_line(events, rich_run):
    assert rich_run.code == 0 and rich_run.stderr == ""
    assert events[-1].startswith("status:ok ") and rich_run.lines[-1] == events[-1]
    assert rich_run.lines == events  # the console shows what the log holds, less the source


def test_the_plot_is_drawn(rich_run):
    assert (rich_run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_validation_loss_is_the_mean_over_the_first_tokens(rich_run, rich):
    path = rich_run.folder / "checkpoint.pt"
    trainer, step = train_gpt.open_trained({"checkpoint": str(path), "device": "cpu"})
    _, val = train_gpt.open_corpus(trainer.config)
    total = 0.0
    for low in range(0, 1024, 256):
        total += trainer.token_losses(step, *read(trainer, val, low)).double().sum().item()
    assert rich_run.result["val_loss"] == pytest.approx(total / 1024, abs=1e-9)


def test_the_logged_training_loss_is_that_of_the_global_batch(tiny, cli):
    """The first loss of a run, worked out without the training loop."""
    run = cli(**{**tiny, "run_id": "first", "steps": 2, "micro_batches": ((0.0, 4),)})
    trainer = make_trainer(random_weights=False, steps=2, micro_batches=((0.0, 4),))
    shards, _ = train_gpt.open_corpus(dataclasses.replace(trainer.config, data=tiny["data"]))
    loader = train_gpt.TrainLoader(trainer.config, shards, ranks(1)[0])
    losses = [trainer.token_losses(0, micro_batch, trainer.table.lookup(micro_batch))
              for micro_batch in loader.next().micro_batches]
    loader.close()
    assert run.train_losses[1] == pytest.approx(torch.cat(losses).double().mean().item(), abs=1e-5)


def test_a_step_takes_the_gradient_of_the_mean_loss():
    trainer = make_trainer(mtp_weights=((0.0, (1.0, 0.5)),))
    tokens = byte_documents(1100)
    micro_batches, ngrams = zip(*(read(trainer, tokens, low) for low in (0, 256, 512)))
    taken = {}
    trainer.optimizer.step = lambda step, lr_mul, plan, next_plan: taken.update(
        trainer.optimizer.grads, ngram=torch.cat(trainer.table.grads), lr_mul=lr_mul, plans=(plan, next_plan))
    upcoming = train_gpt.Batch([], "next plan", {})
    summed, returned = trainer.step(2, train_gpt.Batch(list(micro_batches), "plan", {}), lambda: upcoming)
    assert returned is upcoming and taken["plans"] == ("plan", "next plan")
    outputs = [trainer.model(micro_batch, ngram, trainer.context(2, micro_batch, training=True))
               for micro_batch, ngram in zip(micro_batches, ngrams)]
    loss = sum(loss for loss, _ in outputs) / 3
    *grads, first, second, third = torch.autograd.grad(loss, [*trainer.optimizer.params.values(), *ngrams])
    for name, grad in zip(trainer.optimizer.params, grads):
        torch.testing.assert_close(taken[name], grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(taken["ngram"], torch.cat([first, second, third]))
    torch.testing.assert_close(summed, sum(losses.sum() for _, losses in outputs))
    assert taken["lr_mul"] == train_gpt.lr_multiplier(trainer.config, 2)


# ----- unusual but good runs

@pytest.mark.parametrize("changes", [
    {"ngram_orders": ()},
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
    assert "causal:ok normalised:ok" in event_of("validity", run.lines)


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


def test_warm_up_validation_and_saving_are_not_timed(tiny, cli, monkeypatch):
    def slowly(function):
        def slow(*args):
            time.sleep(0.5)
            return function(*args)
        return slow
    monkeypatch.setattr(train_gpt.Trainer, "evaluate", slowly(train_gpt.Trainer.evaluate))
    monkeypatch.setattr(train_gpt, "save_checkpoint", slowly(train_gpt.save_checkpoint))
    monkeypatch.setattr(train_gpt, "warm_up", slowly(train_gpt.warm_up))
    begin = time.monotonic()
    run = cli(**{**tiny, "run_id": "slow", "val_every": 1, "save_every": 1})
    elapsed = time.monotonic() - begin
    assert run.code == 0 and elapsed > 4.5  # four validations, four checkpoints, one warm-up
    assert run.result["train_time_ms"] < 1000 * (elapsed - 4.5)


def test_steps_are_timed_between_validations(tiny, cli, monkeypatch):
    step = train_gpt.Trainer.step

    def slow(self, *rest):
        time.sleep(0.3)
        return step(self, *rest)

    def instead_of_warm_up(trainer):
        monkeypatch.setattr(train_gpt.Trainer, "step", slow)

    monkeypatch.setattr(train_gpt, "warm_up", instead_of_warm_up)
    run = cli(**{**tiny, "run_id": "slow", "val_every": 1, "save_every": 1})
    assert run.result["train_time_ms"] > 1200


def test_reading_data_is_timed(tiny, cli, monkeypatch):
    next_cycle = train_gpt.TrainLoader._next_cycle

    def slow(self, step):
        time.sleep(0.3)
        return next_cycle(self, step)

    monkeypatch.setattr(train_gpt.TrainLoader, "_next_cycle", slow)
    assert cli(**{**tiny, "run_id": "slow"}).result["train_time_ms"] > 1200


# ----- warm-up

def whole_state(trainer):
    """Copies of everything that a step could have changed."""
    return copy.deepcopy({"params": dict(trainer.model.state_dict()), "grads": trainer.optimizer.grads,
                          "state": trainer.optimizer.state, "rng": torch.get_rng_state(),
                          "table": trainer.table.full_state(), "waiting": trainer.table.grads})


PHASES = dict(windows=((0.0, (32, 64)), (0.5, (64, 128))), mtp_weights=((0.0, (1.0, 0.5)), (0.5, (1.0,))),
              untie_at=0.25)


@pytest.mark.parametrize("dtype, comms", [("float32", "tokens"), ("bfloat16", "rows"), ("float32", "row_sharded")])
def test_warm_up_leaves_no_trace(dtype, comms, corpus):
    config = dict(dtype=dtype, steps=8, adam_every=2, ngram_decay=0.5, ngram_every=2, ngram_comms=comms, **PHASES)
    warm, cold = (make_trainer(random_weights=False, **config) for _ in range(2))
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
    shards, _ = train_gpt.open_corpus(dataclasses.replace(warm.config, data=str(corpus)))
    loader = train_gpt.TrainLoader(warm.config, shards, ranks(1)[0])
    for number in range(4):
        batch = loader.next()
        warm.step(number, batch), cold.step(number, batch)
    loader.close()
    assert_bitwise(whole_state(warm), whole_state(cold))


@pytest.mark.parametrize("which", [
    lambda trainer: trainer.model.embed,
    lambda trainer: trainer.model.residual_scale,
    lambda trainer: trainer.optimizer.state["mlp"]["first"],
], ids=["weight", "scalar", "moment"])
def test_a_restore_that_misses_a_tensor_is_noticed(which, monkeypatch):
    trainer = make_trainer(**PHASES)
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


# ----- how runs end

@pytest.mark.parametrize("changes", [{"adam_lr": 1e30}, {"matrix_lr": 1e30}], ids=str)
def test_a_loss_that_is_not_finite_ends_the_run(changes, tiny, cli):
    run = cli(**{**tiny, "run_id": "diverged", "steps": 20, **changes})
    assert run.code == 1
    assert run.lines[-1].startswith("status:nan ") and "learning rate" in run.lines[-1]
    assert (run.folder / "log.txt").read_text().splitlines()[-1] == run.lines[-1]
    assert len(run.train_losses) < 20
    assert not (run.folder / "result.json").exists() and not (run.folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_says_so(name, tiny, tmp_path):
    with started(tmp_path, {**tiny, "steps": 1000, "epochs": 100, "run_id": "stopped"}) as process:
        for line in process.stdout:
            if line.startswith("step:3/"):
                break
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out.splitlines()[-1] == "status:interrupted" and err == ""
    assert (tmp_path / "logs" / "stopped" / "log.txt").read_text().splitlines()[-1] == "status:interrupted"


def test_the_log_has_its_status_when_the_console_is_gone(tiny, tmp_path):
    with started(tmp_path, {**tiny, "steps": 200, "epochs": 100, "run_id": "piped"}) as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        process.stderr.read()
        assert process.wait(timeout=60) != 0
    assert (tmp_path / "logs" / "piped" / "log.txt").read_text().splitlines()[-1].startswith("status:")


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


# ----- validity gates

VAL = np.asarray(byte_documents(600), dtype=np.uint16)


def gates(trainer):
    return (train_gpt.check_causal(trainer, trainer.config.steps, VAL),
            train_gpt.check_normalised(trainer, trainer.config.steps, VAL))


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"ngram_orders": ()}, {"untie_at": 0.5},
                                     {"mtp_weights": ((0.0, (1.0, 0.5)),)}], ids=str)
def test_an_honest_model_passes_the_gates(changes):
    assert gates(make_trainer(**changes)) == (True, True)


def leak_ngrams(trainer, monkeypatch, ahead=1):
    """The n-gram rows of a position hash the tokens after it as well."""
    honest = train_gpt.ngram_rows

    def leaky(tokens, position, document_start, orders, rows):
        return honest(tokens, np.minimum(position + ahead, len(tokens) - 1), document_start, orders, rows)

    monkeypatch.setattr(train_gpt, "ngram_rows", leaky)


def leak_attention(trainer, monkeypatch, ahead=1):
    """Queries see the keys of `ahead` later positions."""
    def leaky(q, k, v, micro_batch, bias, window, scale):
        index = torch.arange(q.size(0))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        visible = (index[None] <= index[:, None] + ahead) & (index[None] > index[:, None] - window)
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)

    trainer.model.attend = leaky


def leak_targets(trainer, monkeypatch):
    """The embedding of a position is that of its target."""
    hidden = trainer.model.hidden
    monkeypatch.setattr(trainer.model, "hidden", lambda micro_batch, *rest: hidden(
        dataclasses.replace(micro_batch, inputs=micro_batch.targets.int()), *rest))


def leak_segments(trainer, monkeypatch):
    """Smearing takes the next token's embedding instead of the previous one's."""
    pad = torch.nn.functional.pad
    monkeypatch.setattr(train_gpt.F, "pad", lambda x, widths, *rest: pad(
        x, (0, 0, -1, 1) if tuple(widths) == (0, 0, 1, -1) else widths, *rest))


LEAKS = {
    "n-grams, one token ahead": leak_ngrams,
    "n-grams, two tokens ahead": functools.partial(leak_ngrams, ahead=2),
    "attention, one token ahead": leak_attention,
    "attention, sixty tokens ahead": functools.partial(leak_attention, ahead=60),
    "the target itself": leak_targets,
    "smearing": leak_segments,
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_planted_leak_is_caught(leak, num_layers, monkeypatch):
    trainer = make_trainer(num_layers=num_layers, long_layers=(0,))
    assert train_gpt.check_causal(trainer, 4, VAL)
    LEAKS[leak](trainer, monkeypatch)
    assert not train_gpt.check_causal(trainer, 4, VAL)


@pytest.mark.parametrize("factor", [0.99, 1.01, 0.5])
def test_losses_that_do_not_normalise_are_caught(factor, monkeypatch):
    trainer = make_trainer()
    honest = trainer.model.next_token_losses

    def cheating(hidden, targets):
        losses, normaliser, logits = honest(hidden, targets)
        return losses * factor, normaliser, logits

    monkeypatch.setattr(trainer.model, "next_token_losses", cheating)
    assert not train_gpt.check_normalised(trainer, 4, VAL)


def test_a_failed_gate_fails_the_run(tiny, cli, monkeypatch, capsys):
    leak_ngrams(None, monkeypatch, ahead=2)
    with pytest.raises(RuntimeError, match="causal"):
        cli(**{**tiny, "run_id": "leaky"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("status:error ") and "causal" in lines[-1]
    assert any(line.startswith("validity: causal:FAILED normalised:ok ") for line in lines)
