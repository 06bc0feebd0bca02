"""Go on with a trained model in a second domain, and keep what it knows of the first: the track `continual`.

    python continual.py --init-from RUN [--key value ...]   RUN: a run under logs/, or a checkpoint file
    python continual.py --init-from RUN --check             everything but the steps: would this run start?
    python continual.py --resume RUN                        go on with a run of this track
    torchrun --nproc_per_node=8 continual.py ...            on several processes, as train_gpt.py

OSFT (Nayak et al. 2025): what a matrix knows is in its top singular directions, and a new domain may have the rest.
The paper trains factors of the rest. What these can reach is the initial matrix plus any update whose rows and columns
are orthogonal to the frozen directions. So here matrices stay dense and every update is projected, weight decay
included, whatever the rule that made it. Projecting gradients instead would not do: Adam's scaling turns a step back.
"""
import dataclasses
import sys
from dataclasses import dataclass

import torch

import train_gpt
from train_gpt import Config, ConfigError, choice, knob, refuse


def frozen_count(rank, ratio):
    """How many of `rank` directions stay frozen; int(rank * (1 - ratio)) would lose one to the binary value of 0.9."""
    return rank - round(rank * ratio)


@dataclass(frozen=True)
class ContinualConfig(Config):
    """A run that starts from the weights of another one."""
    init_from: str = knob("", "run id, or checkpoint file, whose weights and n-gram table the run starts from")
    first_data: str = knob("data/python", "corpus that its model has learned, validated on as well; empty: none")
    unfreeze_rank_ratio: float = knob(0.5, "share of a hidden matrix' singular directions that may move; 1: all of it",
                                      lambda ratio: 0 < ratio <= 1, "a share above 0 and at most 1, which is all of it")
    trained: str = choice("matrices", "all", help="what steps change; matrices are the banks attention and mlp")

    def __post_init__(self):
        super().__post_init__()
        refuse(self.trained == "matrices" and self.ngram_lr, f"ngram_lr={self.ngram_lr}: trained=matrices freezes the "
               f"n-gram table, too; use --ngram-lr 0, or --trained all")
        ratio = self.unfreeze_rank_ratio
        for rank in (self.model_dim, min(self.model_dim, self.mlp_dim)):
            refuse(ratio < 1 and not 0 < frozen_count(rank, ratio) < rank, f"unfreeze_rank_ratio={ratio}: rounds to "
                   f"{round(ratio * rank)} of a matrix' {rank} directions that may move; at 0 nothing learns, and at "
                   f"{rank} nothing is protected: say 1 if that is meant")


# The nano track's model goes on to C++. The n-gram table is frozen, in baselines too: it holds 99 % of the parameters,
# has no directions to protect, and would learn much of C++ in rows of its own, whatever the matrices do. Nor does the
# checkpoint's index read C++.
train_gpt.TRACKS["continual"] = ContinualConfig(
    track="continual", data="data/cpp", steps=300, matrix_lr=0.01, adam_lr=0.003, ngram_lr=0.0, index_share=0.0,
    val_tokens=524_288, val_sha256="5a9f95f8cf4677aa06071e6ba095f25381ac7da5fcaf84fb938244026e0cf2be", val_every=100,
    target_loss=0.0)


# ----- frozen directions

def frozen_directions(matrices, count):
    """The top `count` singular directions of matrices (k, m, n), float32: left (k, m, count), right (k, count, n)."""
    left, _, right = torch.linalg.svd(matrices.float(), full_matrices=False)
    return left[..., :count].contiguous(), right[:, :count].contiguous()


def project_update(update, left, right):
    """Take what touches frozen directions out of updates (k, m, n) float32, in place: leftᵀ update = 0, update rightᵀ
    = 0. Neither (m, m) nor (n, n) matrices are formed."""
    update.baddbmm_(left, left.mT @ update, alpha=-1)
    return update.baddbmm_(update @ right.mT, right, alpha=-1)


