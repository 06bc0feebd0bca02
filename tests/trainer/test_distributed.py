"""Real processes with gloo: world sizes 1, 2, 3 and 4 take the same steps; failures end all ranks.

Each world size is started once, and does all that is compared.
"""

import collections
import contextlib
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from optimizer_cases import CASES, MATRICES, RULES, batch_of, take_steps

import ranks
import train_gpt
from helpers import assert_bitwise, tiny_config
from train_gpt import Runtime, Trainer

# Ranks share the parameters of a group out, or each of them updates all.
WAYS = [(2, False), (2, True), (3, True)]
WAYS += [pytest.param(*way, marks=pytest.mark.slow) for way in ((3, False), (4, True))]
SEVERAL = pytest.mark.parametrize("world_size, is_shared_out", WAYS)
EACH_CASE = pytest.mark.parametrize("name", CASES)


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


@EACH_CASE
@SEVERAL
def test_steps_of_ranks_are_the_steps_of_one_process(world_size, is_shared_out, name, results_of):
    expected = results_of(1)[0]["cases"][name]
    found = [rank["cases"][name] for rank in results_of(world_size, is_shared_out)]
    tolerance = 1e-4
    if CASES[name].dtype == "bfloat16":
        tolerance = 2**-6  # of gradients that travel so
    for rank in found:  # after a step all ranks hold the same
        assert_bitwise(rank["params"], found[0]["params"])
    close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    for param, value in expected["params"].items():
        close(found[0]["params"][param], value)
    for group, states in expected["full"].items():
        for param, state in states.items():
            for key, value in state.items():
                other = found[0]["full"][group][param][key]
                if key.endswith("basis"):  # the sign of a column means nothing
                    other, value = other.abs(), value.abs()
                close(other, value)
    for param, grad in expected["left"].items():  # gradients that wait for Adam
        total = sum(rank["left"][param] for rank in found)
        torch.testing.assert_close(total, grad, atol=1e-5, rtol=1e-5)
        assert grad.any() == (name == "every third" and param not in MATRICES)


@EACH_CASE
@SEVERAL
def test_the_ledger_counts_the_bytes_sent(world_size, is_shared_out, name, results_of):
    """Of matrices nothing but gradients and weights travels, whatever their rule; of an embedding
    that is tied to the head nothing."""
    case, peers = CASES[name], world_size - 1
    itemsize = getattr(torch, case.dtype).itemsize
    expected = collections.Counter()
    for step in range(case.steps):
        summed = collections.Counter()
        for param, (count, *others) in case.shapes.items():
            group = RULES[param].group
            is_waiting = name == "every third" and group != "matrices" and step % 3 < 2
            is_tied = name == "untied" and param == "embed" and step < 3
            if is_waiting or is_tied:
                continue
            if group == "small" or not is_shared_out:
                summed[group] += count * math.prod(others)
                continue
            size = peers * math.ceil(count / world_size) * math.prod(others) * itemsize
            for collective in ("reduce_scatter", "all_gather"):
                expected[f"{collective}/{param}"] += size
        together = "_".join(group for group in ("small", "embeddings", "matrices") if summed[group])
        if together:
            size = 4 * summed.total()
            expected[f"all_reduce/{together}"] += 2 * peers * size // world_size
    sent = results_of(world_size, is_shared_out)[0]["cases"][name]["sent"]
    assert sent == expected
    assert results_of(1)[0]["cases"][name]["sent"] == {}


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


# One sum for all groups, or small parameters, embeddings, table and matrices by themselves, in each
# of the three phases. Before them the step's rows are pulled, and after the table's update those of
# the next step, for which nobody waits yet.
WHOLE = """
all_to_all/ngram_table wait all_reduce/small_embeddings_matrices all_to_all/ngram_table wait
all_to_all/ngram_table wait
"""
SHARED_OUT = """
all_to_all/ngram_table wait all_reduce/small reduce_scatter/embed reduce_scatter/head
reduce_scatter/blocks.0.value_embed all_to_all/ngram_table reduce_scatter/query_key
reduce_scatter/value_output reduce_scatter/mlp wait all_gather/embed wait all_gather/head wait
all_gather/blocks.0.value_embed wait all_to_all/ngram_table wait all_gather/query_key wait
all_gather/value_output wait all_gather/mlp wait
"""


