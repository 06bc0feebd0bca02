"""Real processes with gloo: world sizes 1, 2, 3 and 4 take the same steps; failures end all ranks."""
import functools
import inspect
import signal
import time

import numpy as np
import pytest
import torch

import ranks
import sabotage
import train_gpt
from helpers import assert_bitwise, run_trainer, started, tiny_config
from optimizer_cases import GROUPS, batch_of, draw, full_state, load, optimizer_of, steps_of
from train_gpt import Runtime, Trainer


@functools.cache
def results_of(world_size):
    """What the steps of all cases left, one dict a rank."""
    work = steps_of(GROUPS)
    return ranks.on_ranks(world_size, work) if world_size > 1 else [work(Runtime("cpu"))]


@pytest.mark.parametrize("case", [case for case in GROUPS if case != "bfloat16 wire"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_steps_are_the_steps_of_one_process(world_size, case):
    expected, = results_of(1)[0][case]["steps"]
    first, *others = [result[case]["steps"][0] for result in results_of(world_size)]
    for other in others:  # after a step all ranks hold the same
        assert_bitwise(other, first)
    for name, param in expected["params"].items():
        # A bfloat16 weight is rounded: a last bit of float32 may carry over into its own last bit.
        tolerance = 1e-4 if param.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(first["params"][name], param, atol=1e-5, rtol=tolerance)
    for group in ("small", "embeddings", "matrices"):
        assert first["full"][group].keys() == expected["full"][group].keys()
        for name, state in expected["full"][group].items():
            for key, value in state.items():
                other = first["full"][group][name][key]
                assert other.shape == value.shape
                if key != "mantissa":
                    torch.testing.assert_close(other, value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_wait_for_adam_on_every_rank(world_size):
    # Four steps with adam_every=3: Adam's gradients of the fourth wait, Muon's are gone.
    left = [result["every third"]["left"] for result in results_of(world_size)]
    for name, grad in results_of(1)[0]["every third"]["left"].items():
        total = sum(rank[name][:len(grad)] for rank in left)
        torch.testing.assert_close(total, grad)
        assert grad.any() == (name not in ("attention", "mlp"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ledger_counts_the_bytes_sent(world_size):
    sent, case = results_of(world_size)[0]["float32"]["sent"], GROUPS["float32"]
    if world_size == 1:
        assert sent == {}
        return
    peers, steps = world_size - 1, len(case.steps)
    small = [name for name in case.shapes if train_gpt.RULES[name].group == "small"]
    bucket = sum(torch.Size(case.shapes[name]).numel() for name in small)
    assert small and sent.pop("all_reduce/small") == (steps * (2 * 4 * bucket * peers // world_size), steps * 2 * peers)
    for name in case.shapes.keys() - small:
        count, *others = case.shapes[name]
        chunk = -(-count // world_size) * 4 * torch.Size(others).numel()
        for collective in ("reduce_scatter", "all_gather"):
            assert sent.pop(f"{collective}/{name}") == (steps * peers * chunk, steps * peers)
    assert sent == {}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_may_travel_as_bfloat16(world_size):
    """Those of embeddings and matrices, in half of the bytes: their sums, here in the momentum, are rounded, and only
    where they travel. All that comes back, and what small parameters send, stays as it was."""
    rounded, plain = (results_of(world_size)[0][f"{wire} wire"] for wire in ("bfloat16", "float32"))
    for key, (size, messages) in plain["sent"].items():
        halved = key.startswith("reduce_scatter/")
        assert rounded["sent"][key] == (size // 2 if halved else size, messages)
    for name, state in plain["steps"][0]["full"]["matrices"].items():
        momentum, exact = rounded["steps"][0]["full"]["matrices"][name]["momentum"], state["momentum"]
        assert torch.equal(momentum, exact) == (world_size == 1)
        # Each rank's part and each sum of parts is rounded to eight bits.
        assert (momentum - exact).abs().max() <= (world_size + 1) * 2**-8 * exact.abs().max()
    small = "smear_gate"
    assert_bitwise(rounded["steps"][0]["params"][small], plain["steps"][0]["params"][small])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_tied_embedding_does_not_travel(world_size):
    """It is untied at the last of the case's steps, the only one in which it is summed and sent."""
    sent, steps = results_of(world_size)[0]["untied"]["sent"], len(GROUPS["untied"].steps)
    for collective in ("reduce_scatter", "all_gather"):
        size, messages = sent[f"{collective}/embed"]
        assert size and (steps * size, steps * messages) == sent[f"{collective}/head"]


# ----- the order of collectives

class Waited:
    """A collective's work handle that tells when somebody waits for it."""

    def __init__(self, work, name, events):
        self.work, self.name, self.events = work, name, events

    def wait(self):
        self.events.append(f"wait {self.name}")
        self.work.wait()


def record(method, events):
    """Have a collective of all Runtimes write down when it is started and waited for."""
    inner = getattr(Runtime, method)

    def call(self, *words, **options):
        given = inspect.signature(inner).bind(self, *words, **options).arguments
        result = inner(self, *words, **options)
        tensors, work = result if isinstance(result, tuple) else ((), result)
        if work is not None:
            name = f"{method}/{given['name']}"
            events.append(f"start {name}")
            work = Waited(work, name, events)
        return (tensors, work) if isinstance(result, tuple) else work

    setattr(Runtime, method, call)


ORDERS = {"muon": {"matrix_update": "muon", "ngram_comms": "replicated"},
          "soap": {"matrix_update": "soap", "ngram_comms": "sharded"}}


def recorded(runtime):
    """{case of ORDERS: what a whole optimizer step starts and waits for}."""
    events, left = [], {}
    for method in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        record(method, events)
    for name, changes in ORDERS.items():
        trainer = Trainer(tiny_config(**changes), runtime)
        batch, upcoming = (batch_of(trainer, np.arange(300) % modulus) for modulus in (37, 41))
        trainer.accumulate(0, batch)
        trainer.table.upcoming = upcoming.plan
        events.clear()
        trainer.optimizer.step(0, 1.0)
        left[name] = list(events)
    return left


def declared_order(case):
    """Small parameters, embeddings, table and matrices, in each of the three phases."""
    embeddings, matrices, replicated = ("embed", "head", "value_embed"), ("attention", "mlp"), case == "muon"
    events = ["start all_reduce/small", *(f"start reduce_scatter/{name}" for name in embeddings),
              "start all_to_all/ngram_table", *(f"start reduce_scatter/{name}" for name in matrices)]
    events += ["wait all_reduce/small"]
    for name in embeddings:
        events += [f"wait reduce_scatter/{name}", f"start all_gather/{name}"]
    events += ["wait all_to_all/ngram_table", f"start {'all_gather' if replicated else 'all_to_all'}/ngram_table"]
    for name in matrices:
        events += [f"wait reduce_scatter/{name}", f"start all_gather/{name}"]
    events += [f"wait all_gather/{name}" for name in embeddings]
    events += ["wait all_gather/ngram_table"] * replicated  # else the next step's rows are waited for by its lookups
    return events + [f"wait all_gather/{name}" for name in matrices]


def test_collectives_are_started_and_waited_for_in_the_declared_order():
    for left in ranks.on_ranks(2, recorded):
        for case, events in left.items():
            assert events == declared_order(case)


# ----- the state, from one world size to another

SHAPES = dict(attention=(5, 12, 12), mlp=(3, 10, 7), embed=(7, 8), head=(2, 8), value_embed=(1, 9, 8),
              smear_gate=(1, 5), residual_scale=(3,))
STATES = {
    "soap_muon bfloat16": dict(matrix_update="soap_muon", dtype="bfloat16", ngram_comms="replicated"),
    "kl_soap": dict(matrix_update="kl_soap", ngram_comms="sharded"),
    "muon bfloat16": dict(matrix_update="muon", dtype="bfloat16", ngram_comms="sharded"),
}


def made_up(value, *key):
    """Numbers of the same kinds and shapes as a full state's."""
    if isinstance(value, dict):
        return {name: made_up(inner, *key, *name.encode()) for name, inner in value.items()}
    if isinstance(value, torch.Tensor):
        numbers = draw(*key, value.shape)
        return (1000 * numbers).to(value.dtype) if value.dtype in (torch.int16, torch.int32) else numbers
    return 0.5


def state_for(case, runtime):
    """(an optimizer, the made-up state that the same optimizer of a single process could have left)."""
    alone, optimizer = (optimizer_of(each, SHAPES, ngram_rows=101, index_orders=(3, 4), index_bits=5, **STATES[case])
                        for each in (runtime.alone(), runtime))
    return optimizer, made_up(full_state(alone))


def round_trips(runtime):
    """{case: what comes out of each group after the made-up state was loaded; its shares of the table}."""
    left = {}
    for case in STATES:
        optimizer, full = state_for(case, runtime)
        load(optimizer, full)
        table = optimizer.groups[2]
        left[case] = {"again": full_state(optimizer), "weight": table.weight, "second": table.second,
                      "held": table.held, "owned": table.owned}
    return left


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_full_state_does_not_depend_on_the_world_size(world_size):
    """What a single process left is loaded and comes out again: so whatever world size has left it, any may load it."""
    results = ranks.on_ranks(world_size, round_trips) if world_size > 1 else [round_trips(Runtime("cpu"))]
    for case in STATES:
        _, full = state_for(case, Runtime("cpu"))
        assert set(full) == {"small", "embeddings", "ngram_table", "matrices"}
        for rank, result in enumerate(results):
            table = full["ngram_table"]
            assert_bitwise(result[case]["again"], full, f"{case} on rank {rank}")
            assert_bitwise(result[case]["weight"], table["weight"][slice(*result[case]["held"])])
            assert_bitwise(result[case]["second"], table["second"][slice(*result[case]["owned"])])


# ----- trajectories

TRAJECTORIES = {"muon": dict(matrix_update="muon", ngram_comms="replicated"),
                "adam": dict(matrix_update="adam", ngram_comms="sharded")}


def trajectories(runtime, values):
    """{rule: this rank's part of each step's loss, the weights at the end}."""
    left = {}
    for rule, changes in TRAJECTORIES.items():
        config = train_gpt.Config(**{**values, **changes})
        trainer = Trainer(config, runtime)
        (shards, indexed, _), index, losses = train_gpt.open_corpus(config), trainer.table.index, []
        index.read(indexed, runtime)
        loader = train_gpt.TrainLoader(config, shards, runtime, index=index)
        batch = loader.next()
        for step in range(config.steps):
            last = step + 1 == config.steps
            loss, batch = trainer.step(step, batch, (lambda: None) if last else loader.next)
            micro_batches = train_gpt.at_step(config.micro_batches, step, config)
            losses.append(loss.item() / (micro_batches * config.micro_batch_tokens))
        loader.close()
        left[rule] = losses, trainer.model.state_dict()
    return left


@functools.cache
def trajectories_of(world_size, values):
    values = dict(values)
    return (ranks.on_ranks(world_size, trajectories, values) if world_size > 1
            else [trajectories(Runtime("cpu"), values)])


@pytest.mark.parametrize("rule", TRAJECTORIES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_twenty_steps_do_not_depend_on_the_world_size(world_size, rule, rich):
    """Every schedule changes on the way, and the table has all kinds of rows. Of the soap rules single steps are
    compared, in test_shared_matrices.py."""
    values = tuple({**rich, "micro_batch_tokens": 128}.items())
    (alone, weights), = [result[rule] for result in trajectories_of(1, values)]
    results = [result[rule] for result in trajectories_of(world_size, values)]
    losses = [sum(parts) for parts in zip(*(losses for losses, _ in results))]
    assert len(losses) == 20 and losses == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] - 0.5  # something was learned
    for _, others in results:
        assert_bitwise(others, results[0][1])
    for name, weight in weights.items():
        torch.testing.assert_close(results[0][1][name], weight, atol=1e-2, rtol=1e-2)


# ----- whole runs

def test_only_one_rank_writes(rich_run_of):
    run = rich_run_of(2)
    assert sum(line.startswith("run:") for line in run.lines) == 1
    assert run.lines[-1].startswith("status:ok ") and run.result["world_size"] == 2
    steps = [event["step"] for event in run.metrics if "train_loss" in event]
    assert steps == list(range(1, 21))
    assert any(line.startswith("comms: ") and "reduce_scatter/mlp=" in line for line in run.lines)
    alone = rich_run_of(1)
    assert run.result["val_loss"] == pytest.approx(alone.result["val_loss"], abs=1e-4)
    assert run.result["tokens"] == alone.result["tokens"]


def test_a_world_size_that_does_not_divide_is_refused(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "micro_batches": ((0.0, 4),)}, world_size=3)
    assert run.code == 2 and len(run.lines) == 1 and run.lines[0].startswith("status:error ")
    for words in ("world size 3", "4 micro-batches", "--micro-batches"):
        assert words in run.lines[0]
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "logs").exists()


def test_the_preflight_of_two_ranks_reports_once(tiny, tmp_path):
    run = ranks.train(tmp_path, tiny, "--check", world_size=2)
    assert run.code == 0
    assert run.lines.count("check:ok") == 1 and "world size 2" in run.lines[0]


def test_a_rank_that_dies_ends_the_others(tiny, tmp_path):
    began = time.monotonic()
    run = ranks.train(tmp_path, {**tiny, "steps": 100, "run_id": "dies"}, world_size=2, before=sabotage.die)
    assert run.code == 3 and time.monotonic() - began < 60
    assert max(run.train_losses) <= 2
    assert (run.folder / "log.txt").read_text().splitlines()[-1].startswith("status:")
    assert "status:ok" not in run.stdout and not (run.folder / "result.json").exists()


def test_an_error_of_another_rank_than_the_first_is_told(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "steps": 100, "run_id": "fails"}, world_size=2, before=sabotage.fail)
    assert run.code in (1, 2)  # of the rank that ends first
    assert "rank 1: status:error only rank 1 knows what is wrong" in run.stderr


def test_a_rank_that_ends_at_once_leaves_none_behind_that_still_connects(monkeypatch):
    monkeypatch.setattr(train_gpt, "ANSWER_SECONDS", 1)
    def refused():  # as where all ranks find the same fault in the configuration
        runtime = Runtime("cpu")
        runtime.roll_call("error: refused")
        runtime.close(failed=True)
    assert [ranks.fork(8, refused) for _ in range(3)] == [0, 0, 0]  # of such groups 29 in 30 failed without a barrier


def test_ranks_may_start_at_different_times(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "run_id": "lags"}, world_size=2, before=sabotage.lag)
    assert run.code == 0, run.stdout + run.stderr


# ----- the launcher

def test_torchrun_starts_the_ranks_of_a_run(tiny, tmp_path):
    run = run_trainer(tmp_path, {**tiny, "run_id": "launched"}, world_size=2)
    assert run.code == 0, run.stdout + run.stderr
    assert [line[:10] for line in run.lines if line.startswith("status:")] == ["status:ok "]
    assert run.result["world_size"] == 2 and len(run.train_losses) == 4


def test_a_launcher_that_is_ended_ends_its_ranks_in_order(tiny, tmp_path):
    values = {**tiny, "steps": 1000, "epochs": 100, "ngram_comms": "sharded", "run_id": "ended"}
    with started(tmp_path, values, world_size=2) as process:
        for line in process.stdout:
            if line.startswith("step:3/"):
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode != 0
    log = (tmp_path / "logs" / "ended" / "log.txt").read_text()
    assert log.splitlines()[-1] == "status:interrupted"
