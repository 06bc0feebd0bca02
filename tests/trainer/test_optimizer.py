"""Update rules against torch and slow float64 references; the rules of parameters; whole steps."""

import copy
import importlib.util
import re
import shutil

import numpy as np
import optimizer_cases as cases
import pytest
import torch
from torch import nn

import helpers
import train_gpt

# ----- Adam


@pytest.mark.parametrize(
    "shape, betas, decay",
    [
        ((7,), (0.0, 0.5), 0.0),
        ((5, 7), (0.9, 0.95), 0.0),
        ((5, 7), (0.8, 0.999), 10.0),
        ((3, 5, 7), (0.9, 0.95), 10.0),
    ],
    ids=str,
)
def test_adam_is_torchs_but_for_its_decay_and_for_rounding(shape, betas, decay):
    """Values stay whose gradients are rounding: tiny beside the others of a vector, of a row of an
    embedding, of a matrix of a bank."""
    weight = cases.normal(*shape).double()
    still = weight[..., 0].clone()
    state = {key: torch.zeros_like(weight) for key in ("first", "second")}
    param = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([param], 0.01, betas, eps=0.0, weight_decay=0)
    scale = 10.0 ** (-3 * torch.arange(len(weight) if len(shape) > 1 else 1))
    for step in range(1, 9):
        lr = 0.01 * step
        grad = cases.normal(*shape, seed=step).double() * 10.0 ** (2 * step - 12)
        grad *= scale.view(-1, *[1] * (len(shape) - 1))
        grad[..., 0] *= 1e-8
        param.grad = grad.clone()
        reference.param_groups[0]["lr"] = lr
        cases.torch_step(reference, decay)
        param.data[..., 0] = still
        train_gpt.adam_update(weight, grad, state, cases.hyper(step, lr, decay, betas=betas))
        torch.testing.assert_close(weight, param.data, rtol=1e-12, atol=1e-12)


def losses_of_steps(together, **changes):
    """Losses of 20 steps of eight micro-batches each, of which a pass reads so many."""
    sizes = {"steps": 20, "micro_batch_tokens": 64}
    trainer = helpers.make_trainer(random_weights=False, **sizes, **changes)
    text = helpers.byte_documents(20 * 512 + 1)
    losses = []
    for step in range(20):
        texts = [text[low : low + 65] for low in range(512 * step, 512 * (step + 1), 64)]
        batch = cases.batch_of(trainer, *texts, together=together)
        losses.append(trainer.step(step, batch).item() / batch.tokens)
    return losses


NO_COPIES = {"copy_orders": ()}


