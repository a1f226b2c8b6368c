"""Small functions that a generated kernel carries where it needs them: what Triton lacks or defines otherwise than PyTorch.

Each is source text, complete with its decorator; a kernel that does not use one does not hold it.
"""
from __future__ import annotations

from .. import philox

HELPERS: dict[str, str] = {
    "random_numbers": f'''
@triton.jit
def random_numbers(seed, start_m, lane_m, start_n, lane_n, batch, stream):
    # Philox-4x32-{philox.ROUNDS}. One call serves the eight weights whose positions differ in bit 3 of m and n and bit 0 of n. A thread holds
    # eight or four of them, so the compiler finds the calls equal; for that the bits are taken from the lanes alone (tiles start at
    # multiples of 16). Products of 64 bits are two instructions a round, where tl.philox multiplies twice for high and low. The index
    # that changes within a thread enters by exclusive or, so that half of the first three rounds is done outside the loop.
    i = (start_m >> 1) + ((lane_m >> 4 << 3) | (lane_m & 7))
    j = (start_n >> 2) + ((lane_n >> 4 << 2) | (lane_n >> 1 & 3))
    a, b, c, d = tl.cast(batch, tl.uint32), j.to(tl.uint32), tl.cast(stream, tl.uint32), i.to(tl.uint32)
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range({philox.ROUNDS}):
        x = a.to(tl.uint64) * 0xD2511F53
        y = c.to(tl.uint64) * 0xCD9E8D57
        a, b, c, d = (y >> 32).to(tl.uint32) ^ b ^ key_0, y.to(tl.uint32), (x >> 32).to(tl.uint32) ^ d ^ key_1, x.to(tl.uint32)
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    odd_i, odd_j = (lane_m & 8) != 0, (lane_n & 8) != 0
    word = tl.where(odd_j, tl.where(odd_i, d, c), tl.where(odd_i, b, a))
    return tl.where((lane_n & 1) != 0, word << 16, word)        # the number is the upper half
''',
    "tanh": '''
@triton.jit
def tanh(x):
    # Near 0 the quotient would cancel: there the series, whose next term is below half a unit in the last place.
    a = tl.abs(x)
    t = tl.exp2(-2.885390081777927 * a)
    far = (1.0 - t) / (1.0 + t)
    s = x * x
    near = a * (1.0 + s * (-0.3333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203))))
    y = tl.where(a < 0.3, near, far)
    return tl.where(x < 0.0, -y, y)
''',
    "log1p": '''
@triton.jit
def log1p(x):
    # The rounding error of 1 + x is undone by the quotient.
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.where(u == float("inf"), u, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0))))
''',
    "pow": '''
@triton.jit
def pow(x, y):
    # |x|^y by base-2 logarithms; the sign as the C library has it: odd exponents keep it, fractional ones have no value.
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    signed = tl.where(odd, -size, tl.where(whole, size, float("nan")))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0.0, signed, size))
''',
    "sign": '''
@triton.jit
def sign(x):
    return (x > 0.0).to(tl.float32) - (x < 0.0).to(tl.float32)
''',
    "sign_int": '''
@triton.jit
def sign_int(x):
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)
''',
    "round": '''
@triton.jit
def round(x):
    # To the nearest whole number, halves to the even one.
    below = tl.floor(x)
    rest = x - below
    odd = tl.floor(below * 0.5) * 2.0 != below
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)
''',
    "floor_divide_int": '''
@triton.jit
def floor_divide_int(a, b):
    # Triton's // rounds towards zero.
    rest = a % b
    return a // b - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)
''',
    "remainder_int": '''
@triton.jit
def remainder_int(a, b):
    # Triton's % has the sign of the dividend.
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
''',
    "floor_divide": '''
@triton.jit
def floor_divide(a, b):
    return tl.floor(a / b)
''',
    "remainder": '''
@triton.jit
def remainder(a, b):
    return a - tl.floor(a / b) * b
''',
}
