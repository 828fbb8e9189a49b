"""``capture_graphs``: what graphs show, in the words of a model, and whose they are."""

import expecttest
import pytest
import torch
from support.command_line import in_new_process
from support.job import needs_a_job
from torch import nn

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 8))
        self.down = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        return torch.sin(x @ self.up) @ self.down


def capture(model, x, **options):
    torch._dynamo.reset()
    with capture_graphs() as graphs:
        torch.compile(model, backend="zero3", options=options)(x).sum().backward()
    return graphs


@needs_a_job
@pytest.mark.smoke
def test_captured_graphs_show_what_is_gathered_and_reduced_where():
    graphs = capture(fully_shard(Mlp()), torch.ones(2, 4), inductor=False, keep_mb=0)

    (forward,) = graphs.forward
    (backward,) = graphs.backward
    expecttest.assert_expected_inline(
        forward.text,
        """\
up: f32[4, 8]
primals_2: f32[2, 4]
down: f32[8, 4]
all_gather: i64[1] = zero3.all_gather_start([up, down])
gathered = zero3.all_gather_wait(all_gather, [up, down])
up_full: f32[4, 8] = getitem(gathered, 0)
down_full: f32[8, 4] = getitem(gathered, 1)
mm: f32[2, 8] = aten.mm(primals_2, up_full)
sin: f32[2, 8] = aten.sin(mm)
mm_1: f32[2, 4] = aten.mm(sin, down_full)
t: f32[8, 2] = aten.t(sin)
t_2: f32[4, 2] = aten.t(primals_2)
return [mm_1, up, down, mm, up, down, t, t_2]""",
    )
    expecttest.assert_expected_inline(
        backward.text,
        """\
up: f32[4, 8]
down: f32[8, 4]
mm: f32[2, 8]
up_1: f32[4, 8]
down_1: f32[8, 4]
t: f32[8, 2]
t_2: f32[4, 2]
tangents_1: f32[2, 4]
all_gather: i64[1] = zero3.all_gather_start([down, up])
mm_2: f32[8, 4] = aten.mm(t, tangents_1)
reduce_grad: f32[0] = zero3.reduce_grad(mm_2, down)  # f32 -> f32 -> f32
gathered = zero3.all_gather_wait(all_gather, [down, up])
down_full: f32[8, 4] = getitem(gathered, 0)
up_full: f32[4, 8] = getitem(gathered, 1)
t_1: f32[4, 8] = aten.t(down_full)
mm_3: f32[2, 8] = aten.mm(tangents_1, t_1)
cos: f32[2, 8] = aten.cos(mm)
mul: f32[2, 8] = aten.mul.Tensor(mm_3, cos)
mm_4: f32[4, 8] = aten.mm(t_2, mul)
reduce_grad_1: f32[0] = zero3.reduce_grad(mm_4, up, reduce_grad)  # f32 -> f32 -> f32
return [None, None, None]""",
    )


@needs_a_job
def test_captured_graphs_are_the_users_to_change():
    model = fully_shard(Mlp())
    x = torch.ones(2, 4)
    with capture_graphs() as graphs:
        compiled = torch.compile(model, backend="zero3", options={"inductor": False})
        expected = compiled(x)
    graph = graphs.forward[0].graph_module.graph
    text = graphs.forward[0].text

    graph.output_node().args = (None,)

    assert graphs.forward[0].text != text
    assert torch.equal(compiled(x), expected)


@needs_a_job
def test_each_block_captures_what_is_compiled_while_it_is_open():
    compiled = torch.compile(fully_shard(Mlp()), backend="zero3", options={"inductor": False})
    x = torch.ones(2, 4)

    with capture_graphs() as outer:
        with capture_graphs() as inner:
            compiled(x)
        compiled(x)  # nothing to compile
        torch._dynamo.reset()
        compiled(x)
    torch._dynamo.reset()
    compiled(x)

    assert len(inner.forward) == 1
    assert len(outer.forward) == 2


@pytest.mark.more
def test_captured_graphs_read_the_same_in_every_process():
    program = """
        import tempfile

        import torch
        import torch.distributed as dist
        from torch import nn

        from deepcompile_zero3 import MixedPrecisionPolicy, capture_graphs, fully_shard

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(8)
                self.up = nn.Linear(8, 16)
                self.down = nn.Linear(16, 8)

            def forward(self, x):
                return x + self.down(torch.relu(self.up(self.norm(x))))

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for module in (model[0], model[1], model):
                fully_shard(module, mp_policy=policy)
            with capture_graphs() as graphs:
                run = torch.compile(model, backend="zero3", options={"inductor": False})
                run(torch.ones(2, 8)).sum().backward()
            for graph in graphs.forward + graphs.backward:
                print(graph.text)
            dist.destroy_process_group()
        """
    texts = [in_new_process(program, PYTHONHASHSEED=seed) for seed in ("1", "2")]

    assert texts[0] == texts[1]
    for name in ("_0_up_weight", "_1_norm_bias", "_2_bias", "bf16[16, 8]", "reduce_grad("):
        assert name in texts[0]
    assert "0x" not in texts[0]


@needs_a_job
def test_a_second_model_has_a_label_before_its_names():
    first, second = fully_shard(Mlp()), fully_shard(Mlp())
    for model, label in ((first, ""), (second, "Mlp:2.")):
        with record_collectives() as log:
            torch.compile(model, backend="zero3", options={"inductor": False})(torch.ones(2, 4))
        assert [c.params for c in log] == [[f"{label}up", f"{label}down"]]