@pytest.mark.parametrize("is_shared_out, expected", [(False, WHOLE), (True, SHARED_OUT)])
def test_collectives_are_started_in_the_declared_order_and_waited_for_late(
    is_shared_out, expected, results_of
):
    for rank in results_of(2, is_shared_out):
        assert rank["events"] == expected.split()


def trajectory(runtime, values):
    """Six steps of a run: this rank's part of each step's loss, the validation loss before them,
    and that and the weights behind them. Ranks share out 11 and then 2 micro-batches: some have
    more, some none. A pass reads three at most; a sampled softmax is of each."""
    stages = tuple(stage | {"micro_batches": 2} for stage in values["stages"])
    stages[0].update(micro_batches=11, softmax_rows=200)
    values = {**values, "stages": stages, "steps": 6, "micro_batches_a_pass": 3}
    config = train_gpt.with_values(train_gpt.TRACKS["english"], values)
    trainer, corpus = Trainer(config, runtime), train_gpt.open_corpus(config)
    loader = train_gpt.TrainLoader(config, corpus.shards, runtime)
    before, losses, passes = trainer.evaluate(6, corpus.val), [], []
    with contextlib.closing(loader):
        batch = loader.next_batch()
        for step in range(6):
            upcoming = loader.next_batch()
            losses.append(trainer.step(step, batch, upcoming).item() / batch.tokens)
            passes.append(len(batch.passes))
            batch = upcoming
    return {
        "losses": losses,
        "passes": passes,
        "before": before,
        "val": trainer.evaluate(6, corpus.val),
        "model": trainer.model.state_dict(),
        "table": ranks.whole_state(trainer.table)["rows"]["weight"],
    }


@SEVERAL
def test_six_steps_do_not_depend_on_the_world_size(world_size, is_shared_out, results_of):
    """Every schedule changes on the way, the table has all kinds of rows, and three ranks share
    four passes over the validation tokens."""
    alone = results_of(1)[0]["trajectory"]
    results = [rank["trajectory"] for rank in results_of(world_size, is_shared_out)]
    losses = [sum(parts) for parts in zip(*(result["losses"] for result in results), strict=True)]
    assert len(losses) == 6 and losses == pytest.approx(alone["losses"], abs=1e-5)
    assert alone["val"] < alone["before"] - 0.01  # something was learned
    passes = {2: [2, 5], 3: [2, 2, 1], 4: [1, 1, 1, 1]}[world_size]
    assert alone["passes"][0] == 11 and [result["passes"][0] for result in results] == passes
    for result in results:
        assert result["val"] == pytest.approx(alone["val"], abs=1e-5)
        assert_bitwise(result["model"], results[0]["model"])
        assert_bitwise(result["table"], results[0]["table"])
    torch.testing.assert_close(results[0]["table"], alone["table"], atol=1e-4, rtol=1e-4)
    for name, weight in alone["model"].items():
        rate = 75 if name.endswith("value_embed") else 5  # times that of other parameters, at most
        found = results[0]["model"][name]
        # A hundred-and-fiftieth of a step of Adam; but a gradient at the edge of ROUNDING may wait.
        is_far = (found - weight).abs() > 1e-4 * rate + 2e-4 * weight.abs()
        assert is_far.float().mean() <= 1e-4


def test_a_run_of_two_ranks_logs_what_a_training_step_sends(rich_run_of):
    """Whatever was sent on the way beside. One rank writes."""
    run = rich_run_of(2)
    sent = {key: int(size) for key, size in run.result.items() if "/" in key}
    weights = run.checkpoint()["model"].items()
    sizes = [each.numel() for name, each in weights if train_gpt.bank_name(name) in MATRICES]
    # At every second step they travel alone, else with all other parameters.
    assert 2 * sent["all_reduce/matrices"] == 4 * sum(sizes)
    assert sent["all_reduce/small_embeddings_matrices"] > sent["all_reduce/matrices"]
    assert {key.split("/")[1] for key in sent}.isdisjoint({"validation", "checkpoint"})
    assert sum(line.startswith(("comms: ", "status:ok ")) for line in run.lines) == 2
