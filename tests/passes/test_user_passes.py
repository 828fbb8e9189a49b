"""Passes that users have asked for fit into 60 lines each, and change no number of a training."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from support import user_passes
from support.job import needs_a_job
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from support.pass_graphs import assert_text
from support.user_passes import BlockBuckets, Offload, Prefetch, SelectiveGather
from torch import nn
from torch._inductor.utils import run_and_get_code

from deepcompile_zero3 import capture_graphs, record_collectives
from deepcompile_zero3.graph.metadata import KEPT_OF, fqns_of
from deepcompile_zero3.runtime import WAITS, ops

START = ops.all_gather_start.default
WIDTH = 16
DEPTH = 4
WEIGHT, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH  # bytes
BLOCK = WEIGHT + BIAS


# One run of each pass goes through Inductor, whose schedulers move nodes.
each_way = pytest.mark.parametrize(
    "how", ["interpreted", pytest.param("zero3", marks=pytest.mark.inductor)]
)


def _model():
    """Returns blocks of a layer, each sharded, and an unsharded copy."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return shard(nn.Sequential(*blocks), blocks, transport="c10d")


def _train(how, passes, bucket_bytes=BLOCK, **options):
    """Takes three steps, each equal to that of one process.

    Returns the forward and the backward graph, the gradients and parameters of each step, and the
    parameters of each gather of a step.
    """
    model, reference = _model()
    options |= {"gather_bucket_mb": bucket_bytes / 2**20, "passes": passes}
    run = compiled(model, how, fullgraph=True, **options)
    optimizers = optimizers_of(model, reference)
    numbers = []
    with capture_graphs() as graphs:
        for seed in range(3):
            batch = batch_of(8, WIDTH, seed=seed)
            with record_collectives() as log:
                mean_square(run, mine(batch)).backward()
            mean_square(reference, batch).backward()
            assert_same_gradients(model, reference)
            numbers += [parameter.grad.to_local().clone() for parameter in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(model, reference)
            numbers += [parameter.to_local().clone() for parameter in model.parameters()]
    gathers = [list(each.params) for each in log if each.op == "all_gather"]
    both = *graphs.forward, *graphs.backward
    assert gathers == [fqns for graph in both for fqns in _gathers(graph)]
    return *both, numbers


def _compare(how, passes, bucket_bytes=BLOCK, **options):
    """Trains without the passes and with them. Returns both times' graphs of each direction."""
    *plain, expected = _train(how, [], bucket_bytes, **options)
    *rewritten, actual = _train(how, passes, bucket_bytes, **options)
    assert len(actual) == len(expected) == 3 * 2 * 2 * DEPTH
    assert all(map(torch.equal, actual, expected))
    return list(zip(plain, rewritten, strict=True))


def _gathers(graph):
    """Returns the FQNs of the parameters of each gather."""
    starts = graph.graph_module.graph.find_nodes(op="call_function", target=START)
    return [fqns_of(start) for start in starts]


def _calls(graph, op):
    target = op._opoverload
    return len(graph.graph_module.graph.find_nodes(op="call_function", target=target))


def _waits_ahead(graph):
    """Returns how many waits of others stand between each gather's start and its wait."""
    nodes = [n for n in graph.graph_module.graph.nodes if n.target in (START, *WAITS)]
    waits = [node for node in nodes if node.target in WAITS]
    ahead = [nodes[nodes.index(wait.args[0]) : nodes.index(wait)] for wait in waits]
    return [sum(node.target in WAITS for node in each) for each in ahead]


def _assert_in_line(graph):
    """Asserts that no scheduler may start a gather behind a wait that follows it, or before one
    that it follows.
    """
    started, before = [], set()
    above = {}  # of each node: the starts and waits that it depends on
    for node in graph.graph_module.graph.nodes:
        sources = node.all_input_nodes
        above[node] = {*sources}.union(*(above[source] for source in sources))
        if node.target is START:
            assert before <= above[node], node
            before = {*before, node}
            started.append(node)
        elif node.target in WAITS:
            assert above[node] >= set(started), node
            before = {*started, node}


def _code_order(passes):
    """Returns the starts and waits in the code of Inductor, and in the graphs."""
    model, _ = _model()
    run = compiled(model, "zero3", gather_bucket_mb=BLOCK / 2**20, passes=passes)
    with capture_graphs() as graphs:
        _, codes = run_and_get_code(lambda: mean_square(run, batch_of(4, WIDTH)).backward())
    call = r"torch\.ops\.zero3\.(all_gather_(?:start|wait))\.default\("
    both = [graph.graph_module.graph.nodes for graph in (*graphs.forward, *graphs.backward)]
    nodes = [[node.target._opname for node in n if node.target in (START, *WAITS)] for n in both]
    return [re.findall(call, code) for code in codes], nodes


# ---- starting gathers further ahead


def _prefetch(how, blocks, expected):
    for before, after in _compare(how, [Prefetch(blocks * BLOCK)]):
        assert _gathers(after) == _gathers(before)
        assert _waits_ahead(before) == [0, 1, 1, 1]
        assert _waits_ahead(after) == expected
        assert before.gathered_peak == 2 * BLOCK
        assert after.gathered_peak == max(2, min(int(blocks), DEPTH)) * BLOCK
        _assert_in_line(after)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (1, [0, 1, 1, 1]),  # nothing starts later than without the pass
        pytest.param(2.9, [0, 1, 1, 1], marks=pytest.mark.more),
        (3, [0, 1, 2, 2]),
        pytest.param(1000, [0, 1, 2, 3], marks=pytest.mark.more),
    ],
)
def test_prefetch_starts_as_many_gathers_ahead_as_fit(run_ranks, blocks, expected):
    run_ranks(2, _prefetch, "interpreted", blocks, expected)


