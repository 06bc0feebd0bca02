"""Chapter 6: update rules against torch and slow float64 references; the rule table; whole steps."""
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import train_gpt
from helpers import NO_TABLE, assert_bitwise, make_trainer, ranks, tiny_config
from optimizer_cases import batch_of, draw, hyper, normal, state_of, waiting
from train_gpt import (GPT, RULES, ConfigError, NgramTable, Optimizer, Rule, Runtime, adagrad_rows_update, adam_update,
                       join_mantissa, muon_update, polar_express, split_mantissa, untie_step)


def optimizer_of(config, model=None):
    """An Optimizer of the GPT, in this process alone."""
    runtime = Runtime("cpu")
    return Optimizer(config, model or GPT(config, "sdpa"), NgramTable(config, runtime), runtime)


# ----- Adam

@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.5)])
def test_adam_is_torchs_adamw(betas, decay):
    weight = normal(5, 7).double()
    param = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([param], lr=0.01, betas=betas, eps=1e-10, weight_decay=decay)
    state = {key: torch.zeros_like(weight) for key in ("first", "second")}
    for step in range(1, 9):
        lr = 0.01 * step
        grad = normal(5, 7, seed=step).double() * 10.0 ** (step - 6)
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
    adam_update(weight, torch.zeros(4), {"first": torch.zeros(4), "second": torch.zeros(4)}, hyper())
    assert_bitwise(weight, before)


# ----- Muon

def composed_polynomials(values):
    for a, b, c in train_gpt.POLAR_EXPRESS:
        values = a * values + b * values ** 3 + c * values ** 5
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
    for matrix, polar in zip(matrices.double(), out.double()):
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
        # The same singular vectors, each value sent through the polynomials.
        wanted = composed_polynomials(values / (values.norm() * 1.02))
        assert (polar - (u * wanted) @ vt).norm() <= tolerance * wanted.norm()
        if dtype == torch.float32 and values.min() > 2e-3 * values.norm():
            assert 0.8 < torch.linalg.svdvals(polar).min() and torch.linalg.svdvals(polar).max() < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero_in_polar_express(dtype):
    matrices = normal(3, 8, 12)
    matrices[1] = 0
    out = polar_express(matrices, dtype)
    assert not out[1].any()
    assert_bitwise(out[0], polar_express(matrices[:1], dtype)[0])
    assert out[2].any() and out.isfinite().all()


def slow_muon(weight, grad, buffer, second, lr, momentum, beta2, decay):
    """One matrix in float64, from the description. Returns its new weight, buffer and second."""
    rows, columns = weight.shape
    buffer = momentum * buffer + (1 - momentum) * grad
    nesterov = momentum * buffer + (1 - momentum) * grad
    u, values, vt = np.linalg.svd(nesterov, full_matrices=False)
    update = (u * composed_polynomials(values / (np.linalg.norm(values) * 1.02 + 1e-12))) @ vt
    size = np.linalg.norm(update)
    axis = 1 if rows >= columns else 0
    second = beta2 * second + (1 - beta2) * (update ** 2).mean(axis, keepdims=True)
    update = update / np.sqrt(second)
    update = update * size / np.linalg.norm(update)
    lr = lr * max(1, rows / columns) ** 0.5
    decayed = np.where(update * weight >= 0, decay * weight, 0)
    return weight - lr * (update + decayed), buffer, second


def muon_state(count, rows, columns):
    return {"momentum": torch.zeros(count, rows, columns),
            "second": torch.zeros((count, rows, 1) if rows >= columns else (count, 1, columns))}


