"""Weight gradients of a depthwise convolution, a tile to a program.

The sums are those of `conv_tiles`, but each output has one channel only: there is no matrix
product, and the time goes into reading. So a program has several lines of taps, half of them in
usual kernels, for some channels. They lie side by side in its tiles; the taps of a line move along
the lines of the image, each to where the next one was, so that an input is read once for all taps
of a line.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (Type checkers know nothing of Triton's language.)

from typing import no_type_check

import triton
import triton.language as tl

from sfumato.clipping.kernels.conv_tiles import div_mod, stretch_images


@triton.jit
@no_type_check
def depthwise_tile(
    x, g, out, total, share, channels, outputs, groups,
    height, width, out_height, out_width, kernel_h, kernel_w,
    stride_h, stride_w: tl.constexpr, pad_h, pad_w, dilation_h, dilation_w,
    P: tl.constexpr, R: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ahead: tl.constexpr,
    unit: tl.constexpr, precision: tl.constexpr, on_gpu: tl.constexpr,
):  # fmt: skip
    """The sums of P outputs, each with its one channel, for H lines of W taps.

    A tile has a row for each pair of a line of taps and one of R lines of the output.
    """
    groups = groups // unit * unit
    program, left = div_mod(tl.program_id(0), tl.cdiv(kernel_w, W))
    program, above = div_mod(program, tl.cdiv(kernel_h, H))
    stretch, tile_p = div_mod(program, tl.cdiv(groups * outputs, P))
    first, images = stretch_images(stretch, total, share)
    p, left, above = tile_p * P + tl.arange(0, P), left * W, above * H
    w = left * dilation_w - pad_w
    # Nothing is read beyond what the last output meets: there may be pixels left over.
    reach = tl.minimum(width, w + (out_width - 1) * stride_w + (W - 1) * dilation_w + 1)
    tap = above + tl.arange(0, H * R) // R
    real = (tap < kernel_h)[:, None] & (p < groups * outputs)[None, :]
    found = (tl.zeros((H * R, P), dtype=tl.float32),) * W
    for image in range(first, first + images):
        for top in range(0, out_height, R):
            line = top + tl.arange(0, H * R) % R
            inside = real & (line < out_height)[:, None]
            at = (image * out_height + line) * out_width * (groups * outputs)
            g_lines = g + at[:, None] + p[None, :], inside, out_width, groups * outputs
            line = line * stride_h + tap * dilation_h - pad_h
            inside &= ((line >= 0) & (line < height))[:, None]
            at = (image * height + line) * width * groups
            x_lines = x + at[:, None] + (p // outputs)[None, :], inside, reach, groups
            found = _along(found, x_lines, g_lines, w, stride_w, dilation_w, W, ahead)
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
    found, x, g, left, stride: tl.constexpr, dilation,
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
