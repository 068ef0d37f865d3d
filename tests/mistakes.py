"""What users hand over by mistake, in each of the library's ways: run as a program.

Tests check the types of arguments before we can, so this runs without them. It prints
JSON: for each mistake and way the class of the error, and whether that is one of ours.
"""

import json
import sys
import warnings
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import sfumato

torch.manual_seed(0)
N = 8
X, Y = torch.randn(N, 6), torch.arange(N) % 3


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def each(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


whole_loss = torch.compile(each, backend="aot_eager")
softened = torch.compile(
    lambda out, y: F.cross_entropy(out.tanh(), y, reduction="none"), backend="aot_eager"
)


class Complex(nn.Module):
    def __init__(self, *, made=False):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        made_of = torch.randn(3, 2) if made else torch.randn(3, dtype=torch.complex64)
        self.filter = nn.Parameter(made_of)

    def forward(self, x):
        made = not self.filter.is_complex()
        return (self.layer(x) * (torch.view_as_complex(self.filter) if made else self.filter)).abs()


class Penalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = self.layer(x).tanh()
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.square().sum(dim=1, keepdim=True)


class Branch(nn.Module):
    """Takes another layer if there are more examples."""

    def __init__(self):
        super().__init__()
        self.few, self.many = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.many(x) if len(x) > 5 else self.few(x)


class Free(nn.Module):
    def forward(self, x):
        return x[:, :3]


def in_place():
    model = net()
    model.compile(backend="eager")
    return model


LOSSES = {
    "a mean": lambda m, x, y: each(m, x, y).mean(),
    "a sum": lambda m, x, y: each(m, x, y).sum(),
    "of shape (n, k)": lambda m, x, y: m(x),
    "of shape (n, 1)": lambda m, x, y: each(m, x, y)[:, None],
    "of shape (n - 1,)": lambda m, x, y: each(m, x, y)[1:],
    "of shape (n + 1,)": lambda m, x, y: F.pad(each(m, x, y), (0, 1)),
    "of whole numbers": lambda m, x, y: m(x).argmax(dim=1),
    "detached": lambda m, x, y: each(m, x, y).detach(),
    "a list": lambda m, x, y: list(each(m, x, y)),
    "a float": lambda m, x, y: each(m, x, y).mean().item(),
    "None": lambda m, x, y: None,
    "complex": lambda m, x, y: each(m, x, y) + 0j,
    "of numpy": lambda m, x, y: each(m, x, y).detach().numpy(),
    "divided by their number": lambda m, x, y: each(m, x, y) / len(x),
    "compiled": torch.compile(each, backend="aot_eager"),
    "compiled and divided by their number": torch.compile(
        lambda m, x, y: each(m, x, y) / len(x), backend="aot_eager"
    ),
    "that calls compiled code": lambda m, x, y: whole_loss(m, x, y),
    "with a compiled part": lambda m, x, y: softened(m(x), y) / len(x),
}
MODELS = {
    "without parameters": Free,
    "all frozen": lambda: net().requires_grad_(False),
    "with complex parameters": Complex,
    "with parameters made complex": lambda: Complex(made=True),
    "with a penalty on gradients": Penalty,
    "with a branch by len(x)": Branch,
    "compiled": lambda: torch.compile(net(), backend="eager"),
    "compiled in place": in_place,
    "with a compiled part": lambda: nn.Sequential(torch.compile(nn.Linear(6, 3), backend="eager")),
    "in half precision": lambda: net().half(),
    "in TorchScript": lambda: torch.jit.trace(net(), X),
    "without shapes": lambda: nn.Sequential(nn.LazyLinear(3)),
    "None": lambda: None,
    "a function": lambda: F.relu,
}
SETTINGS = {
    "batch_size": ["a", None, -1, 0, 1000, float("nan")],
    "sample_size": ["a", None, -1, 8.5],
    "max_grad_norm": ["a", None, -1.0, float("nan")],
    "noise_multiplier": ["a", None, -1.0, 1e-9],
    "target_delta": ["a", 2.0],
    "steps": ["a", None, 0, 2.5],
    "secret": ["a"],
    "ema": ["a", 2.0],
    "noise": ["a"],
    "clip_function": ["a"],
    "module": [None, "a"],
}


def clip(model, loss):
    sfumato.GradientClipper(model).clip(loss, (X, Y), N)


def clipped_gradient(model, loss):
    sfumato.clipped_gradient(model, loss, (X, Y), max_norm=1.0)


def admit(model, loss):
    sfumato.admit(sfumato.GradientClipper(model), loss, (X, Y), N)


def engine(model, loss):
    _, optimizer = attached(model)
    optimizer.step(loss=loss(model, X, Y))


def give(way, model):
    way(model(), each)


WAYS = [clip, clipped_gradient, admit, engine]


def made(**changes):
    settings = {
        "batch_size": 8,
        "sample_size": 80,
        "steps": 3,
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    settings |= changes
    return sfumato.PrivacyEngine(settings.pop("module", None) or net(), **settings)


def attached(model, **more):
    made_for = sfumato.PrivacyEngine(
        model, batch_size=8, sample_size=80, steps=3, max_grad_norm=1.0, noise_multiplier=1.0,
        **more,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made_for.attach(optimizer)
    return made_for, optimizer


INPUTS = {
    "a tensor": X,
    "lists": [[0.0] * 6] * N,
    "of other lengths": (X, Y[:5]),
    "a single number": (X, torch.tensor(1.0)),
    "None": None,
}


def batch_to(way, inputs):
    """Other inputs, to the ways that take a batch."""
    if way is clip:
        sfumato.GradientClipper(net()).clip(each, inputs, N)
    elif way is admit:
        sfumato.admit(sfumato.GradientClipper(net()), each, inputs, N)
    else:
        sfumato.clipped_gradient(net(), each, inputs, max_norm=1.0)


def plan(**changes):
    settings = {"size": 80, "batch_size": 8, "epochs": 1, "noise_multiplier": 1.0}
    sfumato.make_plan(**(settings | changes))


def bound(max_norm):
    sfumato.clipped_gradient(net(), each, (X, Y), max_norm=max_norm)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], Y[0])] * 80)


