"""Go on with a trained model in a second domain, and keep what it knows of the first.

    python continual.py --init-from RUN [--key value ...]   RUN: a run, or a checkpoint file
    python continual.py --resume RUN                        go on with a run of this track
    torchrun --nproc_per_node=8 continual.py ...            on several processes, as train_gpt.py

It adds the track `continual`. The method is OSFT (Nayak et al. 2025): what a matrix knows is in its
top singular directions, and a new domain may have the rest. The paper trains factors of the rest.
What these can reach is the initial matrix plus any update whose rows and columns are orthogonal to
the frozen directions. So here matrices stay dense and every update is projected, weight decay
included, whatever the rule that made it. Projecting gradients instead would not do: Adam's scaling
turns a step back.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass

import train_gpt  # first: it says what is missing

# isort: split
import torch

from train_gpt import Config, ConfigError, knob, require


def frozen_count(rank, ratio):
    """How many of a matrix' `rank` directions stay frozen where a share of them may move."""
    # int(rank * (1 - ratio)) would lose one to the binary value of 0.9.
    return rank - round(rank * ratio)


@dataclass(frozen=True, kw_only=True)
class ContinualConfig(Config):
    """A run that starts from the weights of another one."""

    init_from: str = knob("", "run id, or checkpoint file, whose weights and table it starts from")
    first_data: str = knob("", "corpus learned before, validated on, too; empty: as its run had it")
    unfreeze_rank_ratio: float = knob(0.5, "share of directions that may move; 1: all", 0, 1)
    trained: str = knob(
        "matrices",
        "matrices | all: what steps change; matrices are those of attention and MLPs",
        form="matrices|all",
    )

    def __post_init__(self):
        super().__post_init__()
        require(
            self.trained == "all" or not self.ngram_lr,
            f"ngram_lr={self.ngram_lr}: trained=matrices freezes the table, too; use --ngram-lr 0, "
            "or --trained all",
        )
        ratio = self.unfreeze_rank_ratio
        heads = self.model_dim // self.head_dim
        query_rows = self.model_dim if heads % 2 else 2 * self.head_dim  # of a matrix of q or k
        for rank in (self.model_dim, query_rows, min(self.model_dim, self.mlp_dim)):
            words = f"unfreeze_rank_ratio={ratio}: {round(ratio * rank)} of {rank} directions"
            remedy = f"with 0 nothing learns, with {rank} nothing is protected; say 1 for that"
            is_partial = ratio == 1 or 0 < frozen_count(rank, ratio) < rank
            require(is_partial, f"{words} of a matrix would move", remedy=remedy)


FIRST_TRACK = "english"

# The first track's model goes on to Shakespeare and Milton. The table is frozen, in baselines too:
# it holds most of the parameters, has no directions to protect, and would learn much of the verse
# in rows of its own, whatever the matrices do.
CONTINUAL = {
    "track": "continual",
    "data": "data/verse",
    "steps": 300,
    "matrix_lr": 0.01,
    "adam_lr": 0.003,
    "ngram_lr": 0.0,
    "val_tokens": 131_072,
    "val_sha256": "8b431ab670640b9ef7ce0ed9c284659cc46e88f21399be984921cbf0e97864b6",
    "val_every": 100,
    "target_loss": 0.0,
}
FIRST = vars(train_gpt.TRACKS[FIRST_TRACK])
train_gpt.TRACKS["continual"] = ContinualConfig(**{**FIRST, **CONTINUAL})


# ----- frozen directions


def frozen_directions(matrices, count):
    """The top `count` singular directions of matrices (k, m, n): left (k, m, count) and right
    (k, count, n), float32."""
    left, _, right = torch.linalg.svd(matrices.float(), full_matrices=False)
    return left[..., :count].contiguous(), right[:, :count].contiguous()


def project_update(update, left, right):
    """Take what touches frozen directions out of updates (k, m, n) float32, in place.

    Afterwards leftᵀ update = 0 and update rightᵀ = 0. Neither (m, m) nor (n, n) matrices are
    formed.
    """
    update.baddbmm_(left, left.mT @ update, alpha=-1)
    return update.baddbmm_(update @ right.mT, right, alpha=-1)


def protect(matrices, initial, ratio):
    """Make the group `matrices` keep its weights in the top directions of the weights `initial`.

    initial: {parameter: tensor}, of which the group's weights may have moved on, though not along
    these directions; else ConfigError is raised. A rank splits the matrices that it owns, so that
    nothing travels. Returns how many directions are frozen, as text.
    """
    factors, counts = {}, []
    for name, param in matrices.params.items():
        part, state = matrices.part_of(name, param.data), matrices.state[name]
        of_bank = [initial[key] for key in matrices.members if train_gpt.bank_name(key) == name]
        start = torch.cat(of_bank).to(part)  # as this run's type rounds it
        start = matrices.part_of(name, start).float()
        rank = min(start.shape[1:])
        count = frozen_count(rank, ratio)
        left, right = frozen_directions(start, count)
        moved = state.get("master", part) - start
        require(
            (left.mT @ moved).norm() <= 1e-3 * (left.mT @ start).norm(),
            f"{name}: the run started from another checkpoint than --init-from names now; put that "
            "one back",
        )
        factors[id(state)] = left, right
        counts.append(f"{name}={count}/{rank}")
    take_step = matrices.take_step

    def projected_step(update, part, grad, state, hyper):
        weight = state.get("master", part)
        before = weight.clone()
        take_step(update, part, grad, state, hyper)
        weight.copy_(before + project_update(weight - before, *factors[id(state)]))
        part.copy_(weight)

    matrices.take_step = projected_step
    return " ".join(counts)