@pytest.mark.inductor
def test_prefetch_with_inductor(run_ranks):
    run_ranks(2, _prefetch, "zero3", 3, [0, 1, 2, 2])
    for codes, graphs in run_ranks(2, _code_order, [Prefetch(3 * BLOCK)]):
        assert [len(nodes) for nodes in graphs] == [2 * DEPTH] * 2
        assert codes == graphs


@needs_a_job
def test_graph_of_prefetch():
    model, _ = _model()
    options = {"gather_bucket_mb": BLOCK / 2**20, "passes": [Prefetch(3 * BLOCK)]}
    with capture_graphs() as graphs, torch.no_grad():
        compiled(model, "interpreted", **options)(batch_of(2, WIDTH))
    assert_text(
        graphs.forward[0].graph_module,
        """\
        _0_0_weight: f32[16, 16]
        _0_0_bias: f32[16]
        arg2_1: f32[2, 16]
        _1_0_weight: f32[16, 16]
        _1_0_bias: f32[16]
        _2_0_weight: f32[16, 16]
        _2_0_bias: f32[16]
        _3_0_weight: f32[16, 16]
        _3_0_bias: f32[16]
        all_gather: i64[1] = zero3.all_gather_start([_0_0_weight, _0_0_bias])
        all_gather_1: i64[1] = zero3.all_gather_start([_1_0_weight, _1_0_bias], all_gather)
        all_gather_2: i64[1] = zero3.all_gather_start([_2_0_weight, _2_0_bias], all_gather_1)
        gathered = zero3.all_gather_wait(all_gather, [_0_0_weight, _0_0_bias], all_gather_2)
        getitem: f32[0] = getitem(gathered, 2)
        _0_0_weight_full: f32[16, 16] = getitem(gathered, 0)
        _0_0_bias_full: f32[16] = getitem(gathered, 1)
        t: f32[16, 16] = aten.t(_0_0_weight_full)
        addmm: f32[2, 16] = aten.addmm(_0_0_bias_full, arg2_1, t)
        tanh: f32[2, 16] = aten.tanh(addmm)
        all_gather_3: i64[1] = zero3.all_gather_start([_3_0_weight, _3_0_bias], getitem)
        gathered_1 = zero3.all_gather_wait(all_gather_1, [_1_0_weight, _1_0_bias], all_gather_3)
        getitem_1: f32[0] = getitem(gathered_1, 2)
        _1_0_weight_full: f32[16, 16] = getitem(gathered_1, 0)
        _1_0_bias_full: f32[16] = getitem(gathered_1, 1)
        t_1: f32[16, 16] = aten.t(_1_0_weight_full)
        addmm_1: f32[2, 16] = aten.addmm(_1_0_bias_full, tanh, t_1)
        tanh_1: f32[2, 16] = aten.tanh(addmm_1)
        gathered_2 = zero3.all_gather_wait(all_gather_2, [_2_0_weight, _2_0_bias], getitem_1)
        getitem_2: f32[0] = getitem(gathered_2, 2)
        _2_0_weight_full: f32[16, 16] = getitem(gathered_2, 0)
        _2_0_bias_full: f32[16] = getitem(gathered_2, 1)
        t_2: f32[16, 16] = aten.t(_2_0_weight_full)
        addmm_2: f32[2, 16] = aten.addmm(_2_0_bias_full, tanh_1, t_2)
        tanh_2: f32[2, 16] = aten.tanh(addmm_2)
        gathered_3 = zero3.all_gather_wait(all_gather_3, [_3_0_weight, _3_0_bias], getitem_2)
        _3_0_weight_full: f32[16, 16] = getitem(gathered_3, 0)
        _3_0_bias_full: f32[16] = getitem(gathered_3, 1)
        t_3: f32[16, 16] = aten.t(_3_0_weight_full)
        addmm_3: f32[2, 16] = aten.addmm(_3_0_bias_full, tanh_2, t_3)
        tanh_3: f32[2, 16] = aten.tanh(addmm_3)
        return [tanh_3]
        """,
    )


