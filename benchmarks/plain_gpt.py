"""A plain GPT to compare with: GPT-2's architecture, as nanoGPT trains it (Karpathy 2022).

It has learned positions, LayerNorm, biases, GELU, and a head tied to the embedding. It is no
script: recipe.py trains it as the arm `plain`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):  # (B, T, dim)
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class PlainGPT(nn.Module):
    """A GPT of a track's vocabulary, width, heads and layers, with a context of `block` tokens."""

    def __init__(self, config, block):
        super().__init__()
        dim = config.model_dim
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(block, dim)
        heads = dim // config.head_dim
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)

    @torch.no_grad()
    def initialise(self, seed):
        """GPT-2's: normal of 0.02, less by sqrt(2 layers) into the residual stream; zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if is_residual else 0.02
                param.copy_(torch.randn(param.shape, generator=generator) * std)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, inputs, targets):
        """The losses (B, T) of the targets (B, T) that follow the inputs (B, T), token ids."""
        x = self.embed(inputs) + self.position.weight[: inputs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)
