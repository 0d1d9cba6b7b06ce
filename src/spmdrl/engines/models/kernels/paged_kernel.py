"""Attention of one query per row over a paged cache, in Triton: each key and value is read once, in place.

A row's positions are cut in chunks of fixed size, attended by separate programs, and merged in order. So a row's
rounding doesn't depend on what is beside it, and few rows still keep a device busy.

Shape letters: `B` rows, `C` blocks of a table, `J` key and value heads, `F` query heads that share one, `K` head size
of queries and keys, `U` head size of values. The cache is [blocks, J, block size, K or U].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl.engines.models.kernels.packed import Sinks, Window

# Positions of a program: enough that reading them outweighs writing its part of the result.
_CHUNK = 256
# Positions read at once, and the least size of a matrix product's operands on tensor cores.
_TILE, _LARGEST_HEAD = 64, 256
_LEAST_LANES = 16


def paged_attention(
    q_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BC: Tensor,
    lengths_B: Tensor,
    window: Window = None,
    sinks_H: Sinks = None,
) -> Tensor:
    """Compute `ops.paged_attention`."""
    num_rows, num_queries, key_size = q_BHK.shape
    _, num_heads, block_size, value_size = values.shape
    num_chunks = triton.cdiv(tables_BC.shape[1] * block_size, _CHUNK)
    if window is not None:
        # So many begin or end within a window.
        num_chunks = min(num_chunks, triton.cdiv(window - 1, _CHUNK) + 1)
    out = q_BHK.new_empty(num_rows, num_queries, value_size)
    parts = q_BHK.new_empty((num_rows, num_queries, num_chunks, value_size), dtype=torch.float32)
    # Of each part: the largest score, and the sum of exponentials relative to it.
    bounds = q_BHK.new_empty((num_rows, num_queries, num_chunks, 2), dtype=torch.float32)
    _attend_chunks[(num_rows, num_heads, num_chunks)](
        q_BHK, keys, values, tables_BC, lengths_B, parts, bounds,
        key_size**-0.5, q_BHK.stride(0), q_BHK.stride(1), tables_BC.stride(0), num_chunks,
        num_heads, num_queries // num_heads, key_size, value_size, block_size,
        *(max(triton.next_power_of_2(n), _LEAST_LANES) for n in (num_queries // num_heads, key_size, value_size)),
        _CHUNK,
        # Keys and values of a tile must fit in shared memory.
        _TILE if max(key_size, value_size) <= _LARGEST_HEAD else _TILE // 2, window,
    )  # fmt: skip
    _merge_chunks[(num_rows, num_queries)](
        parts, bounds, lengths_B, sinks_H, out,
        num_chunks, value_size, triton.next_power_of_2(value_size), _CHUNK, window, sinks_H is not None,
    )  # fmt: skip
    return out


@triton.jit
def _attend_chunks(
    queries, keys, values, tables, lengths, parts, bounds,
    scale, row_stride, head_stride, table_stride, num_chunks,
    NUM_HEADS: tl.constexpr, NUM_SHARING: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    start = (first // CHUNK + chunk) * CHUNK
    if start < length:
        sharing, key_lanes, value_lanes = tl.arange(0, QUERIES), tl.arange(0, KEY_LANES), tl.arange(0, VALUE_LANES)
        query_heads = head * NUM_SHARING + sharing
        is_query, is_key, is_value = sharing < NUM_SHARING, key_lanes < KEY_SIZE, value_lanes < VALUE_SIZE
        query = tl.load(
            queries + row * row_stride + query_heads[:, None] * head_stride + key_lanes[None, :],
            mask=is_query[:, None] & is_key[None, :], other=0.0,
        )  # fmt: skip
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        attended = tl.zeros([QUERIES, VALUE_LANES], tl.float32)
        # Every tile has a position that is seen.
        for tile_start in range(tl.maximum(start, first // TILE * TILE), tl.minimum(start + CHUNK, length), TILE):
            positions = tile_start + tl.arange(0, TILE)
            is_cached = (positions >= first) & (positions < length)
            block = tl.load(tables + row * table_stride + positions // BLOCK_SIZE, mask=is_cached, other=0)
            places = (block.to(tl.int64) * NUM_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE
            key = tl.load(
                keys + places[None, :] * KEY_SIZE + key_lanes[:, None],
                mask=is_cached[None, :] & is_key[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(query, key, input_precision="ieee") * scale
            scores = tl.where(is_cached[None, :], scores, -float("inf"))
            risen = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - risen[:, None])
            shrink = tl.exp(largest - risen)
            value = tl.load(
                values + places[:, None] * VALUE_SIZE + value_lanes[None, :],
                mask=is_cached[:, None] & is_value[None, :], other=0.0,
            )  # fmt: skip
            product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            attended = attended * shrink[:, None] + product
            total = total * shrink + tl.sum(weights, 1)
            largest = risen
        places = (row * NUM_HEADS * NUM_SHARING + query_heads) * num_chunks + chunk
        tl.store(
            parts + places[:, None] * VALUE_SIZE + value_lanes[None, :], attended,
            mask=is_query[:, None] & is_value[None, :],
        )  # fmt: skip
        tl.store(bounds + places * 2, largest, mask=is_query)
        tl.store(bounds + places * 2 + 1, total, mask=is_query)


@triton.jit
def _merge_chunks(
    parts, bounds, lengths, sinks, out, num_chunks,
    VALUE_SIZE: tl.constexpr, VALUE_LANES: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, query_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, VALUE_LANES)
    place = (row * tl.num_programs(1) + query_head) * num_chunks
    length = tl.load(lengths + row)
    first = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    largest, total = -float("inf"), 0.0
    if HAS_SINKS:
        largest, total = tl.load(sinks + query_head).to(tl.float32), 1.0
    attended = tl.zeros([VALUE_LANES], tl.float32)
    for chunk in range(0, tl.cdiv(length, CHUNK) - first // CHUNK):
        bound, mass = tl.load(bounds + (place + chunk) * 2), tl.load(bounds + (place + chunk) * 2 + 1)
        part = tl.load(parts + (place + chunk) * VALUE_SIZE + lanes, mask=lanes < VALUE_SIZE, other=0.0)
        risen = tl.maximum(largest, bound)
        shrink, grow = tl.exp(largest - risen), tl.exp(bound - risen)
        attended = attended * shrink + part * grow
        total = total * shrink + mass * grow
        largest = risen
    result = (attended / total).to(out.dtype.element_ty)
    tl.store(out + (row * tl.num_programs(1) + query_head) * VALUE_SIZE + lanes, result, mask=lanes < VALUE_SIZE)
