"""Variants of the trainer that are no setting of it, for prices.py.

VARIANTS has a function for each: it returns {name in train_gpt: what stands there instead}.
"""

import dataclasses
import math
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.common import train_gpt

# ----- optimizer


def without_normuon():
    """Muon whose step is the polar factor, rescaled in nothing."""

    def orthogonal_step(weight, direction, state, hyper):
        update = train_gpt.polar_express(direction, hyper.dtype)
        rows, columns = update.shape[-2:]
        lr = hyper.lr * max(1.0, rows / columns) ** 0.5
        train_gpt.cautious_step(weight, update, lr, hyper.decay)

    return {"orthogonal_step": orthogonal_step}


def newton_schulz():
    """The quintic of Muon's first form (Jordan et al. 2024), five times."""
    return {"POLAR_EXPRESS": ((3.4445, -4.7750, 2.0315),) * 5}


def without_adam_decay():
    adam_update = train_gpt.adam_update

    def undecayed(weight, grad, state, hyper):
        adam_update(weight, grad, state, hyper._replace(decay=0.0))

    keeps = train_gpt.UPDATE_RULES["adam"].keeps
    rule = train_gpt.UpdateRule(undecayed, keeps)
    return {"UPDATE_RULES": {**train_gpt.UPDATE_RULES, "adam": rule}}


def weights_of(trainer):
    """All parameters of the model, as plain tensors."""
    return [param.data for param in trainer.model.parameters()]


def ema_nesterov():
    """The model moves on along the running mean of its displacements before each gradient (arXiv
    2605.25395), with the horizon and the span of track 3's result 39 as shares of the run."""

    class Trainer(train_gpt.Trainer):
        displacements = None

        def step(self, step, batch, upcoming=None):
            weights = weights_of(self)
            begin = [weight.clone() for weight in weights]
            progress = step / self.config.steps
            if self.displacements is None:
                self.displacements = [torch.zeros_like(weight) for weight in weights]
            if 0.16 <= progress < 0.77:
                ahead = 0.6 * train_gpt.lr_multiplier(self.config, step)
                torch._foreach_add_(weights, self.displacements, alpha=ahead)
            loss = super().step(step, batch, upcoming)
            moved = torch._foreach_sub(weights, begin)
            kept = 0.99 ** (3125 / self.config.steps)
            torch._foreach_lerp_(self.displacements, moved, 1 - kept)
            return loss

    return {"Trainer": Trainer}


def tail_mean():
    """The mean of the weights of the last tenth of the steps is scored."""

    class Trainer(train_gpt.Trainer):
        sums = None
        count = 0

        def step(self, step, batch, upcoming=None):
            loss = super().step(step, batch, upcoming)
            if step >= int(0.9 * self.config.steps):
                self.count += 1
                weights = weights_of(self)
                self.sums = self.sums or [torch.zeros_like(weight) for weight in weights]
                torch._foreach_add_(self.sums, weights)
            return loss

        def evaluate(self, step, val):
            for weight, total in zip(weights_of(self), self.sums, strict=True):
                weight.copy_(total / self.count)
            return super().evaluate(step, val)

    return {"Trainer": Trainer}


def muon_by_heads():
    """Queries and keys of each head are a matrix of their own to Muon."""

    class GPT(train_gpt.GPT):
        def __init__(self, config, back_end):
            super().__init__(config, back_end)
            rule = self.query_key.rule
            by_head = self.query_key.data.view(-1, config.head_dim, config.model_dim)
            self.query_key = train_gpt.ruled(by_head, **dataclasses.asdict(rule))

    return {"GPT": GPT}


# ----- schedule


def power_cooldown():
    """Rates fall by the power 1.2 of what is left."""
    linear = train_gpt.lr_multiplier

    def lr_multiplier(config, step):
        peak = train_gpt.stage_at(config, step).lr_mul
        share = (linear(config, step) - config.final_lr) / (peak - config.final_lr)
        return config.final_lr + (peak - config.final_lr) * share**1.2

    return {"lr_multiplier": lr_multiplier}


def split_cooldown():
    """Matrices cool down for four fifths of the run, and what Adam steps for two fifths."""

    class ParameterGroup(train_gpt.ParameterGroup):
        def update(self, step, lr_mul, pending):
            begin = 0.2 if self.name == "matrices" else 0.6
            own = dataclasses.replace(self.config, cooldown=(begin, 1.0))
            return super().update(step, train_gpt.lr_multiplier(own, step), pending)

    return {"ParameterGroup": ParameterGroup}


# ----- loss


def cap_of_twice_the_width():
    return {"CAP_WIDTH": 2 * train_gpt.CAP_WIDTH}


# ----- model