def protect(matrices, initial, ratio):
    """Make the group `matrices` project all updates off the top directions of the weights `initial`, {bank: tensor},
    from which it may have moved on, though not along these. A rank splits the matrices that it owns, so nothing
    travels. Returns how many directions are frozen, as text."""
    rule, factors, counts = matrices.rule, {}, []
    for name, layout in matrices.layouts.items():
        start = layout.own(initial[name].to(layout.param.data)).float()  # as this run's type rounds it
        rank = min(start.shape[1:])
        count = frozen_count(rank, ratio)
        factors[name] = left, _ = frozen_directions(start, count)
        counts.append(f"{name}={count}/{rank}")
        now, state = layout.own(layout.param.data), matrices.state[name]
        now = train_gpt.join_mantissa(now, state["mantissa"]) if "mantissa" in state else now
        refuse((left.mT @ (now - start)).norm() > 1e-3 * (left.mT @ start).norm(), f"{name}: the run started from "
               f"another checkpoint than --init-from names now; put that one back")
    def projected_update(weight, grad, state, hyper):
        name, before = next(name for name, own in matrices.state.items() if own is state), weight.clone()
        rule.update(weight, grad, state, hyper)
        weight.copy_(before + project_update(weight - before, *factors[name]))
    matrices.rule = rule._replace(update=projected_update)
    return " ".join(counts)


# ----- a run's start

def initial_checkpoint(config):
    """The content of --init-from. Raises ConfigError where it is missing or does not fit."""
    refuse(not config.init_from, f"track {config.track}: goes on with a trained model; name its run or checkpoint with "
           f"--init-from (`./run.sh nano --run-id NAME` trains one)")
    def shape(config, step):  # what weights mean nothing without
        names = ("tokenizer", "model_dim", "num_layers", "head_dim", "mlp_dim", "long_layers", "value_embedding_layers",
                 "logit_cap", "ngram_orders", "ngram_rows", "copy_orders", "copy_places", "index_orders", "index_bits")
        return {**{name: getattr(config, name) for name in names}, "untie_at": train_gpt.is_tied_before(config, step),
                "windows": (train_gpt.at_step(config.windows, step, config), train_gpt.windows_until(config, step))}
    content = train_gpt.open_checkpoint(config.init_from, "init-from")
    saved, here = train_gpt.config_of_checkpoint(content), shape(config, 0)
    for name, value in shape(saved, content["step"]).items():
        refuse(value != here[name], f"--init-from {config.init_from}: a checkpoint of track {saved.track}, with {name}="
               f"{value} where this run has {here[name]}; choose one of its shape, or override --{name}")
    return content


def validation_tokens(config, data):
    """The validation tokens of a corpus, whose training shards need not hold all that the run takes."""
    return train_gpt.open_corpus(dataclasses.replace(config, data=data, steps=1, index_orders=()))[-1]


def train_matrices_alone(trainer):
    """Freeze all groups but the hidden matrices."""
    matrices = trainer.optimizer.matrices
    for group in trainer.optimizer.groups:
        group.frozen = group is not matrices
    for name, param in trainer.model.named_parameters():
        param.requires_grad_(name in matrices.layouts)


def extend(config):
    """Look at what the run starts from. Returns the trainer's hook, which prepares the run before its warm-up. Nothing
    of it is in the run's own checkpoints: when resumed, it works the directions out again from the same weights."""
    refuse(not isinstance(config, ContinualConfig),
           f"track {config.track}: continual.py runs the track continual; use train_gpt.py")
    initial = initial_checkpoint(config)
    try:
        vals = {"first_val_loss": validation_tokens(config, config.first_data)} if config.first_data else {}
    except ConfigError as error:  # it names the key of the other corpus
        raise ConfigError(str(error).replace("--data", "--first-data")) from None
    def hook(run):
        trainer, started = run.trainer, run.step == 0  # else it is resumed, and has its weights
        run.vals.update(vals)
        if started:  # all optimizer state stays zero
            table = initial["groups"][trainer.table.name]
            trainer.model.load_state_dict(initial["model"])
            trainer.table.load({**table, "second": torch.zeros_like(table["second"])})
        if config.trained == "matrices":
            train_matrices_alone(trainer)
        frozen = (protect(trainer.optimizer.matrices, initial["model"], config.unfreeze_rank_ratio)
                  if config.unfreeze_rank_ratio < 1 else "none")
        if started:
            run.log.line(f"started_from:{config.init_from} step:{initial['step']} frozen: {frozen}")
            if config.val_every and not run.check:
                run.validate()
        initial.clear()  # the trainer keeps its hook, and a table is large
    return hook


def main(argv=None):
    """Returns the exit status of train_gpt.main."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(argv):
        print(__doc__)
    resumed = any(word.partition("=")[0] == "--resume" for word in argv)
    return train_gpt.main(argv if resumed else ["--track", "continual", *argv], extend)


if __name__ == "__main__":
    sys.exit(main())