@pytest.mark.parametrize("rows, columns", [(12, 12), (24, 8), (8, 24)])
def test_muon_against_a_slow_float64_reference(rows, columns):
    weight, state = normal(3, rows, columns), muon_state(3, rows, columns)
    slow = [tuple(x[k].double().numpy() for x in (weight, state["momentum"], state["second"])) for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = normal(3, rows, columns, seed=step + 1)
        muon_update(weight, grad.clone(), state, hyper(step + 1, lr, 0.5, momentum))
        slow = [slow_muon(w, grad[k].double().numpy(), b, s, lr, momentum, 0.95, 0.5)
                for k, (w, b, s) in enumerate(slow)]
        for k in range(3):
            for actual, expected in zip((weight, state["momentum"], state["second"]), slow[k]):
                np.testing.assert_allclose(actual[k].double().numpy(), expected, atol=2e-4, rtol=2e-3)


def test_muons_decay_only_follows_the_update():
    grad = normal(1, 6, 6)
    results = []
    for decay in (0.0, 0.5):
        weight = normal(1, 6, 6, seed=1)
        muon_update(weight, grad.clone(), muon_state(1, 6, 6), hyper(decay=decay))
        results.append(weight)
    start = normal(1, 6, 6, seed=1)
    update = start - results[0]
    decayed = results[0] != results[1]
    assert torch.equal(decayed, update * start > 0)
    torch.testing.assert_close((results[0] - results[1])[decayed], (0.1 * 0.5 * start)[decayed])


# ----- bfloat16 weights with the rest of their float32 beside them

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1.4e-45, -1.4e-45, 3.4e38, -3.4e38, float("inf"), -float("inf"),
           1 + 2**-23, 1 - 2**-24, -(1 + 2**-8), 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 - 2**-23]


