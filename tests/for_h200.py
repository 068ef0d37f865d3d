"""Compile every kernel for an H200, on a machine without one: `python tests/for_h200.py`.

The interpreter runs kernels as Python, and takes much that the compiler refuses. Here the compiler
has them, for the sizes that ops choose; nothing is launched. One line a kernel: its name, types of
what it reads, and the shared memory of a program. The package is imported as in tests, with checks
of types at run time: a kernel that they are put around does not compile.
"""

import torch
from jaxtyping import install_import_hook
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
ON_A_GPU = {"on_gpu": True, "LANES": 128, "PART": 1024}
"""Settings that ops choose otherwise for a CPU, where the interpreter is meant."""


class Elsewhere:
    """Stands for the driver of a card that is not here."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_only(function, *args, grid, warmup, **options):
    """What a launch does, short of launching."""
    names = [parameter.name for parameter in function.params]
    given = [ON_A_GPU.get(name, value) for name, value in zip(names, args, strict=False)]
    made = run(function, *given, grid=grid, warmup=True, **options)
    types = [str(one.dtype).split(".")[-1] for one in given[:2] if isinstance(one, torch.Tensor)]
    print(function.__name__, *types, made.metadata.shared, flush=True)
    return made


run = JITFunction.run


def maps(*shape, dtype):
    return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def convolutions(dtype):
    """By taps, by columns, depthwise, of small images."""
    from sfumato.clipping.kernels.conv_norms import conv_ghost_norm
    from sfumato.clipping.kernels.convolution import conv_gradients, conv_total

    cases = [
        (64, 64, 8, 3, 1, 1),
        (3, 32, 16, 7, 2, 1),
        (32, 32, 14, 7, 1, 32),
        (128, 128, 4, 3, 1, 1),
    ]
    for inputs, outputs, side, kernel, stride, groups in cases:
        x = maps(4, inputs, side, side, dtype=dtype)
        g = maps(4, outputs, side // stride, side // stride, dtype=dtype)
        settings = ([kernel] * 2, [stride] * 2, [kernel // 2] * 2, [1, 1], groups)
        conv_gradients(x, g, *settings, 4)
        conv_total(x, g, *settings)
        if groups == 1:
            conv_ghost_norm(x, g, *settings, 4)


def matrices_and_norms(dtype):
    from sfumato.clipping.kernels.ghost import ghost_norm_kernel, scaled
    from sfumato.clipping.kernels.group_norm_backward import channel_sums, group_norm_backward
    from sfumato.clipping.kernels.group_norm_forward import group_norm_forward
    from sfumato.clipping.kernels.layer_norm import layer_norm_backward, layer_norm_forward

    for positions in (4, 197, 577):
        ghost_norm_kernel(*(torch.zeros(2, positions, width, dtype=dtype) for width in (768, 64)))
    rows = torch.zeros(2, 197, 768, dtype=dtype)
    scaled(rows, torch.ones(2))
    weight = torch.ones(768)
    _, mean, scale = layer_norm_forward(rows, weight, weight, 768, 1e-5)
    layer_norm_backward(rows.float(), rows, mean, scale, weight, 768, 2)
    x, weight = maps(2, 64, 28, 28, dtype=dtype), torch.ones(64)
    _, mean, scale = group_norm_forward(x, weight, weight, 16, 1e-5)
    group_norm_backward(x.float(), x, mean, scale, weight)
    channel_sums(x.float(), x, torch.zeros(64), weight)


def noise():
    from sfumato.privacy.kernels.digest import hash_columns
    from sfumato.privacy.kernels.philox import philox_flat
    from sfumato.privacy.kernels.release import release_flat
    from sfumato.privacy.kernels.seal import seal_words

    words, broken = torch.zeros(2**18, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for width in (0, 4, 8):
        hash_columns(words, torch.zeros(768, dtype=torch.int64), broken, width)
    seal_words(words[:3072], words[:16], broken, 2)
    key, numbers = words[:9], torch.ones(3, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        release_flat(torch.zeros(10**5, dtype=dtype), key, numbers)
    philox_flat(torch.zeros(10**5), key, 1.0, 1.0)


# Only here: pytest imports this file when it looks for doctests, and kernels must run there.
if __name__ == "__main__":
    JITFunction.run = compile_only
    driver.set_active(Elsewhere())
    with install_import_hook("sfumato", "shapes.check"):
        noise()
        for narrow in (torch.bfloat16, torch.float32):
            matrices_and_norms(narrow)
            convolutions(narrow)