@pytest.mark.parametrize(
    "changes", [{}, NO_COPIES, {"ngram_orders": ()}, helpers.NO_TABLE], ids=str
)
def test_no_step_is_made_of_rounding(changes):
    """At the start the first gradients of some scales are zero but for rounding, so that the order
    of sums decides on their signs."""
    losses = losses_of_steps(1, **changes)
    assert losses[-1] < losses[0] - 2
    assert losses_of_steps(8, **changes) == pytest.approx(losses, abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler of torch needs one of C++")
def test_compiled_code_takes_the_same_steps():
    losses = losses_of_steps(8, compile=True)
    assert losses == pytest.approx(losses_of_steps(8), abs=1e-4)


# ----- Muon


def test_the_polynomials_bring_singular_values_near_1():
    values = cases.composed_polynomials(np.geomspace(1e-3, 1 / 1.02, 100_000))
    assert values.min() > 0.8 and values.max() < 1.2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows, columns", [(24, 24), (40, 16), (16, 40)])
def test_polar_express_against_the_svd(rows, columns, dtype, tolerance):
    """The same singular vectors, each value sent through the polynomials; of a matrix whose norm
    overflows NaN, since a step of zero would go unnoticed."""
    scales = torch.tensor([1e-6, 1.0, 1e4, 0.0, 1e30])
    matrices = cases.normal(5, rows, columns) * scales[:, None, None]
    out = train_gpt.polar_express(matrices, dtype)
    assert out.dtype == torch.float32
    for matrix, polar in zip(matrices[:3].double(), out[:3].double(), strict=True):
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
        wanted = cases.composed_polynomials(values / (values.norm() * 1.02))
        assert (polar - (u * wanted) @ vt).norm() <= tolerance * wanted.norm()
    assert not out[3].any() and out[4].isnan().all()


# ----- the rules of parameters


def test_every_parameter_moves_at_its_own_rate():
    """A step of Adam, under which matrices step here, too, is the rate, and the decay, where
    gradients stay the same. Small parameters wait for one step."""
    changes = {"matrix_update": "adam", "embed_lr": 3.0, **helpers.LAYERED}
    optimizer = cases.optimizer_of(cases.gpt_of(**changes), **changes)
    config = optimizer.matrices.config
    params = cases.parameters_of(optimizer)
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    for step in range(2):
        before = {name: param.detach().clone() for name, param in params.items()}
        cases.take_step(optimizer, step, grads, 0.5)
        moved = {name for name, param in params.items() if param.ne(before[name]).any()}
        large = {name for name, param in params.items() if param.rule.group != "small"}
        assert moved == (large if step == 0 else {name for name in params if before[name].numel()})
    for name, param in params.items():
        lr, decay = 0.5 * config.adam_lr, 1.0
        if param.rule.group == "matrices":
            lr, decay = 0.5 * config.matrix_lr, config.matrix_decay
        decayed = lr * decay * param.rule.decay * before[name].clamp_min(0)
        expected = lr * param.rule.lr_mul * (1 + decayed)
        moved = before[name] - param.detach()
        torch.testing.assert_close(moved, expected.expand_as(moved), atol=1e-6, rtol=2e-3)
    for name, rate in {
        "embed": 3 * config.adam_lr,
        "head": 3 * config.adam_lr,
        "blocks.0.output_scale": 2 * config.matrix_lr,
    }.items():
        assert params[name].rule.lr_mul * config.adam_lr == pytest.approx(rate)


def test_bfloat16_training_is_float32_training_bitwise():
    """Through untying and the mean of the last weights: masters are float32."""
    changes = {"dtype": "bfloat16", "untie_at": 0.5, "mean_share": 0.5, "steps": 6}
    narrow = cases.optimizer_of(cases.gpt_of(**changes), **changes)
    wide = cases.optimizer_of(cases.gpt_of(**changes).float(), **changes)
    for step in range(6):
        # Whole numbers, whose sums are exact in both types.
        grads = {
            name: (4 * cases.normal(*param.shape, seed=step)).round()
            for name, param in cases.params_of(narrow).items()
        }
        for optimizer in (narrow, wide):
            cases.take_step(optimizer, step, grads, lr_mul=0.7)
    exact = cases.params_of(wide)
    for name, param in cases.params_of(narrow).items():
        helpers.assert_bitwise(param, exact[name].to(param.dtype), name)
    masters = {name: state["master"] for name, state in cases.state_of(narrow).items()}
    exact = {}
    for group in wide.parameter_groups:
        exact.update({name: param.data for name, param in group.params.items()})
    helpers.assert_bitwise(masters, exact)
    assert len(masters) == 7 and not torch.equal(exact["mlp"].bfloat16().float(), exact["mlp"])


def test_moments_are_of_sums_over_the_tokens_of_a_cycle():
    """Adam waits for the second step of its cycle."""
    changes = {"steps": 8, "adam_every": 2}
    optimizer = cases.optimizer_of(cases.gpt_of(**changes), **changes)
    first, grads = torch.zeros(257, 32), cases.normal(4, 257, 32)
    for step in range(4):
        cases.add(optimizer, {"embed": grads[step] / 2})
        cases.take_step(optimizer, step, {"embed": grads[step] / 2})
        if step % 2:
            first.lerp_(grads[step - 1] + grads[step], 1 - cases.RULES["embed"].betas[0])
        torch.testing.assert_close(cases.state_of(optimizer)["embed"]["first"], first)


# ----- whole steps


@pytest.mark.parametrize("rule", train_gpt.UPDATE_RULES)
def test_compiled_updates_are_the_plain_ones_in_one_graph(rule, monkeypatch):
    """Traced as torch.compile does for a GPU, and executed by torch's own operations. Schedules
    compile nothing again; nor does a parameter of the same shape."""
    traced = []

    def count(graph, example):
        traced.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    options = {"fullgraph": True, "backend": count}
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *words, **more: compiler(*words, **more, **options)
    )
    torch._dynamo.reset()
    banks = {"query_key": (4, 8, 8), "mlp": (4, 8, 8), "embed": (6, 8), "head": (6, 8)}
    runtime = train_gpt.Runtime("cpu")
    plain, compiled = (
        cases.optimizer_of(cases.Weights({**cases.SMALL, **banks}), runtime, matrix_update=rule)
        for _ in range(2)
    )
    for group in compiled.parameter_groups:
        group.take_step = train_gpt.compiled_updates()
    for step in range(4):
        for optimizer in (plain, compiled):
            cases.step_of_ranks(optimizer, step, runtime)
    assert len(traced) == 3  # of matrices, of embeddings, and of the small ones
    found = (cases.params_of(optimizer) for optimizer in (compiled, plain))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_untying_inside_a_cycle_is_torchs_adam_on_one_table_then_on_two():
    """Every third step, and at the end on what is left; four steps in, the head is to be untied, so
    that it is at six.

    The reference knows a table, which has the gradients of both its uses, and from then on its
    copy with the table's moments. Both see sums over whole cycles.
    """
    changes = {"steps": 13, "adam_every": 3, "untie_at": 4 / 13}
    model = cases.gpt_of(**changes)
    optimizer = cases.optimizer_of(model, **changes)
    rule = model.head.rule
    lr = rule.lr_mul * helpers.tiny_config().adam_lr
    head = nn.Parameter(model.head.detach().double())
    reference = torch.optim.AdamW([head], lr, rule.betas, 1e-12, weight_decay=0)
    tables = {"head": head, "embed": head}
    for step in range(13):
        if step == 6:
            tables["embed"] = nn.Parameter(head.detach().clone())
            reference.add_param_group({"params": [tables["embed"]]})
            reference.state[tables["embed"]] = copy.deepcopy(reference.state[head])
        grads = {name: cases.draw(step, len(name), head.shape) for name in tables}
        for name, grad in grads.items():
            known = tables[name].grad
            tables[name].grad = grad.double() + (0 if known is None else known)
        cases.take_step(optimizer, step, grads)
        if step % 3 == 2 or step == 12:
            cases.torch_step(reference, helpers.tiny_config().adam_lr * rule.decay)
            reference.zero_grad()
        for name, table in tables.items():
            found = getattr(model, name).double()
            torch.testing.assert_close(found, table, atol=1e-6, rtol=1e-5)
    assert not torch.equal(model.embed, model.head)


