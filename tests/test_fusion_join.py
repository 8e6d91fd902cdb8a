"""The mode ``join``, of residual sums that the convolution which reads them first makes on its way: where it may be."""

from __future__ import annotations

import itertools

import minidl as m
from minidl import fusion, models
from minidl.cuda.convolution import conv2d_join
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN
from minidl.fusion import cost
from minidl.fusion.plans import candidates, modes_of, way_of
from minidl.precision import precision

H200 = BUILT_IN["H200"]


def test_a_1x1_convolution_may_make_a_sum_that_it_reads_first():
    """Without stride, bias and groups; with a ReLU over the sum, at the summand that comes first."""

    def site(above=lambda x: m.ReLU(name="out")(x), before=lambda x: None, after=lambda x: None, bn="bn", **options):
        graph = m.Graph()
        x = m.Conv2d(3, 16, 1, name="first")(graph.input((6, 6, 3)))
        x = above(
            m.Add()(
                m.BatchNorm2d(16, name="bn")(x), m.BatchNorm2d(16, name="other")(m.Conv2d(16, 16, 1, name="side")(x))
            )
        )
        others = [before(x)]
        y = m.Conv2d(16, 4, **{"kernel_size": 1, "bias": False} | options, name="reader")(x)
        others.append(after(x))
        graph.output(m.Concat()(y, *filter(None, others)) if any(others) else y)
        return {found.name: found for found in fusion.find_sites(graph)}[bn]

    assert site().ahead == "out" and "join" in modes_of(fusion.choose([site()], "bnff").sites["bn"])
    assert site(after=lambda x: m.ReLU()(x)).ahead == "out"
    for other in (
        {"kernel_size": 3, "padding": 1}, {"stride": 2}, {"bias": True}, {"groups": 2}, {"padding": 1},
        {"above": lambda x: m.SiLU()(x)}, {"above": lambda x: x}, {"before": lambda x: m.ReLU()(x)}, {"bn": "other"},
    ):  # fmt: skip
        assert site(**other).ahead is None, other
        assert "join" not in {mode for way in candidates(site(**other)) for mode in modes_of(way)}


def test_it_spares_a_pass_where_there_is_a_kernel_for_it():
    """So the model has it there, and nowhere else."""
    machine = cost.Machine.of(H200)
    for storage, channels, filters in itertools.product(
        ("bf16", "fp16", "fp32"), (64, 96, 128, 256, 512, 1024), (32, 64, 128, 256, 512)
    ):
        conv = convolution("test", (2, 8, 8, channels), (filters, 1, 1, channels), (1, 1), (0, 0), (1, 1), 1)
        there = conv2d_join.applies(conv, {"bf16": 1, "fp16": 2, "fp32": 0}[storage], H200)
        layer = m.Conv2d(channels, filters, 1, bias=False, name="conv")
        assert machine.does(layer, "join", precision(storage)) == there, (storage, channels, filters)
        assert not cost.Machine.of(BUILT_IN["A100"]).does(layer, "join", precision(storage))
    graph = models.build("resnet50", (64, 64, 3), 10)
    sites = [site for site in fusion.find_sites(graph) if site.ahead]
    plan = cost.heuristic(graph, sites, precision("bf16"), machine)
    assert [site.ahead for site in sites if "join" in modes_of(plan.sites[site.name])] == [
        *(f"layer1.{i}.relu_out" for i in range(3)), *(f"layer2.{i}.relu_out" for i in range(4)),
        *(f"layer3.{i}.relu_out" for i in range(5)),
    ]  # fmt: skip
    for site in sites:
        way = fusion.choose([site], "gradients").sites[site.name]
        joined = way_of({*modes_of(way), "join"})
        spared = fusion.site_cost(site, way, 1, 2).forward - fusion.site_cost(site, joined, 1, 2).forward
        assert spared == 1
