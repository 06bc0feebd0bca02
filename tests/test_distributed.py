"""Real processes with gloo: world sizes 1, 2, 3 and 4 take the same steps; failures end all ranks."""
import signal
import subprocess
import time

import pytest
import torch

import optimizer_ranks
from helpers import ROOT, assert_bitwise, command, environment, run_trainer, started
from train_gpt import Runtime

HERE = ROOT / "tests"


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """results_of(world size): what optimizer_ranks.py left, one dict a rank."""
    alone = Runtime("cpu")
    known = {1: [{case: optimizer_ranks.steps(case, alone) for case in optimizer_ranks.CASES}]}

    def results(world_size):
        if world_size not in known:
            folder = tmp_path_factory.mktemp(f"optimizer{world_size}")
            env = {**environment(), "PYTHONPATH": f"{ROOT}:{HERE}"}
            done = subprocess.run([*command(world_size, HERE / "optimizer_ranks.py"), str(folder)], env=env,
                                  cwd=folder, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            known[world_size] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]
        return known[world_size]

    return results


@pytest.mark.parametrize("case", optimizer_ranks.CASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_steps_are_the_steps_of_one_process(world_size, case, results_of):
    expected = results_of(1)[0][case]
    first, *others = [result[case] for result in results_of(world_size)]
    for other in others:  # after a step all ranks hold the same
        assert_bitwise(other["params"], first["params"])
        assert_bitwise(other["full"], first["full"])
    for name, param in expected["params"].items():
        # A bfloat16 weight is cut, not rounded: a last bit of float32 may carry over into its own last bit.
        tolerance = 1e-4 if param.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(first["params"][name], param, atol=1e-5, rtol=tolerance)
    for name, state in expected["full"].items():
        for key, value in state.items():
            assert first["full"][name][key].shape == value.shape
            if key != "mantissa":
                torch.testing.assert_close(first["full"][name][key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", optimizer_ranks.CASES)
def test_the_full_state_survives_a_round_trip(case, world_size, results_of):
    for result in results_of(world_size):
        full = result[case]["full"]
        assert_bitwise(result[case]["again"], full)
        assert_bitwise(result[case]["raised"], optimizer_ranks.plus_one(full))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_wait_for_adam_on_every_rank(world_size, results_of):
    # Four steps with adam_every=3: Adam's gradients of the fourth wait, Muon's are gone.
    left = [result["every third"]["left"] for result in results_of(world_size)]
    alone = results_of(1)[0]["every third"]["left"]
    for name, grad in alone.items():
        total = sum(rank[name][:len(grad)] for rank in left)
        torch.testing.assert_close(total, grad)
        assert grad.any() == (name not in ("attention", "mlp"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ledger_counts_the_bytes_sent(world_size, results_of):
    result = results_of(world_size)[0]["float32"]
    sent = result["sent"]
    if world_size == 1:
        assert sent == {}
        return
    peers, steps = world_size - 1, optimizer_ranks.STEPS
    for name, shape in optimizer_ranks.CASES["float32"].items():
        if name in ("smear_gate", "residual_scale"):
            continue
        chunk = -(-shape[0] // world_size) * 4 * torch.Size(shape[1:]).numel()
        assert sent[f"reduce_scatter/{name}"] == sent[f"all_gather/{name}"] == steps * peers * chunk
    assert sent["all_reduce/replicated"] == steps * (2 * 8 * 4 * peers // world_size)
    assert result["messages"] == {key: steps * peers * (2 if key == "all_reduce/replicated" else 1) for key in sent}


# ----- whole runs

@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_do_not_depend_on_the_world_size(world_size, rich_run_of):
    alone, run = rich_run_of(1), rich_run_of(world_size)
    assert list(run.train_losses) == list(range(1, 21))
    for step, loss in alone.train_losses.items():
        assert run.train_losses[step] == pytest.approx(loss, abs=1e-4), step
    assert run.result["val_loss"] == pytest.approx(alone.result["val_loss"], abs=1e-4)
    assert run.result["world_size"] == world_size and run.result["tokens"] == alone.result["tokens"]
    assert alone.train_losses[20] < alone.train_losses[1] - 0.5  # something was learned


def test_only_one_rank_writes(rich_run_of):
    run = rich_run_of(4)
    assert sum(line.startswith("run:") for line in run.lines) == 1
    assert run.lines[-1].startswith("status:ok ")
    steps = [event["step"] for event in run.metrics if "train_loss" in event]
    assert steps == sorted(set(steps))
    assert any(line.startswith("comms: ") and "reduce_scatter/mlp=" in line for line in run.lines)


def test_a_world_size_that_does_not_divide_is_refused(tiny, tmp_path):
    run = run_trainer(tmp_path, {**tiny, "micro_batches": ((0.0, 4),)}, world_size=3)
    assert run.code != 0
    assert [line for line in run.lines if line.startswith("status:")] == run.lines
    assert len(run.lines) == 1 and run.lines[0].startswith("status:error ")
    for words in ("world size 3", "4 micro-batches", "--micro-batches"):
        assert words in run.lines[0]
    assert "train_gpt.py\", line" not in run.stderr  # no traceback but the launcher's
    assert not (tmp_path / "logs").exists()


def test_the_preflight_of_two_ranks_reports_once(tiny, tmp_path):
    run = run_trainer(tmp_path, tiny, "--check", world_size=2)
    assert run.code == 0
    assert run.lines.count("check:ok") == 1 and "world size 2" in run.lines[0]


def test_a_rank_that_dies_ends_the_others(tiny, tmp_path):
    begin = time.monotonic()
    run = run_trainer(tmp_path, {**tiny, "steps": 100, "run_id": "dies"}, "die", world_size=2,
                      script=HERE / "sabotage.py", timeout=100)
    assert run.code != 0
    assert time.monotonic() - begin < 60
    assert max(run.train_losses) <= 2
    assert (run.folder / "log.txt").read_text().splitlines()[-1].startswith("status:")
    assert "status:ok" not in run.stdout and not (run.folder / "result.json").exists()


def test_an_error_of_another_rank_than_the_first_is_told(tiny, tmp_path):
    run = run_trainer(tmp_path, {**tiny, "steps": 100, "run_id": "fails"}, "fail", world_size=2,
                      script=HERE / "sabotage.py", timeout=100)
    assert run.code != 0
    assert "only rank 1 knows what is wrong" in run.stdout + run.stderr


def test_ranks_may_start_at_different_times(tiny, tmp_path):
    run = run_trainer(tmp_path, {**tiny, "run_id": "lags"}, "lag", world_size=2, script=HERE / "sabotage.py")
    assert run.code == 0, run.stdout + run.stderr


def test_a_launcher_that_is_ended_ends_its_ranks_in_order(tiny, tmp_path):
    values = {**tiny, "steps": 1000, "epochs": 100, "run_id": "ended"}
    with started(tmp_path, values, world_size=2) as process:
        for line in process.stdout:
            if line.startswith("step:3/"):
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode != 0
    log = (tmp_path / "logs" / "ended" / "log.txt").read_text()
    assert log.splitlines()[-1] == "status:interrupted"