def before_modern_arch():
    """Queries and keys as they come, GELU, and projections that do not begin at zero."""

    class GPT(train_gpt.GPT):
        def __init__(self, config, back_end):
            usual = dataclasses.replace(
                config, output_std=1.0, attention_scale=config.head_dim**-0.5
            )
            super().__init__(usual, back_end)
            generator = torch.Generator().manual_seed(config.seed)
            down = self.mlp.data[1::2]
            down.copy_(torch.randn(down.shape, generator=generator) / math.sqrt(config.mlp_dim))

    def mlp(x, up, down):
        return F.gelu(F.linear(x, up)) @ down

    rms_norm = train_gpt.norm

    def norm(x):
        is_of_heads = x.ndim == 3
        return x if is_of_heads else rms_norm(x)

    return {"GPT": GPT, "mlp": mlp, "norm": norm}


def with_frozen(name):
    """A variant whose model does not train this parameter."""

    def variant():
        class GPT(train_gpt.GPT):
            def __init__(self, config, back_end):
                super().__init__(config, back_end)
                param = getattr(self, name)
                param.rule = dataclasses.replace(param.rule, lr_mul=0.0)

        return {"GPT": GPT}

    return variant


def without_matrices(name, chosen):
    """A variant where some matrices of a bank are zero and stay it; chosen: of a Config, which."""

    def variant():
        class GPT(train_gpt.GPT):
            def __init__(self, config, back_end):
                super().__init__(config, back_end)
                bank = getattr(self, name)
                rates = torch.ones(len(bank), 1, 1) * bank.rule.lr_mul
                for number in chosen(config):
                    bank.data[number] = 0
                    rates[number] = 0
                bank.rule = dataclasses.replace(bank.rule, lr_mul=rates)

        return {"GPT": GPT}

    return variant


def output_gate():
    """A gate on what each head of each layer puts out."""

    class GatedBackEnd:
        shares = None  # (T, heads) of the layer that attends next

        def __init__(self, inner):
            self.prepare = inner.prepare
            self.inner = inner

        def attend(self, q, k, v, masks, window, scale):
            y = self.inner.attend(q, k, v, masks, window, scale)
            shares = self.shares[..., None]
            return y * (train_gpt.in_pairs(shares) if window.positions == 2 else shares)

    class GPT(train_gpt.GPT):
        def __init__(self, config, back_end):
            super().__init__(config, GatedBackEnd(back_end))
            heads = config.model_dim // config.head_dim
            zeros = torch.zeros(config.num_layers, heads, train_gpt.GATE_DIM)
            self.output_gate = train_gpt.ruled(zeros, "small")

        def attention_layer(self, x, layer, *others):
            self.back_end.shares = train_gpt.gate(train_gpt.norm(x), self.output_gate[layer])
            return super().attention_layer(x, layer, *others)

    return {"GPT": GPT}


def without_smear():
    class GPT(train_gpt.GPT):
        def embedding(self, micro_batch, is_first, is_tied):
            table = self.head if is_tied else self.embed
            return train_gpt.norm(F.embedding(micro_batch.inputs, table))

    return {"GPT": GPT}


def normalised_value_embeddings():
    class GPT(train_gpt.GPT):
        def attention_layer(self, x, layer, weights, values, *others):
            embedding, mixture = values
            if embedding is not None:
                embedding = train_gpt.norm(embedding)
            return super().attention_layer(x, layer, weights, (embedding, mixture), *others)

    return {"GPT": GPT}


def large_value_embeddings():
    class GPT(train_gpt.GPT):
        def __init__(self, config, back_end):
            super().__init__(config, back_end)
            self.value_embed.data.mul_(2)

    return {"GPT": GPT}


def whole_keys_shifted():
    def shifted(k, is_first):
        return F.pad(k, (0, 0, 0, 0, 1, -1)).masked_fill(is_first[:, None, None], 0)

    return {"shifted": shifted}


def fast_rotation():
    """Channel pairs rotate at pi to pi/1024 radians a token."""
    linspace = torch.linspace

    def fast(*bounds, **options):
        return linspace(*bounds, **options) + math.log(math.pi) / math.log(1 / 1024)

    rotary_tables = train_gpt.rotary_tables

    def with_fast(*arguments):
        with mock.patch.object(torch, "linspace", fast):
            return rotary_tables(*arguments)

    return {"rotary_tables": with_fast}


VARIANTS = {
    "without_normuon": without_normuon,
    "newton_schulz": newton_schulz,
    "without_adam_decay": without_adam_decay,
    "ema_nesterov": ema_nesterov,
    "tail_mean": tail_mean,
    "muon_by_heads": muon_by_heads,
    "power_cooldown": power_cooldown,
    "split_cooldown": split_cooldown,
    "cap_of_twice_the_width": cap_of_twice_the_width,
    "before_modern_arch": before_modern_arch,
    "without_embedding_in_layers": with_frozen("embed_scale"),
    "without_value_gates": with_frozen("value_gate"),
    "without_first_mlp": without_matrices("mlp", lambda config: (0, 1)),
    "without_values": without_matrices(
        "value_output",
        lambda config: [2 * layer for layer in config.value_embedding_layers],
    ),
    "output_gate": output_gate,
    "without_smear": without_smear,
    "normalised_value_embeddings": normalised_value_embeddings,
    "large_value_embeddings": large_value_embeddings,
    "whole_keys_shifted": whole_keys_shifted,
    "fast_rotation": fast_rotation,
}
