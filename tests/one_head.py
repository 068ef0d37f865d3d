"""One head at a time, as anybody would write it: nn, autograd and torch.optim."""

import torch
import torch.nn.functional as F
from torch import nn


def network(recipe, d, start):
    """The head as a module in float64 or float32, with the flat vector in its parameters."""
    if recipe.hidden:
        net = nn.Sequential(nn.Linear(d, recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, 1))
    else:
        net = nn.Sequential(nn.Linear(d, recipe.classes))
    nn.utils.vector_to_parameters(start.clone(), net.to(start.dtype).parameters())
    return net


def losses(recipe, net, x, y):
    if not recipe.hidden:
        return F.cross_entropy(net(x), y, reduction="none")
    positive = torch.tensor([float(label in recipe.positive) for label in y.tolist()])
    return F.binary_cross_entropy_with_logits(net(x)[:, 0], positive.to(x.dtype), reduction="none")


def optimizer_of(recipe, net):
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[recipe.optimizer]
    return kind(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)


def flat(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def train_one(recipe, x, y, start, masks=None, normals=None):
    """A head by DP-SGD (or DP-Adam): each example's gradient by its own backward pass."""
    net = network(recipe, x.shape[1], start)
    optimizer = optimizer_of(recipe, net)
    for step in range(recipe.steps):
        total = torch.zeros_like(start)
        for i in range(len(x)):
            if masks is not None and not masks[step, i]:
                continue
            net.zero_grad()
            losses(recipe, net, x[i : i + 1], y[i : i + 1]).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
            if recipe.max_norm is not None:
                gradient = gradient * min(1.0, recipe.max_norm / float(gradient.norm()))
            total += gradient
        if normals is not None:
            total += recipe.noise_multiplier * recipe.max_norm * normals[step]
        total /= len(x) * recipe.rate
        start_at = 0
        for p in net.parameters():
            p.grad = total[start_at : start_at + p.numel()].view_as(p).clone()
            start_at += p.numel()
        optimizer.step()
    return flat(net)
