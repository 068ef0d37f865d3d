"""Weight gradients of a 2-D convolution, a tile to a program.

The gradient of a weight is, for output p, tap (a place in the kernel's window) and channel c,

    sum over positions t of  g[t, p] * x[t + tap, c]

with channels last in x and g. A program adds up the positions of some images that follow each
other, T of them a step: those of one example, or a share of the batch. The positions of the next
image follow those of the last, so that no step is empty even where an image has one position.

`tap_tile` is for many channels: a program has one tap (or the three of a line), so that all it
reads lies side by side. `column_tile` is for few channels: taps and channels form one axis, as in
the columns of `layer_algebra`. For one channel a group, where there is no matrix, see `depthwise`.
`unit` divides the numbers of channels: by it the compiler sees how much it may read at once.
`steady` says that the positions of an image divide T: lines and columns are alike in all steps.

(Kernels are kept from the tests' type checks, which would wrap them: Triton's interpreter must find
them, and what they call, as they are.)
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (Type checkers know nothing of Triton's language.)

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tap_tile(
    x, g, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, C: tl.constexpr, T: tl.constexpr, steady: tl.constexpr, taps: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs and C channels, for one tap or the three of a line."""
    channels, outputs = channels // unit * unit, outputs // unit * unit
    program, tap = div_mod(tl.program_id(0), kernel_h * kernel_w // taps)
    program, tile_c = div_mod(program, tl.cdiv(channels, C))
    program, tile_p = div_mod(program, tl.cdiv(outputs, P))
    stretch, group = div_mod(program, groups)
    c, p, tap = tile_c * C + tl.arange(0, C), tile_p * P + tl.arange(0, P), tap * taps
    size = out_height * out_width
    first, steps, end = _begin(stretch, total, share, size, T)
    x += first * height * width * groups * channels + group * channels + c[None, :]
    g += first * size * groups * outputs + group * outputs + p[:, None]
    above, left = (tap // kernel_w) * dilation_h - pad_h, (tap % kernel_w) * dilation_w - pad_w
    # A tap that never meets the image has nothing to add.
    right = left + (taps - 1) * dilation_w + (out_width - 1) * stride_w
    meets = (above < height) & (above + (out_height - 1) * stride_h >= 0)
    steps = tl.where(meets & (left < width) & (right >= 0), steps, 0)
    real_c, real_p = (c < channels)[None, :], (p < outputs)[:, None]
    image, line, column = _origin(out_height, out_width, T)
    t = tl.arange(0, T)
    found = tl.zeros((P, C), dtype=tl.float32)
    second, third = found, found
    for _ in range(0, steps):
        inside, at = t < end, t.to(tl.int64)[None, :] * (groups * outputs)
        b = tl.load(g + at, mask=inside[None, :] & real_p, other=0.0)
        h, w = line * stride_h + above, column * stride_w + left
        pixel = (image * height + h) * width + w
        inside &= (h >= 0) & (h < height)
        a = _window(x, pixel, w, width, groups * channels, inside, real_c)
        found = _product(b, a, found, precision, on_gpu)
        if taps == 3:
            w, pixel = w + dilation_w, pixel + dilation_w
            a = _window(x, pixel, w, width, groups * channels, inside, real_c)
            second = _product(b, a, second, precision, on_gpu)
            w, pixel = w + dilation_w, pixel + dilation_w
            a = _window(x, pixel, w, width, groups * channels, inside, real_c)
            third = _product(b, a, third, precision, on_gpu)
        image, line, column = _onward(image, line, column, out_height, out_width, T, steady)
        t += T
    at = (stretch.to(tl.int64) * groups + group) * outputs + p
    at = (at * (kernel_h * kernel_w) + tap)[:, None] * channels + c[None, :]
    tl.store(out + at, found, mask=real_p & real_c)
    if taps == 3:
        tl.store(out + at + channels, second, mask=real_p & real_c)
        tl.store(out + at + 2 * channels, third, mask=real_p & real_c)


@triton.jit
@no_type_check
def column_tile(
    x, g, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, D: tl.constexpr, T: tl.constexpr, steady: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs and D pairs of tap and channel."""
    outputs, inputs = outputs // unit * unit, kernel_h * kernel_w * channels
    program, tile_d = div_mod(tl.program_id(0), tl.cdiv(inputs, D))
    program, tile_p = div_mod(program, tl.cdiv(outputs, P))
    stretch, group = div_mod(program, groups)
    d, p = tile_d * D + tl.arange(0, D), tile_p * P + tl.arange(0, P)
    size = out_height * out_width
    first, steps, end = _begin(stretch, total, share, size, T)
    x += first * height * width * groups * channels + group * channels + (d % channels)[None, :]
    g += first * size * groups * outputs + group * outputs + p[:, None]
    tap = d // channels
    above, left = (tap // kernel_w) * dilation_h - pad_h, (tap % kernel_w) * dilation_w - pad_w
    image, line, column = _origin(out_height, out_width, T)
    t = tl.arange(0, T)
    found = tl.zeros((P, D), dtype=tl.float32)
    for _ in range(0, steps):
        inside, at = t < end, t.to(tl.int64)[None, :] * (groups * outputs)
        b = tl.load(g + at, mask=inside[None, :] & (p < outputs)[:, None], other=0.0)
        h = (line * stride_h)[:, None] + above[None, :]
        w = (column * stride_w)[:, None] + left[None, :]
        inside = inside[:, None] & (d < inputs)[None, :]
        inside &= (h >= 0) & (h < height) & (w >= 0) & (w < width)
        pixel = (image * height + line * stride_h) * width + column * stride_w
        at = (pixel[:, None] + (above * width + left)[None, :]).to(tl.int64) * (groups * channels)
        a = tl.load(x + at, mask=inside, other=0.0)
        found = _product(b, a, found, precision, on_gpu)
        image, line, column = _onward(image, line, column, out_height, out_width, T, steady)
        t += T
    at = (stretch.to(tl.int64) * groups + group) * outputs + p
    at = at[:, None] * inputs + d[None, :]
    tl.store(out + at, found, mask=(p < outputs)[:, None] & (d < inputs)[None, :])


@triton.jit
@no_type_check
def div_mod(number, count):
    """Quotient and remainder: the number of a program holds several indices at once."""
    return number // count, number % count


@triton.jit
@no_type_check
def stretch_images(stretch, total, share):
    """The first image of a stretch, and how many it has."""
    first = stretch.to(tl.int64) * share
    return first, tl.minimum(total - first, share).to(tl.int32)


@triton.jit
@no_type_check
def _begin(stretch, total, share, size, T: tl.constexpr):
    """A stretch's first image, the steps through all its positions, and how many these are."""
    first, images = stretch_images(stretch, total, share)
    return first, tl.cdiv(images * size, T), images * size


@triton.jit
@no_type_check
def _origin(height, width, T: tl.constexpr):
    """Image, line and column of the first T positions of a stretch."""
    t = tl.arange(0, T)
    place = t % (height * width)
    return t // (height * width), place // width, place % width


@triton.jit
@no_type_check
def _onward(image, line, column, height, width, T: tl.constexpr, steady: tl.constexpr):
    """Image, line and column of the next T positions, without divisions: they cost too much."""
    size = height * width
    image += T // size
    if not steady:
        # T is added as a number with three digits: image, line and column.
        column, over = _digit(column + T % width, width)
        line, over = _digit(line + T % size // width + over, height)
        image += over
    return image, line, column


@triton.jit
@no_type_check
def _digit(number, base):
    """What is left of a number below twice the base, and what goes over to the next digit."""
    over = number >= base
    return tl.where(over, number - base, number), over.to(tl.int32)


@triton.jit
@no_type_check
def _window(x, pixel, w, width, step, inside, real):
    """The inputs at these pixels, zero where the window reaches over the edge."""
    inside &= (w >= 0) & (w < width)
    at = pixel.to(tl.int64)[:, None] * step
    return tl.load(x + at, mask=inside[:, None] & real, other=0.0)


@triton.jit
@no_type_check
def _product(b, a, found, precision: tl.constexpr, on_gpu: tl.constexpr):
    """The sums over these positions, added to those found so far."""
    if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(b, a, found, input_precision=precision)
