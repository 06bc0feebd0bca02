"""A plain GPT to compare with: GPT-2's architecture, as nanoGPT trains it (Karpathy 2022).

It has learned positions, LayerNorm, biases, GELU, and a head tied to the embedding. It is no
script: recipe.py trains it as the arm `plain`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class PlainGPT(nn.Module):
    """A GPT of a track's vocabulary, width, heads and layers, with a context of `block` tokens."""

    def __init__(self, config, block):
        super().__init__()
        dim = config.model_dim
        heads = dim // config.head_dim
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, **options)
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    @torch.no_grad()
    def initialise(self, seed):
        """GPT-2's: normal of 0.02, less by sqrt(2 layers) into the residual stream; zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_residual = name.endswith(("out_proj.weight", "linear2.weight"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if is_residual else 0.02
                param.copy_(torch.randn(param.shape, generator=generator) * std)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, inputs, targets):
        """The losses (B, T) of the targets (B, T) that follow the inputs (B, T), token ids."""
        length = inputs.size(1)
        x = self.embed(inputs) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = F.linear(self.norm(x), self.embed.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)