# ---- choosing what forward keeps


def _selective(how, passes, bucket_bytes=BLOCK):
    (before, after), (gathers_all, gathers_rest) = _compare(how, passes, bucket_bytes)
    assert _gathers(after) == _gathers(before)
    assert _kept(gathers_all) == set()
    kept = _kept(gathers_rest)
    everything = {fqn for fqns in _gathers(gathers_all) for fqn in fqns}
    assert {fqn for fqns in _gathers(gathers_rest) for fqn in fqns} == everything - kept
    return kept


def _kept(backward):
    inputs = backward.graph_module.graph.find_nodes(op="placeholder")
    return {node.meta[KEPT_OF] for node in inputs if KEPT_OF in node.meta}


BIASES = {f"{block}.0.bias" for block in range(DEPTH)}


@each_way
def test_selective_gather_keeps_the_smallest_that_fit(run_ranks, how):
    passes = [SelectiveGather(DEPTH * BIAS + WEIGHT)]
    one, other = run_ranks(2, _selective, how, passes)
    assert one == other
    assert one > BIASES
    assert len(one) == DEPTH + 1


def test_selective_gather_overrules_the_choice_of_the_library(run_ranks):
    assert run_ranks(2, _kept_of_much) == [BIASES] * 2


def _kept_of_much():
    model, _ = _model()
    options = {"keep_mb": 1.0, "passes": [SelectiveGather(DEPTH * BIAS)]}
    with capture_graphs() as graphs:
        mean_square(compiled(model, "interpreted", **options), batch_of(2, WIDTH)).backward()
    return _kept(*graphs.backward)


# ---- activations in files


def _offload(how, numel, folder, stored, loaded):
    passes = [Offload(numel, folder)]
    (_, forward), (_, backward) = _compare(
        how, passes, regions=False
    )  # the results of calls differ
    assert _calls(forward, user_passes.store) == stored
    assert _calls(backward, user_passes.load) == loaded
    nodes = [n for n in backward.graph_module.graph.nodes if n.op != "placeholder"]
    for position, node in enumerate(nodes):
        if node.target is user_passes.load._opoverload and position:
            assert min(map(nodes.index, node.users)) > position + 1

    model, _ = _model()
    run = compiled(model, how, passes=passes, regions=False)
    loss = mean_square(run, batch_of(4, WIDTH))
    assert _mapped_files(folder) == stored
    loss.backward()
    assert _mapped_files(folder) == 0
    assert not any(Path(folder).iterdir())


