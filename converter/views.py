"""Gives parts of checkpoint tensors as views: an expert, a half, every other row, a transposed matrix.

A view takes (tensor, header fields, expert). It returns the Tensors to stack, in Colibri's order of rows, and reads
nothing.
"""

from colibri.errors import ColibriError
from converter.tensor import Quantized, Tensor


def whole(t, h, e):
    return [t]


def expert(t, h, e):
    return [index(t, e)]


def gate_rows(t, h, e):
    return [take(index(t, e), 0, 0, h["ffn"])]


def up_rows(t, h, e):
    return [take(index(t, e), 0, h["ffn"], h["ffn"])]


def first_half(t, h, e):  # [2 * ffn, hidden] of one expert
    return [take(t, 0, 0, h["ffn"])]


def second_half(t, h, e):
    return [take(t, 0, h["ffn"], h["ffn"])]


def even_rows(t, h, e):
    return [take(index(t, e), 0, 0, h["ffn"], 2)]


def odd_rows(t, h, e):
    return [take(index(t, e), 0, 1, h["ffn"], 2)]


def even_columns(t, h, e):  # [E, hidden, 2 * ffn], gate and up alternating; a bias is [E, 2 * ffn]
    return [transposed(take(index(t, e), -1, 0, h["ffn"], 2))]


def odd_columns(t, h, e):
    return [transposed(take(index(t, e), -1, 1, h["ffn"], 2))]


def expert_transposed(t, h, e):
    return [transposed(index(t, e))]


def block(t, h, e):  # [E * ffn, hidden]
    return [take(t, 0, e * h["ffn"], h["ffn"])]


def block_transposed(t, h, e):
    return [transposed(take(t, 0, e * h["ffn"], h["ffn"]))]


def grouped_columns(t, h, e):  # [hidden, E * n] that stands for [E, hidden, n]
    experts, columns = h["num_experts"], t.shape[1] // h["num_experts"]
    if isinstance(t, Quantized) or t.strides != (t.shape[1], 1):
        raise ColibriError(t.storage.where, f"{t.name}: {t.dtype} with strides",
                           "one block of plain floats, which is viewed as one matrix an expert", "save it contiguous")
    shape, strides = (experts, t.shape[0], columns), (t.shape[0] * columns, columns, 1)
    return [transposed(index(Tensor(t.name, t.dtype, shape, strides, t.storage, t.offset), e))]


def grouped_gate(t, h, e):
    return [take(part, 0, 0, h["ffn"]) for part in grouped_columns(t, h, e)]


def grouped_up(t, h, e):
    return [take(part, 0, h["ffn"], h["ffn"]) for part in grouped_columns(t, h, e)]


def row_of_one(t, h, e):  # [1, n]
    return [index(t, 0)]


def rotary_pairs(t, h, e):  # heads that rotate (2i, 2i + 1), reordered to rotate (i, i + half)
    return [part for start in range(0, t.shape[0], h["head_dim"]) for part in _rotary(t, h, start)]


def latent_q(t, h, e):  # each head: unrotated, then rotated; here rotated first, as in every other family
    dim, rest = h["head_dim"], h["head_dim"] - h["rotary_dim"]
    return [part for start in range(0, t.shape[0], dim)
            for part in _rotary(t, h, start + rest) + [take(t, 0, start, rest)]]


def latent_kv_a(t, h, e):
    return [take(t, 0, 0, h["kv_lora_rank"])] + _rotary(t, h, h["kv_lora_rank"])


def latent_kv_b(t, h, e):  # each head: k, then v; here all heads' k, then all heads' v
    k, v = h["head_dim"] - h["rotary_dim"], h["v_head_dim"]
    starts = range(0, t.shape[0], k + v)
    return [take(t, 0, start, k) for start in starts] + [take(t, 0, start + k, v) for start in starts]


def _rotary(t, h, start):
    half = h["rotary_dim"] // 2
    if not h["rope_interleaved"]:
        return [take(t, 0, start, 2 * half)]
    return [take(t, 0, start, half, 2), take(t, 0, start + 1, half, 2)]


def take(t, axis, start, count, step=1):
    """Returns `count` entries of an axis, `step` apart, from `start` on."""
    if isinstance(t, Quantized):
        return t.take(start, count, step)
    axis %= len(t.shape)
    shape, strides = list(t.shape), list(t.strides)
    offset = t.offset + start * strides[axis] * t.numpy_dtype.itemsize
    shape[axis], strides[axis] = count, strides[axis] * step
    return Tensor(t.name, t.dtype, tuple(shape), tuple(strides), t.storage, offset)


def index(t, i):
    if isinstance(t, Quantized):
        return t.index(i)
    offset = t.offset + i * t.strides[0] * t.numpy_dtype.itemsize
    return Tensor(t.name, t.dtype, t.shape[1:], t.strides[1:], t.storage, offset)


def transposed(t):
    if isinstance(t, Quantized):
        raise ColibriError(t.storage.where, f"{t.name}: quantized",
                           "floats: this family stores its transpose, whose scales lie elsewhere")
    return Tensor(t.name, t.dtype, t.shape[::-1], t.strides[::-1], t.storage, t.offset)


# Views that cut one expert out of a tensor of all experts.
EXPERT_VIEWS = (expert, gate_rows, up_rows, even_rows, odd_rows, even_columns, odd_columns, expert_transposed, block,
                block_transposed, grouped_columns, grouped_gate, grouped_up)
