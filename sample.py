"""Use a trained model: continue a prompt, or score the validation tokens.

    python sample.py --checkpoint RUN --interactive
    python sample.py --checkpoint RUN --prompt "A word that" --samples 3 --top-k 40
    python sample.py --checkpoint RUN --eval

RUN is the id of a run, its folder, or a checkpoint of any track.
"""

import codecs
import contextlib
import dataclasses
import math
import os
import sys
from pathlib import Path

import train_gpt  # first: it says what is missing

# isort: split
import numpy as np
import torch

import continual  # noqa: F401 (its track becomes known)
from data import text as data_text
from train_gpt import ConfigError, require


def parse(argv):
    """The command line. Raises ConfigError."""
    parser = train_gpt.Parser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="RUN", help="run id, folder of a run, or checkpoint")
    task = parser.add_mutually_exclusive_group().add_argument
    task("--prompt", default="", help="text to continue; without it the model starts a document")
    task("--interactive", action="store_true", help="continue each line that you type")
    task("--eval", action="store_true", help="print the validation loss instead")
    add("--tokens", type=int, default=200, metavar="N", help="at most so many more tokens [200]")
    add("--samples", type=int, default=1, metavar="N", help="so many continuations [1]")
    add("--temperature", type=float, default=0.7, metavar="X", help="0: the likeliest token [0.7]")
    add("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens; 0: all [0]")
    add("--seed", type=int, default=0, metavar="N", help="of the first sample's draws [0]")
    add("--data", metavar="D", type=data_text.absolute, help="corpus to score, or the run's, moved")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(argv)
    for name in ("tokens", "samples"):
        count = getattr(given, name)
        require(count >= 1, f"--{name} {count}: must be at least 1")
    is_warm = 0 <= given.temperature < math.inf
    require(is_warm, f"--temperature {given.temperature}: must be a number from 0 on")
    require(given.top_k >= 0, f"--top-k {given.top_k}: must not be negative")
    most = 2**63 - given.samples
    require(0 <= given.seed <= most, f"--seed {given.seed}: must be 0 to {most}")
    return given


def open_trained(run, device="auto", data=None):
    """(trainer, content) of the checkpoint that a run's id, its folder or a file names, in this
    process alone.

    data: the corpus to use in place of the run's; a smaller one has fewer tokens to score. Raises
    ConfigError.
    """
    content = train_gpt.find_checkpoint(os.path.expanduser(run), "checkpoint")
    saved = content["config"]
    own = os.path.abspath(saved.data)
    config = dataclasses.replace(saved, compile=False, device=device, data=str(data or own))
    if data:
        found = train_gpt.read_manifest(data)["vocabulary_sha256"]
        problem = f"has another vocabulary than the model's, {saved.tokenizer}"
        require(
            found == content["vocabulary_sha256"], f"--data {data}", problem, "name one with it"
        )
        config = dataclasses.replace(config, val_tokens=train_gpt.fitting_val_tokens(config))
    if content["by"]:
        print(f"note: {content['path']}:{content['by']}; losses may differ", file=sys.stderr)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime(device))
    train_gpt.restore(trainer, content)
    return trainer, content


def evaluation(trainer, content, data=None):
    """The line that tells the validation loss of a checkpoint's model. A corpus that is not the one
    which the run has read must be named, as `data`. Raises ConfigError."""
    config = trainer.config
    corpus = train_gpt.open_corpus(dataclasses.replace(config, steps=1))  # it only scores
    if not data:
        message = f"{config.data}: the corpus is not the one that the run has read"
        corpus.require_same(content["data"], message)
    loss = trainer.evaluate(content["step"], corpus.val)
    require(math.isfinite(loss), f"the validation loss is {loss}: use another checkpoint")
    val_sha256 = train_gpt.validation_hash(corpus.val)
    return f"eval val_loss:{loss:.5f} val_tokens:{config.val_tokens} val_sha256:{val_sha256}"


