"""Real processes with gloo: world sizes 1, 2, 3 and 4 take the same steps; failures end all ranks.

Each world size is started once, and does all that is compared.
"""

import collections
import contextlib
import functools
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from optimizer_cases import CASES, MATRICES, RULES, batch_of, take_steps

import ranks
import train_gpt
from helpers import LAYERED, ROOT, assert_bitwise, randomise, tiny_config
from train_gpt import UPDATE_RULES, Runtime, Trainer

SLOW = pytest.mark.slow
# Ranks share the parameters of a group out, or each of them updates all.
SEVERAL = pytest.mark.parametrize(
    "world_size, is_shared_out",
    [
        (2, False),
        (2, True),
        (3, True),
        pytest.param(3, False, marks=SLOW),
        pytest.param(4, True, marks=SLOW),
    ],
)


@pytest.fixture(scope="module")
def results_of(rich):
    """results_of(world size, is_shared_out): what each rank found, as a list."""

    @functools.cache
    def results(world_size, is_shared_out=False):
        if world_size == 1:
            return [everything(Runtime("cpu"), rich)]
        return ranks.on_ranks(world_size, everything, rich, is_shared_out)

    return results


def everything(runtime, rich, is_shared_out=False):
    """What a rank does for all tests of this file that compare world sizes."""
    if is_shared_out:
        ranks.share_out()
    found = {
        "cases": {name: take_steps(case, runtime) for name, case in CASES.items()},
        "trajectory": trajectory(runtime, rich),
    }
    if runtime.world_size == 2:
        found["events"] = recorded(runtime)
    return found


def assert_close_states(actual, expected, **tolerance):
    """Equal states {name: {key: tensor}} but for the order of sums, and for signs of bases."""
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        assert actual[name].keys() == state.keys()
        for key, value in state.items():
            other = actual[name][key]
            if key.endswith("basis"):  # the sign of a column means nothing
                other, value = other.abs(), value.abs()
            torch.testing.assert_close(other, value, **tolerance)


# ----- steps


@pytest.mark.parametrize("name", CASES)
@SEVERAL
def test_steps_of_ranks_are_the_steps_of_one_process(world_size, is_shared_out, name, results_of):
    """Of soap rules with both sides single steps from the same well-separated bases are compared:
    rounding may turn null spaces of factors. All others agree from the first step on."""
    case = CASES[name]
    expected = results_of(1)[0]["cases"][name]
    first, *others = [rank["cases"][name] for rank in results_of(world_size, is_shared_out)]
    for other in others:  # after a step all ranks hold the same
        assert_bitwise(other["steps"], first["steps"])
    tolerance = 1e-3 if case.is_settled else 1e-4
    if case.dtype == "bfloat16":
        tolerance = 2**-6  # of gradients that travel so
    assert len(expected["steps"]) == (len(case.steps) if case.is_settled else 1)
    for one, wanted in zip(first["steps"], expected["steps"], strict=True):
        for param, value in wanted["params"].items():
            rtol = tolerance if value.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(one["params"][param], value, atol=tolerance, rtol=rtol)
        for group, states in wanted["full"].items():
            if group != "ngram_table":
                assert_close_states(one["full"][group], states, atol=tolerance, rtol=tolerance)
    for param, grad in expected["left"].items():  # gradients that wait for Adam
        total = sum(rank["left"][param][: len(grad)] for rank in (first, *others))
        torch.testing.assert_close(total, grad, atol=1e-5, rtol=1e-5)
        assert grad.any() == (case.changes.get("adam_every") == 3 and param not in MATRICES)


# ----- what travels


def bytes_of_shares(shape, world_size, dtype):
    """Bytes that a rank owns of a parameter, padded."""
    count, *others = shape
    itemsize = getattr(torch, dtype).itemsize
    return math.ceil(count / world_size) * itemsize * math.prod(others)


def bytes_of_sums(values, world_size):
    """Bytes that a rank sends where so many float32 values are summed for all ranks."""
    return 2 * (world_size - 1) * 4 * values // world_size


@pytest.mark.parametrize("name", ["float32", "bfloat16", *UPDATE_RULES])
@SEVERAL
def test_the_ledger_counts_the_bytes_sent(world_size, is_shared_out, name, results_of):
    """Of matrices nothing but gradients and weights travels, whatever their rule."""
    case = CASES[name]
    peers, steps = world_size - 1, len(case.steps)
    expected, summed = {}, collections.Counter()
    for param, shape in case.shapes.items():
        group = RULES[param].group
        if group == "small" or not is_shared_out:
            summed[group] += math.prod(shape)
            continue
        chunk = bytes_of_shares(shape, world_size, case.dtype)
        for collective in ("reduce_scatter", "all_gather"):
            expected[f"{collective}/{param}"] = steps * peers * chunk
    for group, values in summed.items():
        expected[f"all_reduce/{group}"] = steps * bytes_of_sums(values, world_size)
    assert results_of(world_size, is_shared_out)[0]["cases"][name]["sent"] == expected
    assert results_of(1)[0]["cases"][name]["sent"] == {}