def private_stream():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), 8)
    sfumato.make_private(
        model, optimizer, loader, epochs=1, max_grad_norm=1.0, noise_multiplier=1.0
    )


def compiled_later():
    model = net()
    _, optimizer = attached(model)
    model.compile(backend="eager")
    optimizer.step(loss=each(model, X, Y))


def compiled_step():
    model = net()
    _, optimizer = attached(model)

    @torch.compile(backend="aot_eager")
    def step(x, y):
        optimizer.step(loss=each(model, x, y))

    step(X, Y)


def trained(compiled=None):
    """Weights after two steps; the model that is called, or the step itself, may be compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = net()
    _, optimizer = attached(model, secret=sfumato.SessionKey.from_seed(0))
    called = torch.compile(model, backend="eager") if compiled == "model" else model

    def step(x, y):
        optimizer.step(loss=each(called, x, y))

    if compiled == "step":
        step = torch.compile(step, backend="eager")
    for _ in range(2):
        step(X, Y)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def images(**changes):
    settings = {
        "pixels": torch.zeros(4, 1, 4, 4, dtype=torch.uint8),
        "labels": torch.tensor([0, 1, 0, 1]),
        "classes": ("a", "b"),
        "name": "x",
        "private": True,
    }
    sfumato.Images(**(settings | changes))


NO_IMAGES = {
    "pixels": [None, "a", np.zeros((4, 1, 4, 4), np.uint8), torch.zeros(4, 1, 4, 4)],
    "labels": [None, [0, 1, 0, 1], torch.tensor([0, -1, 0, 1]), torch.tensor([0.0, 1, 0, 1])],
    "people": ["a", [0, 1, 2, 3], torch.tensor([0.0, 1, float("nan"), 2]), torch.tensor([0, 1])],
    "classes": [None, "ab", (1, 2), ("a", "a"), ()],
}


def private(model=None, optimizer=None, loader=None, **settings):
    model = model or net()
    settings = {"epochs": 1, "max_grad_norm": 1.0, "noise_multiplier": 1.0, **settings}
    sfumato.make_private(model, optimizer, loader, **settings)


def cases_of_parts():
    """What is handed over beside models and losses."""
    loader = DataLoader([(x, y) for x, y in zip(X, Y, strict=True)], 4)
    yield "no optimizer to attach", lambda: made().attach(None)
    yield "no optimizer to make_private", partial(private, loader=loader)
    yield "a list to make_private", partial(private, loader=[(X, Y)])
    yield "a clipping that is a number", partial(sfumato.GradientClipper, net(), clipping=1.0)
    for name, values in NO_IMAGES.items():
        for place, value in enumerate(values):
            yield f"images with other {name}, {place}", partial(images, **{name: value})
    for noise in (1e-9, 0.0199):
        yield f"a plan with noise {noise}", partial(plan, noise_multiplier=noise)
    yield "a plan that ends with little", partial(plan, noise_decay=0.01, steps=9, epochs=None)
    yield "an engine that ends with little", partial(made, noise_decay=0.01)


def cases_of_numbers():
    """Inputs, budgets and plans."""
    for what, inputs in INPUTS.items():
        for way in (clip, clipped_gradient, admit):
            yield f"inputs that are {what} to {way.__name__}", partial(batch_to, way, inputs)
    yield "no inputs to clipped_gradient", partial(batch_to, clipped_gradient, ())
    for value in ("a", None, -1, float("nan")):
        yield f"clipped_gradient with max_norm={value!r}", partial(bound, value)
        yield f"Budget of epsilon {value!r}", partial(sfumato.Budget, epsilon=value, delta=1e-5)
        yield f"Budget of delta {value!r}", partial(sfumato.Budget, epsilon=1.0, delta=value)
        yield f"a plan of size {value!r}", partial(plan, size=value)
    for name in ("batch_size", "epochs", "noise_multiplier", "max_norm", "noise_decay"):
        yield f"a plan with {name}='a'", partial(plan, **{name: "a"})


def cases():
    """By name, what to call."""
    for what, loss in LOSSES.items():
        for way in WAYS:
            # One number for all of them shows only where it is asked with other numbers of them.
            if not (way is clip and what == "divided by their number"):
                yield f"a loss {what} to {way.__name__}", partial(way, net(), loss)
    for what, model in MODELS.items():
        for way in WAYS:
            yield f"a model {what} to {way.__name__}", partial(give, way, model)
    for name, values in SETTINGS.items():
        for value in values:
            if name == "module":
                yield f"module={value!r}", partial(engine, value, each)
            else:
                yield f"{name}={value!r}", partial(made, **{name: value})
    yield from cases_of_numbers()
    yield from cases_of_parts()
    yield "a stream to engine.loader", lambda: next(attached(net())[0].loader(Stream()))
    yield "a stream to make_private", private_stream
    yield "a list to engine.shuffled", lambda: next(attached(net())[0].shuffled([(X, Y)]))
    yield "a model that is compiled later", compiled_later
    yield "a training step that is compiled", compiled_step


def found(call):
    """The class of the error, and whether it is one of ours."""
    torch.compiler.reset()  # after some compilations of a function, it would be run as it is
    try:
        call()
    except Exception as problem:
        return type(problem).__name__, isinstance(problem, sfumato.SfumatoError)
    return "nothing", False


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answers = {name: found(call) for name, call in cases()}
    plain = trained()
    same = {what: torch.equal(trained(what), plain) for what in ("model", "step")}
    json.dump({"answers": answers, "same if compiled in the loop": same}, sys.stdout)