def tokenizer_of(config, data=None):
    """The data_text.Tokenizer of a run, whose corpus has the identity `data`, unless that is None.
    Raises ConfigError, DataError."""
    if config.tokenizer in ("bytes", "gpt2"):
        return data_text.make_tokenizer(config.tokenizer)
    try:
        manifest = train_gpt.read_manifest(config.data)
        require(data in (None, manifest["sha256"]), "it was built again")
        vocabulary = manifest["vocabulary"]
        path = Path(config.data, vocabulary["file"])
        require(path.is_file(), "its file is missing")
        require(train_gpt.file_sha256(path) == vocabulary["sha256"], "its sha256 is another")
        tokenizer = data_text.make_tokenizer(path, vocabulary["pattern"])
        require(tokenizer.eot_token == config.eot_token, "it has another number of pieces")
        return tokenizer
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = train_gpt.one_line(error)
        raise ConfigError(
            f"{config.data}: no vocabulary of {config.tokenizer} ({reason}); name "
            "with --data where the corpus is now, or build it again"
        ) from None


@torch.no_grad()
def next_token_logits(trainer, step, tokens):
    """Log-probabilities (eot_token + 1,), float32 on the CPU, of the token after `tokens`."""
    config = trainer.config
    length = config.micro_batch_tokens
    low = max(0, len(tokens) - length)  # copies look back further
    padded = np.zeros(low + length + 1, dtype=np.uint16)  # what follows is never attended to
    padded[: len(tokens)] = tokens
    _, states = trainer.score(step, padded, low, length)
    last = len(tokens) - 1 - low
    state = states.at(slice(last, last + 1))
    return trainer.model.logits(state)[0, : config.eot_token + 1].log_softmax(-1).cpu()


def continuation(trainer, step, prompt, given, seed):
    """Yield up to given.tokens ids that follow the ids `prompt`, drawn one by one; a document's end
    ends them. Raises ConfigError."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [trainer.config.eot_token, *prompt]
    for _ in range(given.tokens):
        logits = next_token_logits(trainer, step, tokens)
        is_finite = logits.isfinite().all()
        require(is_finite, "the model's predictions are not finite: use another checkpoint")
        token = logits.argmax().item()
        if given.temperature:
            if 0 < given.top_k < len(logits):
                logits[logits < logits.topk(given.top_k).values[-1]] = -math.inf
            # In float64, where the least temperature is not 0.
            shares = ((logits - logits.max()).double() / given.temperature).softmax(-1)
            token = torch.multinomial(shares, 1, generator=generator).item()
        if token == trainer.config.eot_token:
            break
        tokens.append(token)
        yield token


def show(text):
    """Print text at once, with escapes for what the terminal's coding lacks."""
    coding = getattr(sys.stdout, "encoding", None) or "utf-8"  # it may be closed
    print(text.encode(coding, "backslashreplace").decode(coding), end="", flush=True)


def prompts_typed():
    """Yield the lines that are typed, or come from a pipe, until Ctrl-D or its end."""
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def print_samples(trainer, step, tokenizer, given, text):
    """Print a prompt, `text`, with each of its continuations, as the model makes them."""
    prompt = tokenizer.encode(text.encode(errors="surrogateescape")).tolist()
    for number in range(given.samples):
        if given.samples > 1:
            show(f"--- sample {number + 1} of {given.samples}\n")
        show(text)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # tokens cut into characters
        for token in continuation(trainer, step, prompt, given, given.seed + number):
            show(decoder.decode(tokenizer.pieces[token]))
        show(decoder.decode(b"", final=True) + "\n")


def main(argv=None):
    """Returns the exit status: 0 complete, 1 failed, 2 bad input, 130 interrupted."""
    try:
        given = parse(argv)
        trainer, content = open_trained(given.checkpoint, given.device, given.data)
        if given.eval:
            print(evaluation(trainer, content, given.data))
            return 0
        # The corpus has the vocabulary, and one that is named may be another.
        tokenizer = tokenizer_of(trainer.config, None if given.data else content["data"])
        for text in prompts_typed() if given.interactive else [given.prompt]:
            print_samples(trainer, content["step"], tokenizer, given, text)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ConfigError, data_text.DataError, OSError) as error:
        status, words = 2, f"error {train_gpt.one_line(error)}"
    except Exception as error:  # too little memory, above all
        status, words = train_gpt.ending_of(error)
    try:
        print(f"status:{words}", flush=True)
    except OSError:  # the reader is gone, or the disk full; Python would write once more
        print(f"status:{words}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")
    return status


if __name__ == "__main__":
    if sys.stdin is not None:  # it may be closed; else its lines are any bytes, as --prompt is
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.exit(main())