def all_kinds_of_floats():
    bits = torch.randint(-2**31, 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([torch.tensor(SPECIAL), bits.to(torch.int32).view(torch.float32)])
    return values[~values.isnan()]


def split(values):
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_mantissa(values, high, low)
    return high, low


def test_split_and_join_of_the_mantissa_are_exact():
    values = all_kinds_of_floats()
    assert_bitwise(join_mantissa(*split(values)), values)


def test_the_high_part_is_the_nearest_bfloat16():
    values = all_kinds_of_floats()
    high = split(values)[0].double()
    # torch rounds to nearest as well, halves to the even one: the distance is the same, and only a half differs.
    nearest = values.bfloat16().double()
    differ = high != nearest
    assert ((high - values.double()).abs() == (nearest - values.double()).abs())[differ & nearest.isfinite()].all()
    assert differ.sum() < 50  # of 200,000, of which one in 65,536 lies halfway
    halves = torch.tensor([1 + 2**-8, -(1 + 2**-8), 1 + 3 * 2**-8])
    assert split(halves)[0].tolist() == [1 + 2**-7, -(1 + 2**-7), 1 + 2**-6]  # away from zero


@pytest.mark.parametrize("machine, bits", {"ARM": 0x7FC00000, "x86": 0xFFC00000, "CUDA": 0x7FFFFFFF}.items())
def test_nan_stays_nan_in_both_parts(machine, bits):
    """What arithmetic makes of 0 / 0: the bits of CUDA's, rounded as a number's, would be those of a zero."""
    value = torch.from_numpy(np.array([bits], dtype=np.uint32).view(np.float32))
    high, low = split(value)
    assert value.isnan() and high.isnan() and join_mantissa(high, low).isnan()


def test_join_and_split_of_every_bfloat16():
    every = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for fill in (0, 1, -1, -2**15, 2**15 - 1):
        low = torch.full(every.shape, fill, dtype=torch.int16)
        joined = join_mantissa(every, low)
        keeps = ~joined.isnan()
        assert keeps.sum() >= len(every) - 2
        for actual, expected in zip(split(joined[keeps]), (every[keeps], low[keeps])):
            assert_bitwise(actual, expected)


def test_bfloat16_training_is_float32_training_bitwise():
    config = tiny_config(dtype="bfloat16", untie_at=0.5, steps=8, ngram_lr=0.0)
    model, master = GPT(config, "sdpa"), GPT(config, "sdpa")
    pair = [optimizer_of(config, each) for each in (model, master.float())]
    for step in range(6):
        for optimizer in pair:
            if step == untie_step(config):
                optimizer.untie()
            optimizer.accumulate({name: normal(*layout.param.shape, seed=step)
                                  for name, layout in optimizer.layouts.items()})
            optimizer.step(step, 0.7)
    halves, state = 0, state_of(pair[0])
    for name, layout in pair[0].layouts.items():
        exact, param = pair[1].layouts[name].param.data, layout.param.data
        if param.dtype == torch.bfloat16:
            halves += 1
            assert_bitwise(join_mantissa(param, state[name]["mantissa"]), exact, name)
            if param.numel():
                assert state[name]["mantissa"].any(), name
        else:
            assert_bitwise(param, exact, name)
    assert halves >= 7


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
        for row, grad in zip(rows, grads.double()):
            dense_second[row] += grad.square().mean()
            dense[row] -= 0.1 * grad / (dense_second[row] + floor ** 2).sqrt()
        torch.testing.assert_close(table.double(), dense, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(second.double(), dense_second, atol=1e-6, rtol=1e-6)
        untouched = ~torch.isin(torch.arange(count), rows)
        assert_bitwise(table[untouched], before[0][untouched])
        assert_bitwise(second[untouched], before[1][untouched])


def test_adagrad_takes_no_rows_and_rows_without_gradient():
    table, second = torch.ones(8, 2), torch.zeros(8)
    adagrad_rows_update(table, second, torch.empty(0, dtype=torch.int64), torch.empty(0, 2), lr=0.5, floor=1e-6)
    adagrad_rows_update(table, second, torch.tensor([3, 5]), torch.tensor([[0.0, 0.0], [4.0, 0.0]]), 0.5, 1e-6)
    assert_bitwise(table[[0, 3]], torch.ones(2, 2))  # stays finite
    assert second.tolist() == [0, 0, 0, 0, 0, 8, 0, 0]
    torch.testing.assert_close(table[5], torch.tensor([1 - 0.5 * 2 ** 0.5, 1.0]))


# ----- the rule table

CONFIGS = {"tiny": {}, "no table": NO_TABLE, "untied later": {"untie_at": 0.5},
           "no value embeddings": {"value_embedding_layers": ()},
           "one layer": {"num_layers": 1, "long_layers": ()}}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_parameter_has_one_rule(config):
    trainer = make_trainer(random_weights=False, **CONFIGS[config])
    optimizer, names = trainer.optimizer, {name for name, _ in trainer.model.named_parameters()}
    assert [group.name for group in optimizer.groups] == ["small", "embeddings", "ngram_table", "matrices"]
    groups = {group.name: list(group.layouts) for group in optimizer.groups if hasattr(group, "layouts")}
    assert sorted(name for group in groups.values() for name in group) == sorted(names) == sorted(optimizer.layouts)
    for group, members in groups.items():
        assert all(RULES[name].group == group for name in members)
    assert all(state_of(optimizer)[name] for name in names)  # and state of its own


@pytest.mark.parametrize("rule", [None, Rule("matrixes"), Rule("ngram_table")], ids=str)
def test_a_parameter_without_a_rule_or_a_group_is_refused(rule, monkeypatch):
    model = GPT(tiny_config(), "sdpa")
    model.stranger = nn.Parameter(torch.zeros(3))
    if rule:
        monkeypatch.setitem(RULES, "stranger", rule)
    with pytest.raises(ConfigError, match="stranger.*RULES.*small, embeddings, matrices"):
        optimizer_of(tiny_config(), model)
    monkeypatch.setitem(RULES, "stranger", Rule("small"))
    assert "stranger" in optimizer_of(tiny_config(), model).layouts


def test_an_unknown_rule_of_the_matrices_is_refused():
    with pytest.raises(ConfigError, match="matrix_update=sopa: must be one of .*soap"):
        optimizer_of(tiny_config(matrix_update="sopa"))


def test_every_parameter_moves_at_its_own_rate():
    trainer = make_trainer(random_weights=False, **NO_TABLE, value_embedding_layers=(0, 1))
    layouts = trainer.optimizer.layouts
    before = {name: layout.param.detach().clone() for name, layout in layouts.items()}
    trainer.optimizer.accumulate({name: torch.ones_like(layout.param) for name, layout in layouts.items()})
    trainer.optimizer.step(0, 0.5)
    for name, layout in layouts.items():
        moved = before[name] - layout.param.detach()
        if RULES[name].group == "matrices":
            assert moved.any()
        else:  # the first step of Adam is the learning rate
            expected = torch.full_like(moved, 0.5 * trainer.config.adam_lr * RULES[name].lr_mul)
            torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-3)
        assert layout.fresh


def test_gradients_of_micro_batches_add_up():
    optimizer = make_trainer(random_weights=False).optimizer
    parts = [normal(257, 32, seed=seed) for seed in range(3)]
    for part in parts:
        optimizer.accumulate({"embed": part, "head": None})
    torch.testing.assert_close(waiting(optimizer.layouts["embed"]), sum(parts))
    assert not waiting(optimizer.layouts["head"]).any()


def test_the_first_gradient_of_a_step_overwrites_the_last_steps_sum():
    """Also where a parameter has none in one step: neither its old gradient nor anything else takes its place."""
    def weights(per_step, stale):
        optimizer = optimizer_of(tiny_config(steps=4, **NO_TABLE))
        for step, grads in enumerate(per_step):
            for grad in grads:
                optimizer.accumulate({"head": grad, "embed": normal(257, 32)})
            if stale and step:  # what a step has used may hold anything
                assert not grads or torch.equal(optimizer.layouts["head"].grad, sum(grads))
            optimizer.step(step, 1.0)
            if stale:
                optimizer.layouts["head"].grad.fill_(float("nan"))
        return optimizer.layouts["head"].param.detach()
    steps = [[normal(257, 32, seed=seed) for seed in seeds] for seeds in ((1, 2), (3,), (), (4, 5))]
    none = [grads or [torch.zeros(257, 32)] for grads in steps]
    assert_bitwise(weights(steps, stale=True), weights(none, stale=False))


# ----- Adam parameters that step every k-th step

def adam_only(steps, every, grads, names=("embed", "smear_scale")):
    """Values of `names` after each of `steps` steps on per-step gradients {name: [tensor, ...]}."""
    optimizer = optimizer_of(tiny_config(steps=steps, adam_every=every, cooldown=0.0, **NO_TABLE))
    history = []
    for step in range(steps):
        optimizer.accumulate({name: grads[name][step] for name in names})
        optimizer.step(step, 1.0)
        history.append({name: optimizer.layouts[name].param.detach().clone() for name in names})
    return history


def test_adam_every_steps_on_the_mean_gradient():
    shapes = {"embed": (257, 32), "smear_scale": (1,)}
    grads = {name: [normal(*shape, seed=step) for step in range(6)] for name, shape in shapes.items()}
    means = {name: [sum(values[:3]) / 3, sum(values[3:]) / 3] for name, values in grads.items()}
    delayed, direct = adam_only(6, 3, grads), adam_only(2, 1, means)
    torch.testing.assert_close(delayed[2], direct[0])
    torch.testing.assert_close(delayed[5], direct[1])
    for step in (3, 4):
        assert_bitwise(delayed[step], delayed[2])


def test_the_last_step_takes_the_mean_of_what_is_left():
    shapes = {"embed": (257, 32), "smear_scale": (1,)}
    grads = {name: [normal(*shape, seed=step) for step in range(4)] for name, shape in shapes.items()}
    means = {name: [sum(values[:3]) / 3, values[3]] for name, values in grads.items()}
    delayed, direct = adam_only(4, 3, grads), adam_only(2, 1, means)
    torch.testing.assert_close(delayed[3], direct[1])


def test_muon_does_not_wait_for_adam():
    optimizer = optimizer_of(tiny_config(steps=6, adam_every=3, **NO_TABLE))
    layout = optimizer.layouts["mlp"]
    for step in range(3):
        before = layout.param.detach().clone()
        optimizer.accumulate({"mlp": normal(4, 64, 32, seed=step)})
        optimizer.step(step, 1.0)
        assert not torch.equal(before, layout.param)
        assert layout.fresh


# ----- a track's own rules; rates by matrix

def test_a_tracks_rules_are_of_the_same_parameters_and_groups():
    for track, rules in train_gpt.TRACK_RULES.items():
        assert track in train_gpt.TRACKS
        for name, rule in rules.items():
            assert rule.group == RULES[name].group and all(0 <= beta < 1 for beta in rule.betas)


def test_a_tracks_rules_take_the_place_of_others():
    layouts = {track: optimizer_of(tiny_config(track=track)).layouts for track in ("nano", "fineweb")}
    for name in layouts["nano"]:
        assert layouts["nano"][name].rule == RULES[name]
        assert layouts["fineweb"][name].rule == train_gpt.TRACK_RULES["fineweb"].get(name, RULES[name])


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_matrices_of_a_bank_may_have_rates_of_their_own(rule, monkeypatch):
    """Up and down projections of the MLPs alternate. Of two steps each matrix moves as in a bank at its own rate."""
    def moved(lr_mul):
        monkeypatch.setitem(RULES, "mlp", RULES["mlp"]._replace(lr_mul=lr_mul))
        optimizer = optimizer_of(tiny_config(num_layers=3, steps=4, matrix_update=rule, **NO_TABLE))
        for step in range(2):
            optimizer.accumulate({"mlp": normal(6, 64, 32, seed=step)})
            optimizer.step(step, 0.7)
        return optimizer.layouts["mlp"].param.detach()
    mixed, slow, fast = moved((1.0, 2.0)), moved(1.0), moved(2.0)
    torch.testing.assert_close(mixed[0::2], slow[0::2])
    torch.testing.assert_close(mixed[1::2], fast[1::2])
    assert not torch.equal(slow, fast)


# ----- compiled updates

def stepped_by(step, shapes, rule, hypers):
    """Weights and states that some steps of one parameter leave, its gradients drawn."""
    weight, state = normal(*shapes["weight"]).bfloat16(), {key: torch.zeros(shape) for key, shape in shapes.items()}
    del state["weight"]
    state["mantissa"] = torch.zeros(shapes["weight"], dtype=torch.int16)
    for number, numbers in enumerate(hypers):
        step(rule, weight, normal(*shapes["weight"], seed=number + 1), 2, state, numbers)
    return {"weight": join_mantissa(weight, state.pop("mantissa")), **state}


COMPILED = {
    "adam": (adam_update, {"weight": (6, 8), "first": (6, 8), "second": (6, 8)}),
    "muon": (muon_update, {"weight": (4, 12, 8), "momentum": (4, 12, 8), "second": (4, 12, 1)}),
    "soap": (train_gpt.soap_update, {"weight": (2, 8, 8), "momentum": (2, 8, 8), "moment": (2, 8, 8),
                                     "count": (2, 1, 1)}),
}


@pytest.mark.parametrize("rule", COMPILED)
def test_compiled_updates_are_the_plain_ones_in_one_graph(rule, monkeypatch):
    """Traced as torch.compile does for a GPU, and executed by torch's own operations. Numbers that change from step to
    step do not compile again, among them rates by matrix; nor does a parameter of the same shape."""
    traced = []
    def count(graph, example):
        traced.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiler(
        function, dynamic=dynamic, fullgraph=True, backend=count))
    update, shapes = COMPILED[rule]
    hypers = [hyper(number, 0.01 * number, 0.1, 0.8 + 0.01 * number) for number in range(1, 5)]
    by_matrix = [numbers._replace(lr=torch.tensor([1.0, 2.0] * (len(normal(*shapes["weight"])) // 2)).view(
        -1, *[1] * (len(shapes["weight"]) - 1)) * numbers.lr) for numbers in hypers]
    for numbers in (hypers, by_matrix):
        torch._dynamo.reset()
        traced.clear()
        compiled = train_gpt.compiled_updates()
        for _ in range(2):
            found = stepped_by(compiled, shapes, update, numbers)
        assert len(traced) == 1
        for key, value in stepped_by(train_gpt.take_step, shapes, update, numbers).items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)


