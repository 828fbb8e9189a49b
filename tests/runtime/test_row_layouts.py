"""The rows that ranks have of what is gathered: any number each."""

import pytest
import torch
import torch.distributed as dist

from deepcompile_zero3 import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.transport.connection import channel_of


def _gathered(offsets, columns, is_transposed):
    """Gathers a matrix of which rank r has the rows from offsets[r] to offsets[r + 1]."""
    rank, rows = dist.get_rank(), offsets[-1]
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    like = whole.T.contiguous().T if is_transposed else whole
    channel = channel_of(dist.group.WORLD, torch.device("cpu"))
    source = _C.Source(
        sizes=list(like.shape),
        strides=list(like.stride()),
        dtype=like.dtype,
        device=like.device,
        rank=rank,
        layout=_C.RowLayout.by_offsets(offsets),
        transport=_C.Messages(channel, channel),
        fqn="matrix",
    )
    source.take(whole[offsets[rank] : offsets[rank + 1]].clone())
    [full] = _C.Gather([source]).finish(fresh=True)
    torch.testing.assert_close(full, whole, rtol=0, atol=0)
    assert full.stride() == like.stride()


@pytest.mark.parametrize("columns", [3, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("offsets", [[0, 1, 5], [0, 5, 5], [0, 0, 5]], ids=str)
def test_ranks_may_have_any_number_of_rows(run_ranks, offsets, is_transposed, columns):
    run_ranks(2, _gathered, offsets, columns, is_transposed)


@pytest.mark.parametrize("offsets", [[], [0], [1, 2], [0, 2, 1]], ids=str)
def test_offsets_of_rows_ascend_from_zero(offsets):
    with pytest.raises(Zero3Error, match=r"must ascend from 0, got \["):
        _C.RowLayout.by_offsets(offsets)


def test_a_layout_has_the_rows_of_the_tensor():
    with pytest.raises(Zero3Error, match="no layout of 4 rows"):
        _C.Source(
            sizes=[3, 2],
            strides=[2, 1],
            dtype=torch.float32,
            device=torch.device("cpu"),
            rank=0,
            layout=_C.RowLayout.chunked(4, 2),
        )


def test_settings_are_a_value_that_is_replaced_as_a_whole():
    settings = _C.Settings(bucket_bytes=1)
    changed = settings.replace(divide_factor=2.0, deferred=True)
    assert (settings.bucket_bytes, settings.divide_factor, settings.deferred) == (1, 1.0, False)
    assert (changed.bucket_bytes, changed.divide_factor, changed.deferred) == (1, 2.0, True)
    with pytest.raises(AttributeError):
        settings.bucket_bytes = 2
    with pytest.raises(TypeError, match="no field 'buckets'"):
        settings.replace(buckets=2)