def test_weights_go_half_of_the_way_to_the_running_mean_of_the_last_ones():
    """Of the weights behind each update of the last five steps of eight; until it is asked for
    nothing changes. Adam's parameters step every other time, and at the last step."""
    changes = {"steps": 8, "adam_every": 2, **helpers.LAYERED}
    averaged, plain = (
        cases.optimizer_of(cases.gpt_of(**changes), mean_share=share, **changes)
        for share in (0.625, 0.0)
    )
    means = {}
    for step in range(8):
        for optimizer in (averaged, plain):
            params = cases.params_of(optimizer).items()
            grads = {name: cases.normal(*param.shape, seed=step) for name, param in params}
            cases.take_step(optimizer, step, grads)
        now = {name: param.double() for name, param in cases.params_of(plain).items()}
        for name, weight in now.items():
            every = 1 if train_gpt.bank_name(name) in cases.MATRICES else 2
            if step >= 3 and (step + 1) % every == 0:
                kept = (2 / 3) ** every if name in means else 0.0  # 1 - 2 / (5 + 1) a step
                means[name] = kept * means.get(name, 0.0) + (1 - kept) * weight
    helpers.assert_bitwise(cases.params_of(averaged), cases.params_of(plain))
    for optimizer in (averaged, plain):
        optimizer.take_mean()
    helpers.assert_bitwise(
        cases.params_of(plain), {name: each.float() for name, each in now.items()}
    )
    for name, param in cases.params_of(averaged).items():
        expected = (now[name] + means[name]) / 2
        torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)
        has_moved = not torch.allclose(param.double(), now[name], rtol=1e-5, atol=1e-6)
        assert has_moved == (param.numel() > 0)


def test_a_mean_of_less_than_a_step_is_of_the_last_one():
    changes = {"steps": 2, "mean_share": 0.01}
    optimizer = cases.optimizer_of(cases.gpt_of(**changes), **changes)
    for step in range(2):
        params = cases.params_of(optimizer).items()
        grads = {name: cases.normal(*param.shape, seed=step) for name, param in params}
        cases.take_step(optimizer, step, grads)
    last = {name: param.clone() for name, param in params}
    optimizer.take_mean()
    torch.testing.assert_close(cases.params_of(optimizer), last)


def test_without_its_chapter_the_rest_trains(tmp_path):
    """Two steps of Muon, bitwise those of the whole script."""
    source = helpers.TRAINER.read_text()
    (chapter,) = re.findall(r"^# 7\. SOAP =.*?(?=^# 8\. )", source, re.M | re.S)
    (tmp_path / "cut.py").write_text(source.replace(chapter, ""))
    spec = importlib.util.spec_from_file_location("cut", tmp_path / "cut.py")
    cut = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cut)
    assert list(cut.UPDATE_RULES) == ["adam", "muon"]
    ends = []
    for module in (train_gpt, cut):
        trainer = module.Trainer(helpers.tiny_config(), module.Runtime("cpu"))
        for step in range(2):
            trainer.step(step, cases.batch_of(trainer, helpers.byte_documents(300)))
        ends.append([group.tensors() for group in trainer.optimizer.groups])
    helpers.assert_bitwise(*ends)
