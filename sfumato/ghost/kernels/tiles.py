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
the columns of `contract`. `depthwise_tile` is for one channel a group, where there is no matrix.
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
def depthwise_tile(
    x, g, factors, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w: tl.constexpr, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, R: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ahead: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs, each with its one channel, for H lines of W taps.

    A tile has a row for each pair of a line of taps and one of R lines of the output.
    """
    groups = groups // unit * unit
    program, left = take(tl.program_id(0), tl.cdiv(kernel_w, W))
    program, above = take(program, tl.cdiv(kernel_h, H))
    stretch, tile_p = take(program, tl.cdiv(groups * outputs, P))
    first, images = _images(stretch, total, share)
    p, left, above = tile_p * P + tl.arange(0, P), left * W, above * H
    w = left * dilation_w - pad_w
    reach = tl.minimum(width, w + (out_width - 1) * stride_w + (W - 1) * dilation_w + 1)
    tap = above + tl.arange(0, H * R) // R
    real = (tap < kernel_h)[:, None] & (p < groups * outputs)[None, :]
    found = (tl.zeros((H * R, P), dtype=tl.float32),) * W
    for image in range(first, first + images):
        factor, end = None, out_height
        if factors is not None:
            factor = tl.load(factors + image)
            end = tl.where(factor == 0, 0, out_height)
        for top in range(0, end, R):
            line = top + tl.arange(0, H * R) % R
            inside = real & (line < out_height)[:, None]
            at = (image * out_height + line) * out_width * (groups * outputs)
            g_lines = g + at[:, None] + p[None, :], inside, out_width, groups * outputs
            line = line * stride_h + tap * dilation_h - pad_h
            inside &= ((line >= 0) & (line < height))[:, None]
            at = (image * height + line) * width * groups
            x_lines = x + at[:, None] + (p // outputs)[None, :], inside, reach, groups
            found = _along(found, factor, x_lines, g_lines, w, stride_w, dilation_w, W, ahead)
    tap = above + tl.arange(0, H)
    at = (stretch.to(tl.int64) * kernel_h + tap) * kernel_w + left
    at = at[:, None] * (groups * outputs) + p[None, :]
    real = (tap < kernel_h)[:, None] & (p < groups * outputs)[None, :]
    for k in tl.static_range(W):
        sums = tl.sum(tl.reshape(found[k], (H, R, P)), axis=1)
        real_k = tl.where(left + k < kernel_w, real, False)
        tl.store(out + at + k * (groups * outputs), sums, mask=real_k)


@triton.jit
@no_type_check
def _along(
    found, factor, x, g, left, stride: tl.constexpr, dilation,
    W: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """The sums found so far and those along some lines, for W taps, of which the first is `left`.

    From a column to that which is `dilation` further, each tap comes to where another was, but for
    the last ones: as many as the stride. Only what these meet is read, some columns ahead.
    """
    kept: tl.constexpr = max(W - stride, 0)
    steps: tl.constexpr = (W - 1) // stride + 1  # after which nothing is kept: no register is moved
    for phase in range(0, dilation):
        window = (tl.zeros_like(found[0]),) * (W - kept)
        for tap in tl.static_range(kept):
            window += (_column(x, phase * stride + tap * dilation + left).to(tl.float32),)
        read = ()
        for step in tl.static_range(ahead):
            read += _meeting(x, g, phase + step * dilation, left, stride, dilation, kept, W)
        for column in range(phase, g[2], steps * dilation):
            for step in tl.static_range(steps):
                further = column + (step + ahead) * dilation
                read += _meeting(x, g, further, left, stride, dilation, kept, W)
                window = window[W - kept :]
                for k in tl.static_range(1, 1 + W - kept):
                    window += (read[k].to(tl.float32),)
                b = read[0].to(tl.float32)
                if factor is not None:
                    b *= factor
                sums = ()
                for tap in tl.static_range(W):
                    sums += (found[tap] + window[tap] * b,)
                found, read = sums, read[1 + W - kept :]
    return found


@triton.jit
@no_type_check
def _meeting(
    x, g, column, left, stride: tl.constexpr, dilation, kept: tl.constexpr, W: tl.constexpr
):
    """A column of the output gradient, and those of the input that the last taps meet there."""
    found = (_column(g, column),)
    for tap in tl.static_range(kept, W):
        found += (_column(x, column * stride + tap * dilation + left),)
    return found


@triton.jit
@no_type_check
def _column(lines, w):
    """Column w of some lines (where they start, which are real, their width, a column's step)."""
    start, real, width, step = lines
    real = tl.where((w >= 0) & (w < width), real, False)
    return tl.load(start + w * step, mask=real, other=0.0)


@triton.jit
@no_type_check
def take(number, count):
    """The number without its last digit, and that digit: one of `count`."""
    return number // count, number % count


@triton.jit
@no_type_check
def _begin(stretch, total, share, size, T: tl.constexpr):
    """A stretch's first image, the steps of T positions through all its images, an image's size."""
    first, images = _images(stretch, total, share)
    return first, images * tl.cdiv(size, T), size


@triton.jit
@no_type_check
def _images(stretch, total, share):
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
