"""Per-example gradients of a convolution, without laying out its columns.

One program computes one tile (P x D) of one example's gradient: it goes through the positions,
takes a tile of output gradients (T x P) and one of inputs (T x D), which it reads from where the
kernel's window lies, and adds up their product in float32. Input windows overlap, so most reads are
served by the cache. Legend as in `contract`; V are the rows of an example (views).
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (A Triton kernel is called with a grid in brackets, which type checkers take for a mistake.)

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile(
    x, g, out, views, height, width, out_height, out_width, outputs,
    x_row, x_line, x_place, g_row, g_line, g_place,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    channels: tl.constexpr, inputs: tl.constexpr, kernel_w: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, T: tl.constexpr, precision: tl.constexpr,
    on_gpu: tl.constexpr,
):  # fmt: skip
    """One tile of one example's gradient; the program's place is (example, tile, group)."""
    example, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    tiles_d = tl.cdiv(inputs, D)
    p = (tl.program_id(1) // tiles_d) * P + tl.arange(0, P)
    d = (tl.program_id(1) % tiles_d) * D + tl.arange(0, D)
    tap, channel = d // channels, d % channels
    above = (tap // kernel_w) * dilation_h - pad_h
    left = (tap % kernel_w) * dilation_w - pad_w
    x += example * views * x_row + group * channels
    g += example * views * g_row + group * outputs
    size, total = out_height * out_width, views * out_height * out_width
    found = tl.zeros((P, D), dtype=tl.float32)
    for start in range(0, total, T):
        t = start + tl.arange(0, T)
        row, place = t // size, t % size
        line, column = place // out_width, place % out_width
        at = row * g_row + line * g_line + column * g_place
        inside = (t < total)[:, None] & (p < outputs)[None, :]
        b = tl.load(g + at[:, None] + p[None, :], mask=inside, other=0.0)
        h = (line * stride_h)[:, None] + above[None, :]
        w = (column * stride_w)[:, None] + left[None, :]
        inside = (t < total)[:, None] & (d < inputs)[None, :]
        inside &= (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = (row * x_row)[:, None] + h * x_line + w * x_place + channel[None, :]
        a = tl.load(x + at, mask=inside, other=0.0)
        if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
            a, b = a.to(tl.float32), b.to(tl.float32)
        found = tl.dot(tl.trans(b), a, found, input_precision=precision)
    at = (example * tl.num_programs(2) + group) * outputs * inputs
    at += p[:, None] * inputs + d[None, :]
    tl.store(out + at, found, mask=(p < outputs)[:, None] & (d < inputs)[None, :])


@torch.library.custom_op("sfumato::conv_gradients", mutates_args=())
def conv_gradients(
    x: Tensor, g: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, examples: int,
) -> Tensor:  # fmt: skip
    """The gradients (n P C h w, in float32) of a 2-D convolution, one for each example."""
    x = x.contiguous(memory_format=torch.channels_last)
    g = g.to(x.dtype).contiguous(memory_format=torch.channels_last)
    channels, outputs = x.shape[1] // groups, g.shape[1] // groups
    inputs = channels * kernel[0] * kernel[1]
    found = x.new_empty((examples, g.shape[1], *kernel, channels), dtype=torch.float32)
    wide = x.dtype == torch.float32
    tile_p, tile_d = _tile_side(outputs, 64), _tile_side(inputs, 64 if wide else 128)
    tiles = triton.cdiv(outputs, tile_p) * triton.cdiv(inputs, tile_d)
    precision = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    # Strides of the layout, not of the tensor: those of an axis of size one can be anything.
    x_line, g_line = x.shape[3] * x.shape[1], g.shape[3] * g.shape[1]
    _tile[(examples, tiles, groups)](
        x, g, found, x.shape[0] // examples, *x.shape[2:], *g.shape[2:], outputs,
        x.shape[2] * x_line, x_line, x.shape[1], g.shape[2] * g_line, g_line, g.shape[1],
        *stride, *padding, *dilation, channels, inputs, kernel[1],
        tile_p, tile_d, 32 if wide else 64, precision, x.is_cuda, num_warps=4, num_stages=3,
    )  # fmt: skip
    return found.movedim(-1, 2)


@conv_gradients.register_fake
def _(x, g, kernel, stride, padding, dilation, groups, examples):  # pyright: ignore
    shape = (examples, g.shape[1], *kernel, x.shape[1] // groups)
    return x.new_empty(shape, dtype=torch.float32).movedim(-1, 2)


def _tile_side(size: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(size)))
