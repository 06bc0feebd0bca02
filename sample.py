"""Use a trained model: continue a prompt, or score the validation tokens. Takes the checkpoints of all tracks.

    python sample.py --checkpoint logs/RUN/checkpoint.pt --prompt "import torch"
    python sample.py --checkpoint logs/RUN/checkpoint.pt --eval
    python sample.py --help
"""
import argparse
import dataclasses
import math
import sys

import numpy as np
import torch

import train_gpt
from continual import validation_tokens  # this import makes the continual track known, too
from train_gpt import ConfigError, refuse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}; see --help")


def parse(argv):
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--checkpoint", required=True, metavar="F", help="file that a run has left")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--prompt", default="", help="text to continue; without it the model starts a document")
    task.add_argument("--eval", action="store_true", help="print the validation loss instead")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="continue by so many tokens at most [200]")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0: the likeliest token [0.7]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws [0]")
    parser.add_argument("--data", metavar="D", help="with --eval: another corpus than the run's")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(argv)
    refuse(given.tokens < 1, f"--tokens {given.tokens}: must be at least 1")
    refuse(not given.temperature >= 0, f"--temperature {given.temperature}: must not be negative")
    refuse(not 0 <= given.seed < 2**63, f"--seed {given.seed}: must be 0 to 2^63 - 1")
    refuse(given.data and not given.eval, f"--data {given.data}: the corpus to score; add --eval, or leave it out")
    return given


def open_trained(path, device="auto", data=None):
    """(trainer, step) of a checkpoint, in this process alone."""
    content = train_gpt.load_checkpoint(path)
    saved = train_gpt.config_of_checkpoint(content)
    config = dataclasses.replace(saved, compile=False, device=device, data=data or saved.data)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime(device))
    train_gpt.restore(trainer, content)
    return trainer, content["step"]


def text_codec(config):
    """(encode, decode) between text and token ids of the run's tokenizer."""
    if config.tokenizer == "bytes":
        return (lambda text: list(text.encode(errors="surrogateescape"))), (lambda ids: bytes(ids).decode(errors="replace"))
    import tiktoken
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' types, when neither network nor cache has the vocabulary
        raise ConfigError(f"tiktoken cannot load the gpt2 vocabulary ({type(error).__name__}); needs the network once, "
                          f"or a filled TIKTOKEN_CACHE_DIR") from None
    return encoding.encode_ordinary, encoding.decode


@torch.no_grad()
def continuation(trainer, step, prompt, count, temperature, seed):
    """Up to `count` token ids that follow the ids `prompt`, drawn one by one; a document's end ends them."""
    config, generator = trainer.config, torch.Generator().manual_seed(seed)
    tokens = [config.eot_token, *prompt]
    for _ in range(count):
        low = max(0, len(tokens) - config.micro_batch_tokens)  # copies look back further
        padded = np.zeros(low + config.micro_batch_tokens + 1, dtype=np.uint16)  # what follows is never attended to
        padded[:len(tokens)] = tokens
        micro_batch, ngram = trainer.read(train_gpt.place_contiguous(train_gpt.Text(padded, config), low, config))
        hidden = trainer.model.hidden(micro_batch, ngram, trainer.context(step, micro_batch))[len(tokens) - 1 - low]
        logits = trainer.model.logits(hidden[None])[0, :config.eot_token + 1].cpu()
        refuse(not logits.isfinite().all(), "the model's predictions are not finite: use another checkpoint")
        token = logits.argmax().item()
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).item()
        if token == config.eot_token:
            break
        tokens.append(token)
    return tokens[1 + len(prompt):]


def main(argv=None):
    """Returns the exit status: 0 complete, 2 bad input."""
    try:
        given = parse(argv)
        trainer, step = open_trained(given.checkpoint, given.device, given.data)
        if given.eval:
            config, val = trainer.config, validation_tokens(trainer.config, trainer.config.data)
            loss = trainer.evaluate(step, val)
            refuse(not math.isfinite(loss), f"the validation loss is {loss}: use another checkpoint")
            print(f"eval val_loss:{loss:.5f} val_tokens:{config.val_tokens} "
                  f"val_sha256:{train_gpt.validation_hash(config, val)}")
        else:
            encode, decode = text_codec(trainer.config)
            made = continuation(trainer, step, encode(given.prompt), given.tokens, given.temperature, given.seed)
            coding = sys.stdout.encoding or "utf-8"  # which may lack what a model says
            print((given.prompt + decode(made)).encode(coding, "backslashreplace").decode(coding))
        return 0
    except (ConfigError, OSError) as error:
        print(f"status:error {train_gpt.one_line(error)}", flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
