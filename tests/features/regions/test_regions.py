"""Equal blocks are compiled once inside of one graph, and compute what they did."""

import operator

import pytest
import torch
from support.models import Block, Stack, assert_same_step, batch_of, optimizers_of, shard
from support.pass_graphs import assert_text
from support.region_models import (
    WIDTH,
    Autocast,
    BatchNorm,
    Branches,
    BreaksTheGraph,
    CallsAnOperator,
    ChangesABuffer,
    Checkpointed,
    DetachesInside,
    Dropout,
    Embeds,
    ForLogging,
    HasANorm,
    InAutocast,
    Inverts,
    Loops,
    Marked,
    Model,
    Plain,
    PostNorm,
    ReadsOutsideOfItsCheckpoint,
    ReturnsAView,
    ReturnsAWeight,
    ReturnsWeights,
    Rotates,
    SavesNothing,
    SavesProducts,
    Splits,
    TakesAPower,
    TakesASize,
    Tied,
    TwoResults,
    UsedTwice,
    WithoutGradient,
    WithoutResidual,
    WritesInPlace,
)
from torch import nn
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.graph.alias import is_view
from deepcompile_zero3.graph.calls import calls_by_region
from deepcompile_zero3.graph.metadata import fqns_of
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.torch_release import RELEASE


def _freeze(*names):
    def prepare(model):
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(False)

    return prepare


def _contract_of_its_own(model):
    for parameter in model.blocks.parameters():
        parameter.grad_dtype = torch.bfloat16


