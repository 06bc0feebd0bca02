"""Use a trained model: continue a prompt, or score the validation tokens.

    python sample.py --checkpoint logs/RUN/checkpoint.pt --prompt "import torch"
    python sample.py --checkpoint logs/RUN/checkpoint.pt --eval
    python sample.py --help

It takes the checkpoints of all tracks.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import torch

import train_gpt
from continual import validation_tokens  # this import makes the continual track known, too
from train_gpt import ConfigError, require


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}; see --help")


def parse(argv):
    """The command line. Raises ConfigError."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="F", help="file that a run has left")
    task = parser.add_mutually_exclusive_group()
    task.add_argument(
        "--prompt", default="", help="text to continue; without it the model starts a document"
    )
    task.add_argument("--eval", action="store_true", help="print the validation loss instead")
    add("--tokens", type=int, default=200, metavar="N", help="at most so many more tokens [200]")
    add("--temperature", type=float, default=0.7, metavar="X", help="0: the likeliest token [0.7]")
    add("--seed", type=int, default=0, metavar="N", help="of the draws [0]")
    add("--data", metavar="D", help="with --eval: another corpus than the run's")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(argv)
    require(given.tokens >= 1, f"--tokens {given.tokens}: must be at least 1")
    require(given.temperature >= 0, f"--temperature {given.temperature}: must not be negative")
    require(0 <= given.seed < 2**63, f"--seed {given.seed}: must be 0 to 2^63 - 1")
    require(
        given.eval or not given.data,
        f"--data {given.data}: the corpus to score; add --eval, or leave it out",
    )
    return given


def open_trained(path, device="auto", data=None):
    """(trainer, step) of a checkpoint, in this process alone."""
    content = train_gpt.load_checkpoint(path)
    saved = content["config"]
    config = dataclasses.replace(saved, compile=False, device=device, data=data or saved.data)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime(device))
    train_gpt.restore(trainer, content)
    if saved.index_orders:
        trainer.table.read_index(train_gpt.open_corpus(saved).indexed, content["index"])
    return trainer, content["step"]


def evaluation(trainer, step):
    """The line that tells the validation loss of the model before a step."""
    config = trainer.config
    val = validation_tokens(config, config.data)
    loss = trainer.evaluate(step, val)
    require(math.isfinite(loss), f"the validation loss is {loss}: use another checkpoint")
    val_sha256 = train_gpt.validation_hash(val)
    return f"eval val_loss:{loss:.5f} val_tokens:{config.val_tokens} val_sha256:{val_sha256}"


class Bytes:
    """The tokenizer of the byte corpora."""

    def encode_ordinary(self, text):
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def tokenizer_of(config):
    """The run's tokenizer, with tiktoken's methods encode_ordinary and decode."""
    if config.tokenizer == "bytes":
        return Bytes()
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    manifest = train_gpt.read_manifest(config.data) or {}
    if "vocabulary" in manifest:
        vocabulary = manifest["vocabulary"]
        path = str(Path(config.data, vocabulary["file"]))
        ranks = load_tiktoken_bpe(path, vocabulary["sha256"])
        return tiktoken.Encoding(
            "own", pat_str=vocabulary["pattern"], mergeable_ranks=ranks, special_tokens={}
        )
    known = "bytes, gpt2, and vocabularies that a corpus takes along"
    require(config.tokenizer == "gpt2", f"{config.data}: {config.tokenizer} is none of {known}")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' types, when neither network nor cache has the vocabulary
        raise ConfigError(
            f"tiktoken cannot load the gpt2 vocabulary ({type(error).__name__}); needs the network "
            "once, or a filled TIKTOKEN_CACHE_DIR"
        ) from None


@torch.no_grad()
def next_token_logits(trainer, step, tokens):
    """Logits (eot_token + 1,), float32 on the CPU, of the token that follows `tokens`."""
    config = trainer.config
    length = config.micro_batch_tokens
    low = max(0, len(tokens) - length)  # copies look back further
    padded = np.zeros(low + length + 1, dtype=np.uint16)  # what follows is never attended to
    padded[: len(tokens)] = tokens
    _, hidden = trainer.score(step, train_gpt.Text(padded, config.eot_token), low, length)
    last = len(tokens) - 1 - low
    return trainer.model.logits(hidden[last : last + 1])[0, : config.eot_token + 1].cpu()


def continuation(trainer, step, prompt, count, temperature, seed):
    """Up to `count` token ids that follow the ids `prompt`, drawn one by one; a document's end ends
    them."""
    generator = torch.Generator().manual_seed(seed)
    tokens, made = [trainer.config.eot_token, *prompt], []
    for _ in range(count):
        logits = next_token_logits(trainer, step, tokens + made)
        is_finite = logits.isfinite().all()
        require(is_finite, "the model's predictions are not finite: use another checkpoint")
        token = logits.argmax().item()
        if temperature:
            shares = (logits / temperature).softmax(-1)
            token = torch.multinomial(shares, 1, generator=generator).item()
        if token == trainer.config.eot_token:
            break
        made.append(token)
    return made


def main(argv=None):
    """Returns the exit status: 0 complete, 2 bad input."""
    try:
        given = parse(argv)
        trainer, step = open_trained(given.checkpoint, given.device, given.data)
        if given.eval:
            print(evaluation(trainer, step))
            return 0
        tokenizer = tokenizer_of(trainer.config)
        prompt = tokenizer.encode_ordinary(given.prompt)
        made = continuation(trainer, step, prompt, given.tokens, given.temperature, given.seed)
        text = given.prompt + tokenizer.decode(made)
        coding = sys.stdout.encoding or "utf-8"  # which may lack what a model says
        print(text.encode(coding, "backslashreplace").decode(coding))
        return 0
    except (ConfigError, OSError) as error:
        print(f"status:error {train_gpt.one_line(error)}", flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