def _mapped_files(folder):
    """Returns how many files of a folder this process has in memory."""
    return Path("/proc/self/maps").read_text().count(folder)


@each_way
def test_offloaded_activations_are_files_until_backward_needs_them(run_ranks, how, tmp_path):
    # The last activation is the output of the model, of which backward only sees that it is saved.
    run_ranks(2, _offload, how, 4 * WIDTH, str(tmp_path), DEPTH - 1, DEPTH)


def test_small_activations_stay_in_memory(run_ranks, tmp_path):
    run_ranks(2, _offload, "interpreted", 4 * WIDTH + 1, str(tmp_path), 0, 0)


# ---- one gather for each block


def _bucket(how, depth, expected):
    """Returns by how much the peak of gathered bytes grows in the forward and the backward."""
    growth = []
    for before, after in _compare(how, [BlockBuckets(depth)], bucket_bytes=1):
        assert [len(fqns) for fqns in _gathers(before)] == [1] * 2 * DEPTH
        assert [len(fqns) for fqns in _gathers(after)] == expected
        flat = [[name for fqns in _gathers(graph) for name in fqns] for graph in (before, after)]
        assert flat[0] == flat[1]
        _assert_in_line(after)
        growth.append(after.gathered_peak - before.gathered_peak)
    return growth


@each_way
def test_parameters_of_a_block_share_a_gather(run_ranks, how):
    for growth in run_ranks(2, _bucket, how, 1, [2] * DEPTH):
        # With Inductor, a forward region takes all parameters of its block at once, with or without
        # the pass.
        assert growth == [BIAS if how == "interpreted" else 0, BIAS]


def test_blocks_may_be_as_small_as_parameters_or_the_whole_model(run_ranks):
    for growth in run_ranks(2, _bucket, "interpreted", 3, [1] * 2 * DEPTH):
        assert growth == [0, 0]
    for growth in run_ranks(2, _bucket, "interpreted", 0, [2 * DEPTH]):
        assert min(growth) > BLOCK


# ---- all of them


def _all_together(how, folder):
    passes = [
        SelectiveGather(DEPTH * BIAS + WEIGHT),
        BlockBuckets(1),
        Prefetch(3 * BLOCK),
        Offload(1, folder),
    ]
    for before, after in _compare(how, passes, bucket_bytes=1):
        assert len(_gathers(after)) == DEPTH - len(_kept(after) - BIASES)
        assert len(_gathers(before)) == 2 * DEPTH
        assert after.gathered_peak <= 3 * BLOCK + DEPTH * BIAS + WEIGHT
        _assert_in_line(after)


@each_way
def test_all_passes_together(run_ranks, how, tmp_path):
    run_ranks(2, _all_together, how, str(tmp_path))


# ---- their size


def _parts(name):
    """Returns the statements of a class of ``user_passes`` and of what it uses there."""
    pending = ast.parse(inspect.getsource(user_passes)).body
    pending = [s for s in pending if not isinstance(s, ast.Import | ast.ImportFrom)]
    names, parts = {name}, []
    while found := [s for s in pending if names & _defined_by(s)]:
        parts += found
        pending = [statement for statement in pending if statement not in found]
        names |= {n.id for s in found for n in ast.walk(s) if isinstance(n, ast.Name)}
    return parts


def _defined_by(statement):
    """Returns the names that a statement defines, or adds to."""
    match statement:
        case ast.Assign(targets=[ast.Name(name)]) | ast.Expr(
            ast.Call(ast.Attribute(ast.Name(name)))
        ):
            return {name}
    return {getattr(statement, "name", None)}


@pytest.mark.parametrize("each", [Prefetch, SelectiveGather, Offload, BlockBuckets])
def test_a_pass_takes_60_lines_with_its_helpers(each):
    assert len(inspect.getsourcelines(each)[0]) <= 60
    parts = _parts(each.__name__)
    firsts = [min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", []))]) for s in parts]
    lines = [s.end_lineno - first + 1 for s, first in zip(parts, firsts, strict=True)]
    assert sum(lines) <= 60