def _step(
    regions,
    classes,
    *,
    build=Model,
    prepare=None,
    batches=((8, WIDTH),),
    dynamic=None,
    autocast=False,
    inductor=False,
    **kwargs,
):
    """Returns what steps leave in a model, and how often its graphs call each region."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(*classes)
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    if prepare is not None:
        prepare(model)
    options = {"inductor": inductor, "regions": regions}
    run = torch.compile(model, backend="zero3", dynamic=dynamic, options=options)
    left = []
    with capture_graphs() as graphs:
        for shape in batches:
            torch.manual_seed(shape[0])
            batch = torch.randn(shape, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = run(batch)
            if isinstance(loss, tuple):
                loss, rest = loss
                left += rest
            loss.backward()
            left += [loss.detach(), batch.grad]
    left += [None if p.grad is None else p.grad.to_local() for p in model.parameters()]
    left += model.buffers()
    return left, [list(map(_calls, graphs.forward)), list(map(_calls, graphs.backward))]


def _calls(graph):
    """Returns how often a graph calls each of its regions, whose results share no memory."""
    calls = []
    for name, of_region in calls_by_region(graph.graph_module).items():
        calls.append(len(of_region))
        region = graph.graph_module.get_submodule(name).graph
        results = [node for node in region.output_node().args[0] if node is not None]
        assert len(set(results)) == len(results)
        for node in results:
            assert node.op != "placeholder"
            is_one_of_several = node.target is operator.getitem
            assert not is_view(node.all_input_nodes[0] if is_one_of_several else node)
    return sorted(calls)


needs_scan_of_weights = pytest.mark.skipif(
    RELEASE < (2, 13), reason="this torch refuses a scan that reads weights"
)
ONE_REGION = [[[3]], [[3]]]  # in forward and backward, called three times
NONE = [[[]], [[]]]
TWICE = [[[3], [3]], [[3], [3]]]  # two graphs: one of the first size, one of any
ROWS = {"batches": ((8, WIDTH), (6, WIDTH), (5, WIDTH))}
SEQUENCES = {"batches": ((2, 8, WIDTH), (2, 6, WIDTH))}


@pytest.mark.parametrize(
    ("classes", "settings", "calls"),
    [
        ([Plain] * 3, {}, ONE_REGION),
        pytest.param(
            [Plain, TwoResults, Plain, TwoResults], {}, [[[2, 2]], [[2, 2]]], marks=pytest.mark.more
        ),
        pytest.param([Plain, TwoResults, Dropout], {}, NONE, marks=pytest.mark.long),
        ([Dropout] * 3, {}, ONE_REGION),
        ([Tied] * 3, {}, ONE_REGION),
        pytest.param([Embeds] * 3, {}, ONE_REGION, marks=pytest.mark.long),
        pytest.param([WithoutResidual] * 3, {}, ONE_REGION, marks=pytest.mark.long),
        pytest.param([PostNorm] * 3, {}, ONE_REGION, marks=pytest.mark.long),
        pytest.param([PostNorm] * 3, SEQUENCES, TWICE, marks=pytest.mark.more),
        pytest.param([Plain] * 3, SEQUENCES | {"dynamic": True}, None, marks=pytest.mark.long),
        ([Checkpointed] * 3, {}, ONE_REGION),
        pytest.param([ReadsOutsideOfItsCheckpoint] * 3, {}, ONE_REGION, marks=pytest.mark.more),
        pytest.param([Checkpointed] * 3, {"autocast": True}, ONE_REGION, marks=pytest.mark.long),
        pytest.param([Plain] * 3, ROWS, TWICE, marks=pytest.mark.long),
        pytest.param(
            [Plain] * 3, {"reshard_after_forward": False}, ONE_REGION, marks=pytest.mark.long
        ),
        pytest.param(
            [Plain] * 3,
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
            ONE_REGION,
            marks=pytest.mark.more,
        ),
        ([Plain] * 3, {"prepare": _contract_of_its_own}, NONE),
        pytest.param([UsedTwice] * 3, {}, ONE_REGION, marks=pytest.mark.more),
        pytest.param([Splits] * 3, {}, ONE_REGION, marks=pytest.mark.long),
        pytest.param(
            [Plain] * 3,
            {"prepare": _freeze("blocks.0.a", "blocks.1.a", "blocks.2.a")},
            ONE_REGION,
            marks=pytest.mark.more,
        ),
        ([Plain] * 4, {"prepare": _freeze("blocks.0", "blocks.1")}, [[[2, 2]], [[2, 2]]]),
        pytest.param([BatchNorm] * 3, {}, NONE, marks=pytest.mark.long),
        ([ChangesABuffer] * 3, {}, NONE),
        pytest.param([WritesInPlace] * 3, {}, NONE, marks=pytest.mark.more),
        pytest.param([Autocast] * 3, {}, NONE, marks=pytest.mark.more),
        pytest.param([Plain] * 3, {"build": InAutocast}, NONE, marks=pytest.mark.more),
        pytest.param([WithoutGradient] * 3, {}, NONE, marks=pytest.mark.more),
        ([ReturnsAView] * 3, {}, NONE),
        ([ReturnsAWeight] * 3, {"build": ReturnsWeights}, NONE),
        ([Branches] * 3, {}, ONE_REGION),
        ([Rotates] * 3, {}, NONE),
        ([Inverts] * 3, {}, NONE),
        ([TakesAPower] * 3, {}, NONE),
        ([HasANorm] * 3, {}, None),
        ([CallsAnOperator] * 3, {}, NONE),
        pytest.param([Loops] * 2, {}, None, marks=needs_scan_of_weights),
        pytest.param([ForLogging] * 3, {}, NONE, marks=pytest.mark.long),
        pytest.param([DetachesInside] * 3, {}, NONE, marks=pytest.mark.more),
        pytest.param([TakesASize] * 3, SEQUENCES | {"dynamic": True}, None, marks=pytest.mark.long),
        ([SavesProducts, SavesNothing] * 2, {}, [[[2, 2]], [[2, 2]]]),
        pytest.param([BreaksTheGraph] * 2, {}, [[[], []], [[], []]], marks=pytest.mark.more),
    ],
)
def test_a_region_computes_what_its_blocks_did(one_rank, classes, settings, calls):
    left, found = _step(True, classes, **settings)
    expected, without = _step(False, classes, **settings)
    assert calls is None or found == calls
    assert not any(number for direction in without for graph in direction for number in graph)
    _assert_equal(left, expected, atol=0, rtol=0)


def _assert_equal(left, expected, **tolerance):
    assert len(left) == len(expected)
    for actual, whole in zip(left, expected, strict=True):
        if whole is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, whole, **tolerance)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("settings", [{}, pytest.param(SEQUENCES, marks=pytest.mark.long)])
def test_inductor_reuses_no_memory_that_a_region_shares(one_rank, settings):
    classes = [PostNorm] * 3 + [Plain] * 3 + [PostNorm]
    left, found = _step(True, classes, inductor=True, **settings)
    expected, _ = _step(False, classes, inductor=True, **settings)
    assert found[0][0] == [3, 4]
    _assert_equal(left, expected)


@pytest.mark.inductor
def test_calls_of_a_region_get_the_same_strides_where_inductor_pads(one_rank):
    model = Stack(width=1040, depth=3)  # rows of 130 * 32 bytes, which are padded to 128
    model, reference = shard(model, model.blocks)
    config = {"disable_padding_cpu": False}  # as on a GPU
    run = torch.compile(model, backend="zero3", options={"inductor_config": config})
    padded = metrics.num_comprehensive_padding
    batch, optimizers = batch_of(2, 1040), optimizers_of(model, reference)
    with fresh_cache():  # nothing is padded where compiled code is loaded
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    assert metrics.num_comprehensive_padding > padded


@pytest.mark.parametrize("regions", [True, False])
def test_regions_that_the_user_marks_gather_again(one_rank, regions):
    left, found = _step(regions, [Marked] * 3)
    expected, _ = _step(False, [Plain] * 3)
    assert all(sum(calls) == 3 for direction in found for calls in direction)
    _assert_equal(left, expected)


def test_a_graph_shows_a_block_once(one_rank):
    model = Stack(width=4)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    run = torch.compile(model, backend="zero3", options={"inductor": False, "regions": True})
    with capture_graphs() as graphs:
        run(torch.randn(2, 4, requires_grad=True)).sum().backward()
    lines = graphs.forward[0].text.splitlines() + graphs.backward[0].text.splitlines()
    shown = [line for line in lines if "FSDPBlock" in line or line.startswith("    ")]
    text = "\n".join(f"{line:.78}" for line in shown)
    assert_text(
        graphs.forward[0].graph_module,
        """\
        invoke_subgraph_4 = partitioned_fw_FSDPBlock_0_0(primals_3, blocks_0_norm_weig
        invoke_subgraph_6 = partitioned_fw_FSDPBlock_0_0(getitem_43, blocks_1_norm_wei
        partitioned_fw_FSDPBlock_0_0, called 2 times:
            primals_0: f32[2, 4]
            primals_1: f32[4]
            primals_2: f32[4]
            primals_3: f32[8, 4]
            primals_4: f32[8]
            primals_5: f32[4, 8]
            primals_6: f32[4]
            native_layer_norm = aten.native_layer_norm(primals_0, [4], primals_1, prim
            getitem: f32[2, 4] = getitem(native_layer_norm, 0)
            getitem_1: f32[2, 1] = getitem(native_layer_norm, 1)
            getitem_2: f32[2, 1] = getitem(native_layer_norm, 2)
            t: f32[4, 8] = aten.t(primals_3)
            addmm: f32[2, 8] = aten.addmm(primals_4, getitem, t)
            gelu: f32[2, 8] = aten.gelu(addmm)
            t_1: f32[8, 4] = aten.t(primals_5)
            addmm_1: f32[2, 4] = aten.addmm(primals_6, gelu, t_1)
            add: f32[2, 4] = aten.add.Tensor(primals_0, addmm_1)
            return [add, getitem, getitem_1, getitem_2, addmm, gelu]
        invoke_subgraph_7 = partitioned_bw_FSDPBlock_0_0(getitem_43, blocks_1_norm_wei
        invoke_subgraph_5 = partitioned_bw_FSDPBlock_0_0(primals_3, blocks_0_norm_weig
        partitioned_bw_FSDPBlock_0_0, called 2 times:
            primals_0: f32[2, 4]
            primals_1: f32[4]
            primals_2: f32[4]
            primals_3: f32[8, 4]
            primals_5: f32[4, 8]
            getitem: f32[2, 4]
            getitem_1: f32[2, 1]
            getitem_2: f32[2, 1]
            addmm: f32[2, 8]
            gelu: f32[2, 8]
            tangents_0: f32[2, 4]
            t_1: f32[8, 4] = aten.t(primals_5)
            t_2: f32[4, 8] = aten.t(t_1)
            mm: f32[2, 8] = aten.mm(tangents_0, t_2)
            sum_1: f32[1, 4] = aten.sum.dim_IntList(tangents_0, [0], True)
            gelu_backward: f32[2, 8] = aten.gelu_backward(mm, addmm)
            t: f32[4, 8] = aten.t(primals_3)
            t_6: f32[8, 4] = aten.t(t)
            mm_2: f32[2, 4] = aten.mm(gelu_backward, t_6)
            sum_2: f32[1, 8] = aten.sum.dim_IntList(gelu_backward, [0], True)
            native_layer_norm_backward = aten.native_layer_norm_backward(mm_2, primals
            getitem_3: f32[2, 4] = getitem(native_layer_norm_backward, 0)
            getitem_4: f32[4] = getitem(native_layer_norm_backward, 1)
            getitem_5: f32[4] = getitem(native_layer_norm_backward, 2)
            add_1: f32[2, 4] = aten.add.Tensor(tangents_0, getitem_3)
            return [add_1, getitem_4, getitem_5, None, sum_2, None, sum_1, gelu_backwa
        """,
        text,
    )


def _trained(regions, transport):
    """Returns the collectives of three steps; compares training with one process."""
    model = Stack(width=32, depth=4)
    model, reference = shard(model, model.blocks, transport=transport, reshard_after_forward=True)
    options = {"inductor": False, "regions": regions, "gather_bucket_mb": 0.01}
    run = torch.compile(model, backend="zero3", fullgraph=True, options=options)
    optimizers = optimizers_of(model, reference)
    with record_collectives() as log:
        for seed in range(3):
            batch = batch_of(4, 32, seed=seed).requires_grad_()
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return [(c.op, c.params, c.nbytes) for c in log]


@pytest.mark.first(transport="c10d")
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_the_collectives_are_those_of_the_whole_graph(run_ranks, transport):
    with_regions = run_ranks(2, _trained, True, transport)
    assert with_regions == run_ranks(2, _trained, False, transport)


def test_gathers_start_ahead_of_the_region_before(one_rank):
    model = Stack(width=32, depth=3)  # a block has 16 KiB and takes two gathers
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    options = {"inductor": False, "regions": True, "gather_bucket_mb": 0.01}
    with capture_graphs() as graphs:
        torch.compile(model, backend="zero3", options=options)(torch.randn(2, 32)).sum().backward()
    nodes = list(graphs.forward[0].graph_module.graph.nodes)
    starts = [i for i, n in enumerate(nodes) if n.target is ops.all_gather_start.default]
    (calls,) = calls_by_region(graphs.forward[0].graph_module).values()
    for block, call in enumerate(calls[:-1]):
        needed = {name for n in nodes[: nodes.index(call)] for name in _gathers(n)}
        for name in ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias"):
            assert f"blocks.{block + 1}.{name}" in needed
    assert len(starts) > 4


def _gathers(node):
    return fqns_of(node) if node.target is ops.all_gather_start.default else []


@pytest.mark.inductor
def test_kernels_do_not_grow_with_the_number_of_blocks(one_rank):
    kernels = {}
    for depth in (2, 6):
        torch._dynamo.reset()
        metrics.reset()
        model = nn.Sequential(*(Block(8) for _ in range(depth)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        config = {"force_disable_caches": True}
        run = torch.compile(model, backend="zero3", options={"inductor_config": config})
        run(torch.randn(2, 8, requires_grad=True)).sum().backward()
        kernels[depth] = metrics.generated_kernel_count
    assert kernels[2] == kernels[6] > 0