# ----- a run's start


# Fields that weights mean nothing without
SIZES = ("vocab_size", "model_dim", "layers", "head_dim", "mlp_dim", "mlp_reach", "logit_cap")
PAST = ("ngram_orders", "ngram_rows", "copy_orders")


def shape_of(config, step):
    """The values that have to be those of the weights, at a step: {name: value}."""
    shape = {name: getattr(config, name) for name in (*SIZES, *PAST)}
    windows = train_gpt.stage_at(config, step).windows
    shape["windows"] = windows, train_gpt.long_windows_until(config, step)
    return shape


def require_vocabulary(manifest, initial, where):
    """Raise ConfigError unless a corpus has the vocabulary of the checkpoint to start from."""
    is_same = manifest["vocabulary_sha256"] == initial["vocabulary_sha256"]
    problem = f"has another vocabulary than --init-from, {initial['config'].tokenizer}"
    remedy = "name one that has it, made by `python data/text.py PATH --tokenizer ...`"
    require(is_same, where, problem, remedy)


def initial_checkpoint(config):
    """The content of --init-from. Raises ConfigError where it is missing or does not fit."""
    require(
        config.init_from,
        f"track {config.track}: goes on with a trained model; name its run or checkpoint with "
        f"--init-from (`./run.sh {FIRST_TRACK} --run-id NAME` trains one)",
    )
    content = train_gpt.find_checkpoint(os.path.expanduser(config.init_from), "init-from")
    saved, here = content["config"], shape_of(config, 0)
    require_vocabulary(train_gpt.read_manifest(config.data), content, f"--data {config.data}")
    for name, value in shape_of(saved, content["step"]).items():
        require(
            value == here[name],
            f"--init-from {config.init_from}: a checkpoint of track {saved.track}, with {name}="
            f"{value} where this run has {here[name]}; choose one of its shape, or override "
            f"--{name.replace('_', '-')}",
        )
    return content


def first_corpus(config, initial):
    """{name of the loss: validation tokens} of the corpus that the model of a checkpoint has
    learned, or of the one that the Config names for it. Raises ConfigError."""
    data = os.path.abspath(os.path.expanduser(config.first_data or initial["config"].data))
    try:
        corpus = train_gpt.open_corpus(dataclasses.replace(config, data=data, steps=1))
        require_vocabulary(corpus.manifest, initial, f"--data {data}")
        if not config.first_data:
            message = f"{data}: the corpus is not the one that --init-from has read"
            corpus.require_same(initial["data"], message)
        return {"first_val_loss": corpus.val}
    except ConfigError as error:  # it names the key of the other corpus
        raise ConfigError(str(error).replace("--data", "--first-data")) from None


def start_from(trainer, content):
    """Take over weights and table of a checkpoint; all other optimizer state stays zero."""
    trainer.model.load_state_dict(content["model"])
    parts = trainer.config, trainer.model, trainer.table, trainer.runtime
    trainer.optimizer = train_gpt.Optimizer(*parts)  # its float32 weights are those of the model
    trainer.table.load(content["groups"][trainer.table.name])
    trainer.table.second.zero_()


def train_matrices_alone(trainer):
    """Freeze all groups but the hidden matrices."""
    matrices = trainer.optimizer.matrices
    for group in trainer.optimizer.groups:
        group.is_frozen = group is not matrices
    for name, param in trainer.model.named_parameters():
        param.requires_grad_(name in matrices.members)


class ContinualRun(train_gpt.Run):
    """A run that starts from the weights of another one.

    The frozen directions are in no checkpoint of the run: when it is resumed, they are worked out
    again from the same weights.
    """

    def __init__(self, config, checkpoint, runtime, log, is_check):
        require(
            isinstance(config, ContinualConfig),
            f"track {config.track}: continual.py runs the track continual; use train_gpt.py",
        )
        initial = initial_checkpoint(config)
        val_sets = first_corpus(config, initial)
        super().__init__(config, checkpoint, runtime, log, is_check)
        self.val_sets |= val_sets
        is_new = checkpoint is None  # else it is resumed, and has its weights
        if is_new:
            start_from(self.trainer, initial)
        if config.trained == "matrices":
            train_matrices_alone(self.trainer)
        frozen = "none"
        if config.unfreeze_rank_ratio < 1:
            matrices = self.trainer.optimizer.matrices
            frozen = protect(matrices, initial["model"], config.unfreeze_rank_ratio)
        if is_new:
            source, step = config.init_from, initial["step"]
            log.line(f"started_from:{source} step:{step}{initial['by']} frozen: {frozen}")
            if config.val_every and not is_check:
                self.validate()


def main(argv=None):
    """Returns the exit status of train_gpt.main."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(argv):
        print(__doc__ or "")  # python -OO keeps none
    words = " ".join(argv).replace("=", " ")
    if "--resume" not in words or "--resume auto" in words:  # else the checkpoint has its track
        argv = ["--track", "continual", *argv]
    return train_gpt.main(argv, ContinualRun)


if __name__ == "__main__":
    sys.exit(main())