@SEVERAL
def test_a_tied_embedding_does_not_travel(world_size, is_shared_out, results_of):
    """It is untied at the last of the case's steps, the only one in which it is summed and sent."""
    sent = results_of(world_size, is_shared_out)[0]["cases"]["untied"]["sent"]
    shapes = CASES["untied"].shapes
    tied = len(CASES["untied"].steps) - 1
    if not is_shared_out:
        head, embed = (math.prod(shapes[name]) for name in ("head", "embed"))
        last = bytes_of_sums(head + embed, world_size)
        assert sent["all_reduce/embeddings"] == tied * bytes_of_sums(head, world_size) + last
        return
    for collective in ("reduce_scatter", "all_gather"):
        size = sent[f"{collective}/embed"]
        assert size and sent[f"{collective}/head"] == (tied + 1) * size


# ----- the order of collectives


def recorded(runtime):
    """What a whole step starts and where it waits, in order. Nothing may follow in this process."""
    trainer, events, honest = Trainer(tiny_config(), runtime), [], train_gpt.wait
    batch, upcoming = (batch_of(trainer, np.arange(300) % modulus) for modulus in (37, 41))

    def record(self, collective, name, *rest, **options):
        events.append(f"{collective}/{name}")

    def wait(work):
        events.extend(["wait"] * (work is not None))
        honest(work)

    Runtime.record_sent, train_gpt.wait = record, wait
    trainer.step(0, batch, upcoming)
    return [event for event, _ in itertools.groupby(events)]  # all small ones wait for one work


def test_few_collectives_are_started_in_the_declared_order_and_waited_for_late(results_of):
    """Where each rank updates all parameters, the sums of each group are one collective."""
    expected = ["all_to_all/ngram_table", "wait"]  # the step's rows
    expected += ["all_reduce/small", "all_reduce/embeddings"]
    expected += ["all_to_all/ngram_table", "all_reduce/matrices"]
    # The next step's rows are there before anybody waits for the matrices.
    expected += ["wait", "all_to_all/ngram_table", "wait"]
    for rank in results_of(2, False):
        assert rank["events"] == expected


def test_collectives_are_started_in_the_declared_order_and_waited_for_late(results_of):
    """Small parameters, embeddings, table and matrices, in each of the three phases."""
    embeddings = "embed", "head", "value_embed"
    matrices = "query_key", "value_output", "mlp"
    expected = ["all_to_all/ngram_table", "wait"]  # the step's rows
    expected += ["all_reduce/small", *(f"reduce_scatter/{name}" for name in embeddings)]
    expected += ["all_to_all/ngram_table", *(f"reduce_scatter/{name}" for name in matrices)]
    for name in embeddings:
        expected += ["wait", f"all_gather/{name}"]
    # The next step's rows, for which nobody waits yet.
    expected += ["wait", "all_to_all/ngram_table"]
    for name in matrices:
        expected += ["wait", f"all_gather/{name}"]
    expected += ["wait"]  # for all weights
    for rank in results_of(2, True):
        assert rank["events"] == expected


# ----- a trajectory


def trajectory(runtime, values):
    """Six steps of a run: this rank's part of each step's loss, the validation loss before them,
    and that and the weights behind them. Ranks share out 11 and then 2 micro-batches: some have
    more, some none."""
    stages = tuple(stage | {"micro_batches": 2} for stage in values["stages"])
    stages[0]["micro_batches"] = 11
    values = {**values, "stages": stages, "steps": 6}
    config = train_gpt.with_values(train_gpt.TRACKS["english"], values)
    trainer, corpus = Trainer(config, runtime), train_gpt.open_corpus(config)
    loader = train_gpt.TrainLoader(config, corpus.shards, trainer.table)
    before = trainer.evaluate(config.steps, corpus.val)
    losses = []
    with contextlib.closing(loader):
        batch = loader.next_batch()
        for step in range(config.steps):
            upcoming = loader.next_batch() if step + 1 < config.steps else None
            losses.append(trainer.step(step, batch, upcoming).item() / batch.tokens)
            batch = upcoming
    return {
        "losses": losses,
        "before": before,
        "val": trainer.evaluate(config.steps, corpus.val),
        "model": trainer.model.state_dict(),
        "table": ranks.whole_state(trainer.table)["rows"]["weight"],
    }


