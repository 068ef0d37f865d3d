"""Sums over positions of output gradient times input of a convolution, a tile to a program.

The gradient of a weight is, for output p, tap (a place in the kernel's window) and channel c,

    sum over positions t of  g[t, p] * x[t + tap, c]

with channels last in x and g. A program adds up the positions of some images that follow each
other: those of one example, or a share of the batch. In the second case there are `factors`, one an
image. They multiply what was summed up, in float32: were g multiplied, it would be rounded once
more, and sums that cancel could grow beyond what their norms say. Where a factor is 0 nothing is
read, so that what is not a number there does no harm.

`tap_tile` is for many channels: a program has one tap (or the three of a line), so that all it
reads lies side by side. `column_tile` is for few channels: taps and channels form one axis, as in
the columns of `contract`. (One channel a group makes no matrix: see `depthwise`.)

`unit` divides the numbers of channels: by it the compiler sees how much it may read at once.

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
    x, g, factors, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, C: tl.constexpr, T: tl.constexpr, taps: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs and C channels, for one tap or the three of a line."""
    channels, outputs = channels // unit * unit, outputs // unit * unit
    program, tap = take(tl.program_id(0), kernel_h * kernel_w // taps)
    program, tile_c = take(program, tl.cdiv(channels, C))
    program, tile_p = take(program, tl.cdiv(outputs, P))
    stretch, group = take(program, groups)
    c, p, tap = tile_c * C + tl.arange(0, C), tile_p * P + tl.arange(0, P), tap * taps
    first, steps, size = _begin(stretch, total, share, out_height * out_width, T)
    x += first * height * width * groups * channels + group * channels + c[None, :]
    g += first * size * groups * outputs + group * outputs + p[:, None]
    above, left = (tap // kernel_w) * dilation_h - pad_h, (tap % kernel_w) * dilation_w - pad_w
    real_c, real_p = (c < channels)[None, :], (p < outputs)[:, None]
    image, start, line, column = 0, 0, tl.arange(0, T) // out_width, tl.arange(0, T) % out_width
    found = tl.zeros((P, C), dtype=tl.float32)
    second, third = found, found
    for _ in range(0, steps):
        factor, inside, at = _places(factors, first, image, start, size, T)
        at = at[None, :] * (groups * outputs)
        b = tl.load(g + at, mask=inside[None, :] & real_p, other=0.0)
        h, w = line * stride_h + above, column * stride_w + left
        pixel = (image * height + h) * width + w
        inside &= (h >= 0) & (h < height)
        a = _window(x, pixel, w, width, groups * channels, inside, real_c)
        if factors is not None:
            found += factor * _product(b, a, None, precision, on_gpu)
        else:
            found = _product(b, a, found, precision, on_gpu)
        if taps == 3:
            w, pixel = w + dilation_w, pixel + dilation_w
            a = _window(x, pixel, w, width, groups * channels, inside, real_c)
            second = _product(b, a, second, precision, on_gpu)
            w, pixel = w + dilation_w, pixel + dilation_w
            a = _window(x, pixel, w, width, groups * channels, inside, real_c)
            third = _product(b, a, third, precision, on_gpu)
        image, start, line, column = _onward(image, start, line, column, size, out_width, T)
    at = (stretch.to(tl.int64) * groups + group) * outputs + p
    at = (at * (kernel_h * kernel_w) + tap)[:, None] * channels + c[None, :]
    tl.store(out + at, found, mask=real_p & real_c)
    if taps == 3:
        tl.store(out + at + channels, second, mask=real_p & real_c)
        tl.store(out + at + 2 * channels, third, mask=real_p & real_c)


@triton.jit
@no_type_check
def column_tile(
    x, g, factors, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs and D pairs of tap and channel."""
    outputs, inputs = outputs // unit * unit, kernel_h * kernel_w * channels
    program, tile_d = take(tl.program_id(0), tl.cdiv(inputs, D))
    program, tile_p = take(program, tl.cdiv(outputs, P))
    stretch, group = take(program, groups)
    d, p = tile_d * D + tl.arange(0, D), tile_p * P + tl.arange(0, P)
    first, steps, size = _begin(stretch, total, share, out_height * out_width, T)
    x += first * height * width * groups * channels + group * channels + (d % channels)[None, :]
    g += first * size * groups * outputs + group * outputs + p[:, None]
    tap = d // channels
    above, left = (tap // kernel_w) * dilation_h - pad_h, (tap % kernel_w) * dilation_w - pad_w
    image, start, line, column = 0, 0, tl.arange(0, T) // out_width, tl.arange(0, T) % out_width
    found = tl.zeros((P, D), dtype=tl.float32)
    for _ in range(0, steps):
        factor, inside, at = _places(factors, first, image, start, size, T)
        at = at[None, :] * (groups * outputs)
        b = tl.load(g + at, mask=inside[None, :] & (p < outputs)[:, None], other=0.0)
        h = (line * stride_h)[:, None] + above[None, :]
        w = (column * stride_w)[:, None] + left[None, :]
        inside = inside[:, None] & (d < inputs)[None, :]
        inside &= (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = ((image * height + h) * width + w).to(tl.int64) * (groups * channels)
        a = tl.load(x + at, mask=inside, other=0.0)
        if factors is not None:
            found += factor * _product(b, a, None, precision, on_gpu)
        else:
            found = _product(b, a, found, precision, on_gpu)
        image, start, line, column = _onward(image, start, line, column, size, out_width, T)
    at = (stretch.to(tl.int64) * groups + group) * outputs + p
    at = at[:, None] * inputs + d[None, :]
    tl.store(out + at, found, mask=(p < outputs)[:, None] & (d < inputs)[None, :])


@triton.jit
@no_type_check
def take(number, count):
    """The number without its last digit, and that digit: one of `count`."""
    return number // count, number % count


@triton.jit
@no_type_check
def _begin(stretch, total, share, size, T: tl.constexpr):
    """A stretch's first image, the steps of T positions through all its images, an image's size."""
    first, images = stretch_images(stretch, total, share)
    return first, images * tl.cdiv(size, T), size


@triton.jit
@no_type_check
def stretch_images(stretch, total, share):
    """A stretch's first image, and how many it has."""
    first = stretch.to(tl.int64) * share
    return first, tl.minimum(total - first, share).to(tl.int32)


@triton.jit
@no_type_check
def _places(factors, first, image, start, size, T: tl.constexpr):
    """The image's factor, which of the T positions from `start` are read, and where they lie."""
    factor, end = 1.0, size
    if factors is not None:
        factor = tl.load(factors + first + image)
        end = tl.where(factor == 0, 0, size)
    inside = start + tl.arange(0, T) < end
    return factor, inside, (image * size + start + tl.arange(0, T)).to(tl.int64)


@triton.jit
@no_type_check
def _onward(image, start, line, column, size, width, T: tl.constexpr):
    """The next T positions, without the divisions that would cost as much as the products."""
    column += T % width
    over = column >= width
    column = tl.where(over, column - width, column)
    line += T // width + over.to(tl.int32)
    ended = start + T >= size
    line = tl.where(ended, tl.arange(0, T) // width, line)
    column = tl.where(ended, tl.arange(0, T) % width, column)
    return tl.where(ended, image + 1, image), tl.where(ended, 0, start + T), line, column


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
    """The sums over these positions, and those found so far."""
    if not on_gpu:  # Triton's interpreter cannot multiply bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(b, a, found, input_precision=precision)