def test_updates_are_compiled_on_cuda_alone(monkeypatch):
    monkeypatch.setattr(train_gpt, "compiled_updates", lambda: "compiled")
    for device, compile, expected in (("cpu", True, train_gpt.take_step), ("cuda", False, train_gpt.take_step),
                                      ("cuda", True, "compiled")):
        runtime = Runtime("cpu")
        runtime.device = SimpleNamespace(type=device)
        group = train_gpt.ParameterGroup("matrices", tiny_config(compile=compile), {}, runtime)
        assert group.take_step == expected


# ----- the head, which is the embedding too until it is untied

def test_untying_begins_a_cycle_of_adam():
    for steps in (8, 20, 21):
        for every in (1, 2, 3, 5):
            for fraction in (0.0, 0.1, 0.25, 0.5, 2 / 3, 1.0):
                config = tiny_config(steps=steps, adam_every=every, untie_at=fraction)
                asked, given = round(fraction * steps), untie_step(config)
                assert given % every == 0 and asked <= given < asked + every
                tied = [train_gpt.phase_at(config, step).tied for step in range(steps)]
                assert tied == [step < given for step in range(steps)]
                assert train_gpt.is_tied_before(config, given) == (given > 0)  # the last step left one model behind
                assert not train_gpt.is_tied_before(config, given + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_untying_inside_a_cycle_is_torchs_adam_on_one_table_then_on_two(dtype):
    """Every third step; four steps in, the head is to be untied, so that it is at six. The reference knows a table, and
    from then on its copy with the table's moments. Both see means of whole cycles."""
    config = tiny_config(steps=12, adam_every=3, untie_at=4 / 12, **NO_TABLE, dtype=dtype)
    model = GPT(config, "sdpa")
    optimizer = optimizer_of(config, model)
    assert torch.equal(model.embed, model.head)
    rates = {name: config.adam_lr * RULES[name].lr_mul for name in ("embed", "head")}
    head = nn.Parameter(model.head.detach().double())
    adam = {"head": torch.optim.AdamW([head], rates["head"], RULES["head"].betas, eps=1e-10, weight_decay=0.0)}
    tables = {"head": head}
    for step in range(12):
        if step == untie_step(config):
            optimizer.untie()
        if step == 6:
            tables["embed"] = nn.Parameter(head.detach().clone())
            adam["embed"] = torch.optim.AdamW([tables["embed"]], rates["embed"], RULES["embed"].betas, eps=1e-10,
                                              weight_decay=0.0)
            adam["embed"].state[tables["embed"]] = copy.deepcopy(adam["head"].state[head])
        # Until it is untied the embedding has no gradient: the head's is the sum over both its uses.
        grads = {name: draw(step, len(name), model.head.shape) for name in tables}
        optimizer.accumulate({"embed": None, **grads})
        for name, grad in grads.items():
            so_far = tables[name].grad if tables[name].grad is not None else 0
            tables[name].grad = so_far + grad.double() / 3
        optimizer.step(step, 1.0)
        if step % 3 == 2:
            for rule in adam.values():
                rule.step()
                rule.zero_grad()
        for name, table in tables.items():
            param, state = optimizer.layouts[name].param.data, state_of(optimizer)[name]
            exact = join_mantissa(param, state["mantissa"]) if dtype == "bfloat16" else param
            torch.testing.assert_close(exact.double(), table.data, atol=1e-6, rtol=1e-5)
    assert not torch.equal(model.embed, model.head)


def test_untying_inside_a_cycle_is_untying_at_its_end():
    """A whole model: what the fraction says inside a cycle makes no difference to any weight, unlike the next cycle."""
    def weights(untie_at):
        trainer = make_trainer(random_weights=False, steps=8, adam_every=2, untie_at=untie_at, **NO_TABLE)
        for step in range(8):
            trainer.step(step, batch_of(trainer, np.arange(300) % 37))
        return {name: param.detach() for name, param in trainer.model.named_parameters()}
    inside, end, later = weights(3 / 8), weights(4 / 8), weights(6 / 8)
    assert_bitwise(inside, end)
    assert not torch.equal(inside["embed"], later["embed"]) and not torch.equal(inside["head"], inside["embed"])


def test_the_trainer_unties_ahead_of_the_steps_gradients():
    trainer = make_trainer(random_weights=False, steps=8, untie_at=0.5, **NO_TABLE)
    embed, head = trainer.model.embed, trainer.model.head
    layout, start = trainer.optimizer.layouts["embed"], embed.detach().clone()
    for step in range(5):
        trainer.accumulate(step, batch_of(trainer, np.arange(300) % 37))
        assert torch.equal(embed, head if step == 4 else start) and waiting(layout).any() == (step == 4)
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
        optimizer.step(step, 1.0)
    assert_bitwise(embed, before)
    assert list(state) == ["first", "second"] and all((value == 1.0).all() for value in state.values())
    assert not torch.equal(head, before)


# ----- shares

@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_shares_cover_every_unit_once(world_size):
    for count in range(12):
        bounds = [Runtime.share(rank, count) for rank in ranks(world_size)]
        assert [unit for low, high in bounds for unit in range(low, high)] == list(range(count))
        chunk = -(-count // world_size)  # what the collectives give each rank
        for rank, (low, high) in enumerate(bounds):
            assert low == min(rank * chunk, count) and high - low <= chunk
