"""The mode ``lazy``, of batch norms that leave their last backward pass to the convolution below: where it may be."""

from __future__ import annotations

import minidl as m
from minidl import fusion, models
from minidl.fusion.plans import candidates, modes_of, way_of


def test_a_batch_norm_may_be_lazy_over_a_1x1_convolution_alone():
    """Without stride, bias, groups, and where no mask is owed. Whether it adds to others' gradients is told."""

    def site(above=lambda x: m.ReLU()(x), before=lambda x: None, after=lambda x: None, **options):
        graph = m.Graph()
        x = m.Conv2d(3, 8, 1, name="first")(graph.input((6, 6, 3)))
        others = [before(x)]
        options = {"kernel_size": 1, "bias": False} | options
        y = above(m.BatchNorm2d(16, name="bn")(m.Conv2d(8, 16, **options, name="below")(x)))
        y = m.Conv2d(16, 4, 3, padding=1, name="above")(y)
        others.append(after(x))
        graph.output(m.Concat()(y, *filter(None, others)) if any(others) else y)
        return {found.name: found for found in fusion.find_sites(graph)}["bn"]

    assert site().lazy == "bn" and "lazy" in modes_of(fusion.choose([site()], "bnff").sites["bn"])
    assert site(above=lambda x: x).lazy == "bn", "nothing is owed"
    assert site(above=lambda x: m.Add()(x, x)).lazy == "bn"
    assert site(before=lambda x: m.ReLU()(x)).lazy == "bn" and not site(before=lambda x: m.ReLU()(x)).adds
    assert site(after=lambda x: m.ReLU()(x)).lazy == "bn" and site(after=lambda x: m.ReLU()(x)).adds
    for other in (
        {"kernel_size": 3, "padding": 1}, {"stride": 2}, {"bias": True}, {"groups": 2}, {"padding": 1},
        {"above": lambda x: m.SiLU()(x)}, {"above": lambda x: m.Sigmoid()(m.ReLU()(x))},
    ):  # fmt: skip
        assert site(**other).lazy is None, other
        assert "lazy" not in {mode for way in candidates(site(**other)) for mode in modes_of(way)}


def test_of_two_lazy_batch_norms_under_a_sum_the_second_takes_its_own_sums():
    """So there it spares two passes, everywhere else three; of what is pooled one, as its gradient is written once."""
    for site in fusion.find_sites(models.build("resnet50", (64, 64, 3), 10)):
        if site.lazy:
            way = fusion.choose([site], "gradients").sites[site.name]
            lazy = way_of({*modes_of(way), "lazy"})
            spared = fusion.site_cost(site, way, 1, 2).backward - fusion.site_cost(site, lazy, 1, 2).backward
            second = site.partner and site.first_back and site.kind == "join" and not site.point
            assert spared == (1 if site.pooled else 2 if second else 3), site