def first_gradients(values, most):
    """(sizes of the passes, loss, {name: gradient}) of a run's first step, where a pass reads so
    many micro-batches at most."""
    values = {**values, "micro_batches_a_pass": most}
    config = train_gpt.with_values(train_gpt.TRACKS["english"], values)
    trainer, corpus = Trainer(config, Runtime("cpu")), train_gpt.open_corpus(config)
    randomise(trainer)
    loader = train_gpt.TrainLoader(config, corpus.shards, trainer.table)
    with contextlib.closing(loader):
        batch = loader.next_batch()
    loss = trainer.accumulate(0, batch).item() / batch.tokens
    grads = {"rows of the table": torch.cat(trainer.table.grads)}
    named = trainer.model.named_parameters()
    grads |= {name: param.grad for name, param in named if param.numel()}
    for one in batch.passes:
        wanted = [*one.segment_start.unique().tolist(), len(one.inputs)]
        assert one.segment_bounds.unique_consecutive().tolist() == wanted
    return [len(one.inputs) // config.micro_batch_tokens for one in batch.passes], loss, grads


def test_a_pass_of_several_micro_batches_is_several_passes(rich):
    """Of 8 micro-batches, of which a pass may read three and reads two; a sampled softmax is of
    each. Dense connections, which join no tokens, would amplify rounding."""
    sampled = {"micro_batches": 8, "softmax_rows": 200, **LAYERED}
    sizes, loss, grads = first_gradients({**rich, **sampled}, 1)
    joint_sizes, joint_loss, joint_grads = first_gradients({**rich, **sampled}, 3)
    assert (sizes, joint_sizes) == ([1] * 8, [2] * 4)
    assert joint_loss == pytest.approx(loss, abs=1e-5)
    for name, grad in grads.items():
        assert (joint_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


@SEVERAL
def test_six_steps_do_not_depend_on_the_world_size(world_size, is_shared_out, results_of):
    """Every schedule changes on the way, the table has all kinds of rows, and three ranks share
    four passes over the validation tokens."""
    alone = results_of(1)[0]["trajectory"]
    results = [rank["trajectory"] for rank in results_of(world_size, is_shared_out)]
    losses = [sum(parts) for parts in zip(*(result["losses"] for result in results), strict=True)]
    assert len(losses) == 6 and losses == pytest.approx(alone["losses"], abs=1e-5)
    assert alone["val"] < alone["before"] - 0.01  # something was learned
    for result in results:
        assert result["val"] == pytest.approx(alone["val"], abs=1e-6)
        assert_bitwise(result["model"], results[0]["model"])
        assert_bitwise(result["table"], results[0]["table"])
    torch.testing.assert_close(results[0]["table"], alone["table"], atol=1e-4, rtol=1e-4)
    for name, weight in alone["model"].items():
        rate = 75 if name == "value_embed" else 5  # times that of other parameters, at most
        found = results[0]["model"][name]
        # A hundred-and-fiftieth of a full step of Adam.
        torch.testing.assert_close(found, weight, atol=1e-4 * rate, rtol=2e-4)


# ----- whole runs


def test_a_run_of_three_ranks_logs_what_a_training_step_sends(tiny, tmp_path):
    """Whatever was sent on the way beside, and by a rank without micro-batches. One rank writes."""
    values = {**tiny, "val_every": 2, "save_every": 2, "run_id": "three"}
    run = ranks.train(tmp_path, values, world_size=3, before=ranks.share_out)
    assert run.code == 0, run.stdout + run.stderr
    sent = {key: int(size) for key, size in run.result.items() if "/" in key}
    chunk = math.ceil(4 / 3) * 4 * 64 * 32  # of two layers' four matrices
    assert sent["all_gather/mlp"] == sent["reduce_scatter/mlp"] == 2 * chunk
    assert {key.split("/")[1] for key in sent}.isdisjoint({"validation", "checkpoint"})
    assert sum(line.startswith("comms: ") for line in run.lines) == 1
    assert sum(line.startswith("status:ok ") for line in run.lines) == 1


# ----- what a launcher says


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "x"}, {"WORLD_SIZE": "2"}], ids=str)
def test_odd_words_of_a_launcher_end_in_one_line(variables, tiny, cli, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = cli("--check", **tiny)
    assert run.code == 1 and run.lines[-1].startswith("status:error ValueError: ")


@pytest.mark.slow
def test_collectives_have_the_names_of_older_torch_too():
    """Those before 2.13, as on machines whose torch is 2.11."""
    code = """
from torch import distributed as dist
for name in ("reduce_scatter_single", "all_gather_single"):
    vars(dist).pop(name, None)
import train_gpt
assert train_gpt.reduce_scatter is dist.reduce_scatter_tensor
assert train_gpt.all_gather is dist.all_gather_into_tensor
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
