"""Update rules against torch and slow float64 references; the rules of parameters; whole steps."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from optimizer_cases import RULES, batch_of, draw, hyper, normal, state_of, waiting
from torch import nn

import train_gpt
from helpers import (
    LAYERED,
    NO_TABLE,
    ONE_LAYER,
    assert_bitwise,
    byte_documents,
    make_trainer,
    ranks,
    tiny_config,
)
from train_gpt import (
    EOT_TOKEN,
    GPT,
    TRACKS,
    BlockedAttention,
    ConfigError,
    NgramTable,
    Optimizer,
    Rule,
    Runtime,
    adagrad_rows_update,
    adam_update,
    muon_update,
    polar_express,
    take_step,
    untie_step,
)


def gpt_of(config):
    return GPT(config, BlockedAttention())


def optimizer_of(config, model=None):
    """An Optimizer of the GPT, in this process alone."""
    runtime = Runtime("cpu")
    model = model or gpt_of(config)
    return Optimizer(config, model, NgramTable(config, runtime), runtime)


# ----- Adam


@pytest.mark.parametrize(
    "betas, decay", [((0.9, 0.95), 0.0), ((0.8, 0.999), 0.1), ((0.0, 0.5), 0.0)]
)
def test_adam_is_torchs_adamw(betas, decay):
    weight = normal(5, 7).double()
    param = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([param], lr=0.01, betas=betas, weight_decay=decay)
    state = {key: torch.zeros_like(weight) for key in ("first", "second")}
    for step in range(1, 9):
        lr = 0.01 * step
        grad = normal(5, 7, seed=step).double() * 10.0 ** (2 * step - 12)  # also near epsilon
        reference.param_groups[0]["lr"] = lr
        param.grad = grad.clone()
        reference.step()
        adam_update(weight, grad, state, hyper(step, lr, decay, betas=betas))
        torch.testing.assert_close(weight, param.data, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["first"], reference.state[param]["exp_avg"])
    torch.testing.assert_close(state["second"], reference.state[param]["exp_avg_sq"])


def test_adam_leaves_a_weight_without_gradient_alone():
    weight = normal(4)
    before = weight.clone()
    state = {"first": torch.zeros(4), "second": torch.zeros(4)}
    adam_update(weight, torch.zeros(4), state, hyper())
    assert_bitwise(weight, before)


def test_the_rounding_of_a_gradient_of_zero_makes_no_step():
    """At the start residual_scale and embed_scale have no gradient but for rounding, of 1e-9 and
    less: whatever Adam makes of it must not depend on its sign."""
    scalars = torch.ones(2)
    state = {"first": torch.zeros(2), "second": torch.zeros(2)}
    adam_update(scalars, torch.tensor([8e-10, -8e-10]), state, hyper(lr=0.01))
    assert (scalars - 1).abs().max() < 0.1 * 0.01


@pytest.mark.parametrize("changes", [{}, LAYERED], ids=["tiny", "layered"])
def test_a_run_does_not_depend_on_how_micro_batches_are_split(changes):
    """The same documents as one micro-batch of 256 tokens, or as two of 128: the sums differ in
    their last bits alone. With an epsilon of 1e-10 the first step's scalars differ by a whole step,
    0.01, and losses by 0.007."""
    eot, text = EOT_TOKEN["bytes"], byte_documents(257, seed=3)
    text[0] = text[128] = text[256] = eot
    runs = []
    for length, parts in ((256, [text]), (128, [text[:129], text[128:]])):
        changes = {**changes, "micro_batch_tokens": length, "steps": 40}
        trainer = make_trainer(random_weights=False, **changes)
        batch = batch_of(trainer, *parts)
        losses = [trainer.step(step, batch).item() / 256 for step in range(8)]
        runs.append((losses, trainer.model.state_dict()))
    (losses, weights), (other_losses, other_weights) = runs
    assert losses == pytest.approx(other_losses, abs=5e-4) and losses[-1] < losses[0] - 1
    for name in ("residual_scale", "embed_scale", "smear_scale", "skip_scale"):
        torch.testing.assert_close(weights[name], other_weights[name], atol=2e-3, rtol=0)


# ----- Muon


def composed_polynomials(values):
    for a, b, c in train_gpt.POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    return values


def test_the_polynomials_bring_singular_values_near_1():
    values = composed_polynomials(np.geomspace(1e-3, 1 / 1.02, 100_000))
    assert values.min() > 0.8 and values.max() < 1.2
    assert composed_polynomials(0.0) == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows, columns", [(24, 24), (40, 16), (16, 40), (1, 8), (8, 1)])
def test_polar_express_against_the_svd(rows, columns, dtype, tolerance):
    matrices = normal(3, rows, columns) * torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    if dtype == torch.bfloat16 and min(rows, columns) == 1:
        tolerance = 0.3  # the one value of a vector lies where the polynomials are steepest
    out = polar_express(matrices, dtype)
    assert out.dtype == torch.float32 and out.shape == matrices.shape
    for matrix, polar in zip(matrices.double(), out.double(), strict=True):
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
        # The same singular vectors, each value sent through the polynomials.
        wanted = composed_polynomials(values / (values.norm() * 1.02))
        assert (polar - (u * wanted) @ vt).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero_in_polar_express(dtype):
    matrices = normal(3, 8, 12)
    matrices[1] = 0
    out = polar_express(matrices, dtype)
    assert not out[1].any()
    assert_bitwise(out[0], polar_express(matrices[:1], dtype)[0])
    assert out[2].any() and out.isfinite().all()


def test_a_norm_that_overflows_is_no_step_of_zero():
    """Zero would be a matrix that stands still for hundreds of steps, unnoticed."""
    matrices = normal(2, 8, 12)
    matrices[1, 0, 0] = 1e30
    out = polar_express(matrices, torch.float32)
    assert_bitwise(out[0], polar_express(matrices[:1], torch.float32)[0])
    assert out[1].isnan().all()


def slow_muon(weight, grad, buffer, second, lr, momentum, beta2, decay):
    """One matrix in float64, from the description. Returns its new weight, buffer and second."""
    rows, columns = weight.shape
    buffer = momentum * buffer + (1 - momentum) * grad
    nesterov = momentum * buffer + (1 - momentum) * grad
    u, values, vt = np.linalg.svd(nesterov, full_matrices=False)
    update = (u * composed_polynomials(values / (np.linalg.norm(values) * 1.02 + 1e-12))) @ vt
    size = np.linalg.norm(update)
    axis = 1 if rows >= columns else 0
    second = beta2 * second + (1 - beta2) * (update**2).mean(axis, keepdims=True)
    update = update / np.sqrt(second)
    update = update * size / np.linalg.norm(update)
    lr = lr * max(1, rows / columns) ** 0.5
    decayed = np.where(update * weight >= 0, decay * weight, 0)
    return weight - lr * (update + decayed), buffer, second


def muon_state(count, rows, columns):
    second = (count, rows, 1) if rows >= columns else (count, 1, columns)
    return {"momentum": torch.zeros(count, rows, columns), "second": torch.zeros(second)}


@pytest.mark.parametrize("rows, columns", [(12, 12), (24, 8), (8, 24)])
def test_muon_against_a_slow_float64_reference(rows, columns):
    weight, state = normal(3, rows, columns), muon_state(3, rows, columns)
    tensors = weight, state["momentum"], state["second"]
    slow = [[tensor[k].double().numpy() for tensor in tensors] for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = normal(3, rows, columns, seed=step + 1)
        muon_update(weight, grad.clone(), state, hyper(step + 1, lr, 0.5, momentum))
        for k in range(3):
            exact = grad[k].double().numpy()
            w, buffer, second = slow[k]
            slow[k] = slow_muon(w, exact, buffer, second, lr, momentum, 0.95, 0.5)
            for actual, expected in zip(tensors, slow[k], strict=True):
                found = actual[k].double().numpy()
                np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-3)


def test_muons_decay_only_follows_the_update():
    grad, start = normal(1, 6, 6), normal(1, 6, 6, seed=1)
    results = []
    for decay in (0.0, 0.5):
        weight = start.clone()
        muon_update(weight, grad.clone(), muon_state(1, 6, 6), hyper(decay=decay))
        results.append(weight)
    update = start - results[0]
    decayed = results[0] != results[1]
    assert torch.equal(decayed, update * start > 0)
    torch.testing.assert_close((results[0] - results[1])[decayed], (0.1 * 0.5 * start)[decayed])


# ----- bfloat16 weights with a float32 master


def test_a_master_adds_up_what_bfloat16_does_not_resolve():
    """A hundred steps of 2^-12, of which 1.0 in bfloat16 takes none: the master is exact."""

    def subtract(weight, grad, state, numbers):
        weight.sub_(grad)

    part, step = torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 2.0**-12)
    assert_bitwise(part - step.bfloat16(), part)
    state, weights = {"master": part.float()}, []
    for _ in range(100):
        take_step(subtract, part, step, state, hyper())
        weights.append(part[0].item())
    assert_bitwise(state["master"], torch.full((3,), 1 - 100 * 2.0**-12))
    assert_bitwise(part, state["master"].bfloat16())
    assert 5 < len(set(weights)) < 10  # 2^-8 apart below 1
    exact = torch.ones(3)
    take_step(subtract, exact, step, {}, hyper())  # without a master it is the weight
    assert_bitwise(exact, 1 - step)


def test_bfloat16_training_is_float32_training_bitwise():
    config = tiny_config(dtype="bfloat16", untie_at=0.5, steps=8, ngram_lr=0.0)
    model, master = gpt_of(config), gpt_of(config)
    pair = [optimizer_of(config, each) for each in (model, master.float())]
    for step in range(6):
        for optimizer in pair:
            if step == untie_step(config):
                optimizer.untie()
            grads = {
                name: normal(*layout.param.shape, seed=step)
                for name, layout in optimizer.layouts.items()
            }
            optimizer.accumulate(grads)
            optimizer.count(1)
            optimizer.step(step, 0.7)
    halves, state = 0, state_of(pair[0])
    for name, layout in pair[0].layouts.items():
        exact, param = pair[1].layouts[name].param.data, layout.param.data
        assert ("master" in state[name]) == (param.dtype == torch.bfloat16)
        if param.dtype == torch.bfloat16:
            halves += 1
            assert_bitwise(state[name]["master"], exact, name)
        assert_bitwise(param, exact.to(param.dtype), name)
    assert halves >= 7
    assert not torch.equal(state["mlp"]["master"], pair[0].layouts["mlp"].param.float())


# ----- row-wise Adagrad


@pytest.mark.parametrize("floor", [1e-6, 3.0])
def test_adagrad_rows_against_a_dense_reference(floor):
    rng = np.random.default_rng(0)
    count, dim = 50, 6
    table, second = normal(count, dim), torch.zeros(count)
    dense, dense_second = table.double().clone(), second.double().clone()
    for step in range(4):
        rows = torch.from_numpy(np.sort(rng.choice(count, size=25, replace=False)))
        grads = normal(len(rows), dim, seed=step)
        before = table.clone(), second.clone()
        adagrad_rows_update(table, second, rows, grads, lr=0.1, floor=floor)
        for row, grad in zip(rows, grads.double(), strict=True):
            dense_second[row] += grad.square().mean()
            dense[row] -= 0.1 * grad / (dense_second[row] + floor**2).sqrt()
        torch.testing.assert_close(table.double(), dense, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(second.double(), dense_second, atol=1e-6, rtol=1e-6)
        untouched = ~torch.isin(torch.arange(count), rows)
        assert_bitwise(table[untouched], before[0][untouched])
        assert_bitwise(second[untouched], before[1][untouched])


def test_adagrad_takes_no_rows_and_rows_without_gradient():
    table, second = torch.ones(8, 2), torch.zeros(8)
    no_rows = torch.empty(0, dtype=torch.int64)
    adagrad_rows_update(table, second, no_rows, torch.empty(0, 2), lr=0.5, floor=1e-6)
    grads = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    adagrad_rows_update(table, second, torch.tensor([3, 5]), grads, 0.5, 1e-6)
    assert_bitwise(table[[0, 3]], torch.ones(2, 2))  # stays finite
    assert second.tolist() == [0, 0, 0, 0, 0, 8, 0, 0]
    torch.testing.assert_close(table[5], torch.tensor([1 - 0.5 * 2**0.5, 1.0]))


# ----- the rules of a track

CONFIGS = {
    "tiny": {},
    "no table": NO_TABLE,
    "no value embeddings": {"value_embedding_layers": ()},
    "one layer": ONE_LAYER,
    "layered": LAYERED,
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("track", ["nano", "mini", "fineweb"])
def test_every_parameter_of_a_track_has_one_rule(track, changes):
    small = {**dataclasses.asdict(tiny_config()), **changes}
    small = {key: value for key, value in small.items() if key not in ("track", "stages", "rules")}
    narrow = {**small, "windows": (32, 64), "softmax_rows": 0}
    config = train_gpt.with_values(TRACKS[track], narrow)
    model = gpt_of(config)
    optimizer, names = optimizer_of(config, model), {name for name, _ in model.named_parameters()}
    order = ["small", "embeddings", "ngram_table", "matrices"]
    assert [group.name for group in optimizer.groups] == order
    members = []
    for group in optimizer.parameter_groups:
        members += group.layouts
        for name, layout in group.layouts.items():
            assert layout.rule == TRACKS[track].rules[name] and layout.rule.group == group.name
            assert group.state[name]  # of its own
    assert sorted(members) == sorted(names) == sorted(optimizer.layouts)
    # Groups differ between tracks in their numbers alone.
    assert {name: rule.group for name, rule in RULES.items()} == {
        name: rule.group for name, rule in TRACKS[track].rules.items()
    }


@pytest.mark.parametrize("rule", [None, Rule("matrixes"), Rule("ngram_table")], ids=str)
def test_a_parameter_without_a_rule_or_a_group_is_refused(rule):
    model = gpt_of(tiny_config())
    model.stranger = nn.Parameter(torch.zeros(3))
    rules = {**RULES, "stranger": rule} if rule else RULES
    words = "no optimizer rule for stranger.* small, embeddings, matrices"
    with pytest.raises(ConfigError, match=words):
        optimizer_of(tiny_config(rules=rules), model)
    rules = {**RULES, "stranger": Rule("small")}
    assert "stranger" in optimizer_of(tiny_config(rules=rules), model).layouts


def test_rules_that_miss_a_parameter_or_name_an_unknown_one_are_refused():
    for name in RULES:
        rules = {key: rule for key, rule in RULES.items() if key != name}
        with pytest.raises(ConfigError, match=f"no optimizer rule for {name};"):
            optimizer_of(tiny_config(**LAYERED, rules=rules))
    rules = {**RULES, "hed": RULES["head"], "query": RULES["query_key"]}
    with pytest.raises(ConfigError, match="rules: the model has no parameters hed, query"):
        optimizer_of(tiny_config(rules=rules))


def test_an_unknown_rule_of_the_matrices_is_refused():
    with pytest.raises(ConfigError, match="matrix_update=sopa: must be one of .*soap"):
        optimizer_of(tiny_config(matrix_update="sopa"))


def test_every_parameter_moves_at_its_own_rate():
    trainer = make_trainer(random_weights=False, **NO_TABLE, **LAYERED)
    layouts = trainer.optimizer.layouts
    before = {name: layout.param.detach().clone() for name, layout in layouts.items()}
    grads = {name: torch.ones_like(layout.param) for name, layout in layouts.items()}
    trainer.optimizer.accumulate(grads)
    trainer.optimizer.count(1)
    trainer.optimizer.step(0, 0.5)
    for name, layout in layouts.items():
        moved = before[name] - layout.param.detach()
        if RULES[name].group == "matrices":
            assert moved.any()
        else:  # the first step of Adam is the learning rate
            rate = 0.5 * trainer.config.adam_lr * RULES[name].lr_mul
            torch.testing.assert_close(moved, torch.full_like(moved, rate), atol=1e-6, rtol=1e-3)
        assert layout.is_empty


@pytest.mark.parametrize("matrix_update", ["muon", "soap"])
def test_matrices_of_a_bank_may_have_rates_of_their_own(matrix_update):
    """Up and down projections of the MLPs alternate: each matrix moves as in a bank at its own
    rate."""

    def moved(lr_mul):
        rules = {**RULES, "mlp": dataclasses.replace(RULES["mlp"], lr_mul=lr_mul)}
        changes = {"num_layers": 3, "steps": 4, "matrix_update": matrix_update, "rules": rules}
        optimizer = optimizer_of(tiny_config(**changes, **NO_TABLE))
        for step in range(2):
            optimizer.accumulate({"mlp": normal(6, 64, 32, seed=step)})
            optimizer.count(1)
            optimizer.step(step, 0.7)
        return optimizer.layouts["mlp"].param.detach()

    mixed, slow, fast = moved((1.0, 2.0)), moved(1.0), moved(2.0)
    torch.testing.assert_close(mixed[0::2], slow[0::2])
    torch.testing.assert_close(mixed[1::2], fast[1::2])
    assert not torch.equal(slow, fast)


# ----- sums of gradients


def test_gradients_of_micro_batches_add_up():
    optimizer = make_trainer(random_weights=False).optimizer
    parts = [normal(257, 32, seed=seed) for seed in range(3)]
    for part in parts:
        optimizer.accumulate({"embed": part, "head": None})
        optimizer.count(1)
    torch.testing.assert_close(waiting(optimizer.layouts["embed"]), sum(parts))
    assert not waiting(optimizer.layouts["head"]).any()


def test_the_first_gradient_of_a_step_replaces_the_last_steps_sum():
    """Also where a parameter has none in one step: neither its old gradient nor anything else takes
    its place."""

    def weights(per_step, is_stale):
        optimizer = optimizer_of(tiny_config(steps=4, **NO_TABLE))
        layouts = [optimizer.layouts[name] for name in ("head", "smear_gate")]
        for step, grads in enumerate(per_step):
            for grad in grads:
                each = {"head": grad, "smear_gate": grad[:1, :12], "embed": normal(257, 32)}
                optimizer.accumulate(each)
                optimizer.count(1)
            optimizer.accumulate({})
            optimizer.count(1)
            optimizer.step(step, 1.0)
            if is_stale:  # what a step has used may hold anything
                for layout in layouts:
                    layout.grad.fill_(float("nan"))
        return [layout.param.detach() for layout in layouts]

    steps = [[normal(257, 32, seed=seed) for seed in seeds] for seeds in ((1, 2), (3,), (), (4, 5))]
    none = [grads or [torch.zeros(257, 32)] for grads in steps]
    # The reference counts a token more where it adds a zero, which makes no difference to zeros.
    assert_bitwise(weights(steps, is_stale=True), weights(none, is_stale=False))


def test_losses_are_divided_once_by_all_tokens_of_a_cycle():
    """Stages may change a step's tokens inside a cycle of Adam's: each token counts alike. Muon
    divides by those of its own step, which only its momentum shows."""
    counts, grads = (3, 5, 16, 4), [normal(257, 32, seed=seed) for seed in range(4)]
    config = tiny_config(steps=8, adam_every=2, **NO_TABLE)
    optimizer = optimizer_of(config)
    mlp_grads = [normal(4, 64, 32, seed=9 + seed) for seed in range(4)]
    first, momentum = torch.zeros(257, 32), torch.zeros(4, 64, 32)
    for step, tokens in enumerate(counts):
        optimizer.accumulate({"embed": grads[step] / 2, "mlp": mlp_grads[step]})
        optimizer.accumulate({"embed": grads[step] / 2, "mlp": None})
        optimizer.count(tokens)
        optimizer.step(step, 1.0)
        momentum.lerp_(mlp_grads[step] / tokens, 1 - train_gpt.momentum_at(config, step))
        if step % 2:
            mean = (grads[step - 1] + grads[step]) / (counts[step - 1] + tokens)
            first.lerp_(mean, 0.1)
        torch.testing.assert_close(state_of(optimizer)["embed"]["first"], first)
        torch.testing.assert_close(state_of(optimizer)["mlp"]["momentum"], momentum)
    assert [group.tokens for group in optimizer.parameter_groups] == [0, 0, 0]


# ----- Adam parameters that step every k-th step


def adam_only(steps, every, grads):
    """Values of the parameters after each of `steps` steps on gradients {name: [tensor, ...]}."""
    config = tiny_config(steps=steps, adam_every=every, cooldown=0.0, **NO_TABLE)
    optimizer, history = optimizer_of(config), []
    for step in range(steps):
        optimizer.accumulate({name: values[step] for name, values in grads.items()})
        optimizer.count(1)
        optimizer.step(step, 1.0)
        history.append({name: optimizer.layouts[name].param.detach().clone() for name in grads})
    return history


def test_adam_every_steps_on_the_mean_gradient_and_at_the_end_on_what_is_left():
    shapes = {"embed": (257, 32), "smear_scale": (1,)}
    grads = {
        name: [normal(*shape, seed=step) for step in range(7)] for name, shape in shapes.items()
    }
    means = {
        name: [sum(values[:3]) / 3, sum(values[3:6]) / 3, values[6]]
        for name, values in grads.items()
    }
    delayed, direct = adam_only(7, 3, grads), adam_only(3, 1, means)
    for late, early in ((2, 0), (5, 1), (6, 2)):
        torch.testing.assert_close(delayed[late], direct[early])
    for step in (3, 4):
        assert_bitwise(delayed[step], delayed[2])
    # Gradients of whole cycles wait when the last step comes early.
    torch.testing.assert_close(adam_only(4, 3, grads)[2], direct[0])


def test_muon_does_not_wait_for_adam():
    optimizer = optimizer_of(tiny_config(steps=6, adam_every=3, **NO_TABLE))
    layout = optimizer.layouts["mlp"]
    for step in range(3):
        before = layout.param.detach().clone()
        optimizer.accumulate({"mlp": normal(4, 64, 32, seed=step)})
        optimizer.count(1)
        optimizer.step(step, 1.0)
        assert not torch.equal(before, layout.param)
        assert layout.is_empty


# ----- compiled updates


COMPILED = {
    "adam": (train_gpt.ADAM, {"weight": (6, 8)}),
    "muon": (train_gpt.MATRIX_RULES["muon"], {"weight": (4, 12, 8), "second": (4, 12, 1)}),
    "soap": (train_gpt.MATRIX_RULES["soap"], {"weight": (2, 8, 8), "count": (2, 1, 1)}),
    "soap_muon": (train_gpt.MATRIX_RULES["soap_muon"], {"weight": (2, 8, 8), "second": (2, 8, 1)}),
}


def stepped_by(step, rule, shapes, hypers):
    """Weights and state that some steps of one parameter leave, its gradients drawn."""
    shape = shapes["weight"]
    weight = normal(*shape).bfloat16()
    state = {key: torch.zeros(shapes.get(key, shape)) for key in rule.keeps}
    state["master"] = weight.float()
    if rule.has_bases:
        for side in ("row", "column"):
            state[f"{side}_factor"] = torch.eye(shape[-1]).repeat(shape[0], 1, 1)
            state[f"{side}_basis"] = torch.linalg.qr(normal(shape[0], 8, 8, seed=7)).Q
    for number, numbers in enumerate(hypers):
        step(rule.update, weight, normal(*shape, seed=number + 1), state, numbers)
    return {"weight": weight, **state}


def every_number_scheduled(rates):
    """Hypers in which each number differs from step to step."""
    hypers = []
    for number in range(1, 6):
        betas = (0.8 + 0.01 * number, 0.9 + 0.01 * number)
        lr = rates * 0.01 * number
        hypers.append(hyper(number, lr, 0.1 * number, 0.8 + 0.02 * number, betas))
    return hypers


@pytest.mark.parametrize(
    "name",
    ["adam", "soap_muon", *(pytest.param(x, marks=pytest.mark.slow) for x in ("muon", "soap"))],
)
def test_compiled_updates_are_the_plain_ones_in_one_graph(name, monkeypatch):
    """Traced as torch.compile does for a GPU, and executed by torch's own operations. Scheduling
    any of the numbers compiles nothing again, rates by matrix neither; nor does a parameter of the
    same shape."""
    traced = []

    def count(graph, example):
        traced.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    compiler = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic: compiler(
            function, dynamic=dynamic, fullgraph=True, backend=count
        ),
    )
    rule, shapes = COMPILED[name]
    by_matrix = torch.arange(1.0, shapes["weight"][0] + 1)
    by_matrix = by_matrix.view(-1, *[1] * (len(shapes["weight"]) - 1))
    for rates in (1.0, by_matrix):
        hypers = every_number_scheduled(rates)
        torch._dynamo.reset()
        traced.clear()
        compiled = train_gpt.compiled_updates()
        for _ in range(2):
            found = stepped_by(compiled, rule, shapes, hypers)
        assert len(traced) == 1 and traced[0] > 5
        for key, value in stepped_by(take_step, rule, shapes, hypers).items():
            tolerance = 2**-7 if value.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=tolerance)
    torch._dynamo.reset()


def test_updates_are_compiled_on_cuda_alone(monkeypatch):
    monkeypatch.setattr(train_gpt, "compiled_updates", lambda: "compiled")
    for device, is_compiled, expected in (
        ("cpu", True, take_step),
        ("cuda", False, take_step),
        ("cuda", True, "compiled"),
    ):
        runtime = Runtime("cpu")
        runtime.device = SimpleNamespace(type=device)
        config = tiny_config(compile=is_compiled)
        group = train_gpt.ParameterGroup("matrices", config, {}, runtime)
        assert group.take_step == expected


# ----- the head, which is the embedding too until it is untied


def test_untying_begins_a_cycle_of_adam():
    for steps in (8, 20, 21):
        for every in (1, 2, 3, 5):
            for fraction in (0.0, 0.1, 0.25, 0.5, 2 / 3, 1.0):
                config = tiny_config(steps=steps, adam_every=every, untie_at=fraction)
                asked, given = round(fraction * steps), untie_step(config)
                assert given % every == 0 and asked <= given < asked + every
                tied = [train_gpt.training_phase(config, step).is_tied for step in range(steps)]
                assert tied == [step < given for step in range(steps)]
                # The last step left one model behind.
                assert train_gpt.is_tied_before(config, given) == (given > 0)
                assert not train_gpt.is_tied_before(config, given + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_untying_inside_a_cycle_is_torchs_adam_on_one_table_then_on_two(dtype):
    """Every third step; four steps in, the head is to be untied, so that it is at six.

    The reference knows a table, and from then on its copy with the table's moments. Both see means
    over the tokens of whole cycles, whose number differs from step to step.
    """
    config = tiny_config(steps=12, adam_every=3, untie_at=4 / 12, **NO_TABLE, dtype=dtype)
    model = gpt_of(config)
    optimizer = optimizer_of(config, model)
    assert torch.equal(model.embed, model.head)

    def adam_of(name, table):
        rule = RULES[name]
        lr = config.adam_lr * rule.lr_mul
        return torch.optim.AdamW([table], lr, rule.betas, weight_decay=rule.decay)

    head = nn.Parameter(model.head.detach().double())
    tables, adam = {"head": head}, {"head": adam_of("head", head)}
    for step in range(12):
        if step == untie_step(config):
            optimizer.untie()
        if step == 6:
            tables["embed"] = nn.Parameter(head.detach().clone())
            adam["embed"] = adam_of("embed", tables["embed"])
            adam["embed"].state[tables["embed"]] = copy.deepcopy(adam["head"].state[head])
        # Until it is untied the embedding has no gradient: the head's is the sum of both its uses.
        grads = {name: draw(step, len(name), model.head.shape) for name in tables}
        optimizer.accumulate({"embed": None, **grads})
        optimizer.count(step + 1)
        cycle = range(step // 3 * 3, step // 3 * 3 + 3)
        for name, grad in grads.items():
            so_far = tables[name].grad if tables[name].grad is not None else 0
            tables[name].grad = so_far + grad.double() / sum(each + 1 for each in cycle)
        optimizer.step(step, 1.0)
        if step % 3 == 2:
            for rule in adam.values():
                rule.step()
                rule.zero_grad()
        for name, table in tables.items():
            state = state_of(optimizer)[name]
            exact = state.get("master", optimizer.layouts[name].param.data)
            torch.testing.assert_close(exact.double(), table.data, atol=1e-6, rtol=1e-5)
    assert not torch.equal(model.embed, model.head)


def test_untying_inside_a_cycle_is_untying_at_its_end():
    """A whole model: what the fraction says inside a cycle makes no difference to any weight,
    unlike the next cycle."""

    def weights(untie_at):
        changes = {"steps": 8, "adam_every": 2, "untie_at": untie_at, **NO_TABLE}
        trainer = make_trainer(random_weights=False, **changes)
        for step in range(8):
            trainer.step(step, batch_of(trainer, np.arange(300) % 37))
        return {name: param.detach() for name, param in trainer.model.named_parameters()}

    inside, end, later = weights(3 / 8), weights(4 / 8), weights(6 / 8)
    assert_bitwise(inside, end)
    assert not torch.equal(inside["embed"], later["embed"])
    assert not torch.equal(inside["head"], inside["embed"])


def test_the_trainer_unties_ahead_of_the_steps_gradients():
    trainer = make_trainer(random_weights=False, steps=8, untie_at=0.5, **NO_TABLE)
    embed, head = trainer.model.embed, trainer.model.head
    layout, start = trainer.optimizer.layouts["embed"], embed.detach().clone()
    for step in range(5):
        trainer.accumulate(step, batch_of(trainer, np.arange(300) % 37))
        assert torch.equal(embed, head if step == 4 else start)
        assert waiting(layout).any() == (step == 4)
        trainer.optimizer.step(step, 1.0)
    assert not torch.equal(embed, head)


def test_a_tied_embedding_keeps_still():
    """Its weights and its moments, here such that a step would show, wait for the head's."""
    optimizer = optimizer_of(tiny_config(steps=8, untie_at=0.5, **NO_TABLE))
    embed, head = (optimizer.layouts[name].param.detach() for name in ("embed", "head"))
    state = state_of(optimizer)["embed"]
    for value in state.values():
        value.fill_(1.0)
    before = embed.clone()
    for step in range(4):
        optimizer.accumulate({"head": normal(257, 32, seed=step), "embed": None})
        optimizer.count(1)
        optimizer.step(step, 1.0)
    assert_bitwise(embed, before)
    assert list(state) == ["first", "second"]
    assert all((value == 1.0).all() for value in state.values())
    assert not torch.equal(head, before)


# ----- who owns what


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_owned_ranges_cover_every_unit_once(world_size):
    for count in range(12):
        bounds = [Runtime.owned_range(rank, count) for rank in ranks(world_size)]
        covered = [unit for low, high in bounds for unit in range(low, high)]
        assert covered == list(range(count))
        chunk = math.ceil(count / world_size)  # what the collectives give each rank
        for rank, (low, high) in enumerate(bounds):
            assert low == min(rank * chunk, count) and high - low <= chunk
