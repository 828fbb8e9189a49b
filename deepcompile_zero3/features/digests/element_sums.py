"""Sums over the elements of a tensor of a hash of each one's place and bits.

A place is an index in the full tensor, so that the parts that ranks have add up to the sum of the
full tensor, however it is divided. Sums are modulo 2**64: they have no order and no rounding.

The full tensor is seen as a matrix of words, whose columns are its last dimensions::

    sum = row_keys @ words @ column_keys        int64, modulo 2**64

A word is the bits of an element, or half of the bits if it has eight bytes. Keys are odd numbers
that look random. A change of one bit therefore always changes the sum. Changes of several elements
cancel with a probability of at most 2**-32, as if at random.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from deepcompile_zero3.runtime import _C

# The indices in the full tensor that a rank has along a dimension, in order.
Ranges = tuple[range, ...]

_ROWS = 1 << 62  # added to the index of a row: rows and columns have other keys
_COLUMNS = 256  # in a row, at least, if the tensor has so many elements
_ON_CPU = 1 << 16  # column keys at a time: they stay in a processor's cache
_ELSEWHERE = 1 << 22  # words that are multiplied at a time: enough for a kernel
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


class ElementSums:
    """Computes sums. Tensors with equal places share keys, and all share memory."""

    def __init__(self) -> None:
        self._keys: dict[object, torch.Tensor] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def of(
        self, local: torch.Tensor, shape: Sequence[int], places: Sequence[Ranges]
    ) -> int | torch.Tensor:
        """Returns the sum over the elements of ``local``: elsewhere than on a CPU an int64 tensor
        of no dimensions, for which nobody has waited.

        Args:
            local: a part of a tensor, of any dtype that can be viewed as integers.
            shape: sizes of the full tensor.
            places: for each dimension, the indices that ``local`` has in the full tensor.
        """
        device = local.device
        total: int | torch.Tensor = 0
        if local.numel() == 0:
            return total
        words = local.contiguous().view(-1).view(_WORDS[local.element_size()])
        shape, places = [*shape], [*places]
        if (count := words.numel() // local.numel()) > 1:
            shape.append(count)
            places.append((range(count),))
        split = _first_column_dim(shape)
        sizes = [sum(map(len, ranges)) for ranges in places]
        words = words.view(math.prod(sizes[:split]), -1)
        row_keys = self._keys_of(shape[:split], places[:split], device, _ROWS)
        piece = _ON_CPU if device.type == "cpu" else _ELSEWHERE
        for start, stop, keys in self._columns(shape[split:], places[split:], piece, device):
            some = words[:, start:stop]
            if device.type == "cpu":
                total = total + _C.weighted_sum(some, row_keys, keys)
            else:
                total = total + self._weighted_sum(some, row_keys, keys)
        return total

    def _weighted_sum(
        self, words: torch.Tensor, row_keys: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Returns ``row_keys @ words @ keys`` on any device."""
        rows, width = words.shape
        row_sums = torch.empty(rows, dtype=torch.int64, device=words.device)
        height = max(1, _ELSEWHERE // width)
        for first in range(0, rows, height):
            some = words[first : first + height]
            products = self._buffer(words.device)[: some.numel()].view(some.shape)
            products.copy_(some).mul_(keys)
            torch.sum(products, -1, out=row_sums[first : first + height])
        return row_sums.mul_(row_keys).sum()

    def _columns(
        self, shape: list[int], places: list[Ranges], piece: int, device: torch.device
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (start, stop, keys) of columns, at most ``piece`` at a time."""
        width = math.prod(sum(map(len, ranges)) for ranges in places)
        if width <= piece:
            yield 0, width, self._keys_of(shape, places, device, 0)
        elif len(places) == 1:  # keys of a long vector would need more memory than itself
            start = 0
            for each in places[0]:
                for first in range(0, len(each), piece):
                    some = each[first : first + piece]
                    yield start, start + len(some), _mixed(_indices([shape[0]], [(some,)], device))
                    start += len(some)
        else:
            indices = _indices(shape, places, device)
            for start in range(0, width, piece):
                stop = min(start + piece, width)
                yield start, stop, _mixed(indices[start:stop].clone())

    def _keys_of(
        self, shape: list[int], places: list[Ranges], device: torch.device, first: int
    ) -> torch.Tensor:
        """Returns the keys of places in the product of some dimensions, int64 [places].

        Args:
            first: what is added to each index.
        """
        key = (*shape, *places, device, first)
        if key not in self._keys:
            self._keys[key] = _mixed(_indices(shape, places, device).add_(first))
        return self._keys[key]

    def _buffer(self, device: torch.device) -> torch.Tensor:
        if device not in self._buffers:
            self._buffers[device] = torch.empty(_ELSEWHERE, dtype=torch.int64, device=device)
        return self._buffers[device]


def _first_column_dim(shape: Sequence[int]) -> int:
    """Returns the first of the last dimensions that make a row of the matrix.

    It depends on the full tensor alone.
    """
    width = 1
    for dim in reversed(range(len(shape))):
        width *= shape[dim]
        if width >= _COLUMNS:
            return dim
    return 0


def _indices(shape: Sequence[int], places: Sequence[Ranges], device: torch.device) -> torch.Tensor:
    """Returns indices into the flattened dimensions ``shape``, int64 [places]."""
    flat = torch.zeros(1, dtype=torch.int64, device=device)
    for size, ranges in zip(shape, places, strict=True):
        mine = [torch.arange(each.start, each.stop, device=device) for each in ranges]
        flat = (flat[:, None] * size + torch.cat(mine)).view(-1)
    return flat


def _mixed(indices: torch.Tensor) -> torch.Tensor:
    """Returns odd numbers that look random, in the memory of ``indices``.

    The function is SplitMix64: Steele, Lea and Flood, Fast splittable pseudorandom number
    generators, 2014.
    """
    z = indices.add_(1).mul_(-0x61C8864680B583EB)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1)).bitwise_or_(1)
