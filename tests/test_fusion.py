"""Batch-norm fusion: sites are found, plans are kept and refused, and any plan computes the same network."""

from __future__ import annotations

import itertools
import json
from math import prod

import numpy as np
import pytest

import minidl as m
from minidl import cli, fusion, models, training
from minidl.cuda.device import BUILT_IN
from minidl.fusion.plans import candidates, modes_of, way_of
from minidl.graph import scope
from minidl.precision import precision as precision_of
from minidl.profile import results
from minidl.value import MaskedGradient, Normalized

BOUND = 2e-6  # in float32, of the largest value: joins round once where their layers round twice


def stack():
    """Batch norms that a ReLU reads: nothing else is rounded, so every plan gives the same bits."""
    graph = m.Graph()
    x = graph.input((8, 8, 3))
    for i, stride in enumerate((1, 2, 1)):
        x = m.Conv2d(x.shape[-1], 6 + i, 3, stride=stride, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(6 + i, name=f"bn{i}", affine=i != 1)(x))
    return graph.output(m.Linear(128, 5, name="fc")(m.Flatten()(x)))


def residual(width=12, first=8):
    """A join of two batch norms, one with the input, and one without a ReLU."""
    graph = m.Graph()
    x = graph.input((6, 6, 3))

    def norm(x, width, name, kernel=3):
        x = m.Conv2d(x.shape[-1], width, kernel, padding=kernel // 2, bias=False, name=f"{name}.conv")(x)
        return m.BatchNorm2d(width, name=f"{name}.bn")(x)

    a = m.ReLU(name="relu0")(norm(x, first, "stem"))
    b = m.Add(name="add1")(norm(a, width, "main1"), norm(a, width, "side1", 1))
    b = m.ReLU(name="relu1")(b)
    c = m.ReLU(name="relu2")(m.Add(name="add2")(b, norm(b, width, "main2")))
    d = m.Add(name="add3")(norm(c, width, "main3"), c)
    return graph.output(m.Linear(36 * width, 5, name="fc")(m.Flatten()(d)))


def wide():
    """The same with channels in multiples of eight, which Hopper's kernels take."""
    return residual(24, 16)


def preactivation(num_classes=5, image_shape=(6, 6, 3)):
    """Sums that a batch norm and a further sum read; a batch norm that two layers read."""
    graph = m.Graph()
    x = m.Conv2d(image_shape[2], 8, 3, padding=1, bias=False, name="stem")(graph.input(image_shape))
    for i in range(2):
        y = m.BatchNorm2d(8, name=f"bn{i}")(x)
        left = m.Conv2d(8, 8, 3, padding=1, bias=False, name=f"conv{i}")(m.ReLU(name=f"relu{i}")(y))
        x = m.Add(name=f"add{i}")(m.BatchNorm2d(8, name=f"post{i}")(left), x if i else y)
    fc = m.Linear(8 * image_shape[0] * image_shape[1], num_classes, name="fc")
    return graph.output(fc(m.Flatten()(m.ReLU(name="last")(x))))


def mobile():
    """Activations other than a ReLU over batch norms, of inverted residuals as small networks have them.

    Their filters see two channels: of one, a batch norm over them would leave little of the scale's gradient below.
    """
    graph = m.Graph()
    x = models.blocks.conv_norm(graph.input((6, 6, 3)), 8, 3, activation=m.LeakyReLU, names=("stem", "bn", "act"))
    for i, activation in enumerate((m.ReLU6, m.SiLU, m.Hardswish)):
        with scope(f"block{i}"):
            with scope("wide"):
                y = models.blocks.conv_norm(x, 24, activation=activation)
            with scope("deep"):
                y = models.blocks.conv_norm(y, 24, 3, groups=12, activation=activation)
            y = models.squeeze_excitation(y, 4, activation=m.SiLU) if i == 1 else y
            with scope("narrow"):
                x = m.Add()(x, models.blocks.conv_norm(y, 8))
    return graph.output(m.Linear(288, 5, name="fc")(m.Flatten()(x)))


def shifted(model, rng):
    """Scales and shifts of the batch norms other than 1 and 0: with these some means are zero but for rounding."""
    state = model.state_dict()
    for layer in model.layers:
        if isinstance(layer, m.BatchNorm2d):
            for spec in layer.specs:
                name = f"{layer.name}.{spec.name}"
                state[name] = state[name] + rng.uniform(0.2, 0.5, state[name].shape).astype(np.float32)
    model.load_state_dict(state)


def run(model, seed=0, steps=2):
    """Outputs, gradients and buffers of some steps, as float64 arrays."""
    rng = np.random.default_rng(seed)
    shifted(model, rng)
    loss, found = m.SoftmaxCrossEntropy(), {}
    for step in range(steps):
        x = rng.standard_normal((5, *model.graph.nodes[0].shape)).astype(model.precision.storage)
        totals = loss.forward(model.forward(model.ops.from_host(x)), model.ops.from_host(rng.integers(0, 5, 5)))
        model.backward(loss.backward(), accumulate=step > 0, send=step == steps - 1)
        found[f"loss {step}"] = np.array(totals.loss)
    for layer in model.layers:
        for spec in layer.specs:
            gradient = model.arena.layer(layer.name).grad(spec.name)
            if gradient is not None:
                found[f"{layer.name}.{spec.name}"] = model.ops.to_host(gradient.view)
        found |= {f"{layer.name}.{name}": model.ops.to_host(b) for name, b in layer.buffers.items()}
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def close(a, b, bound):
    assert a.keys() == b.keys()
    for name, value in a.items():
        scale = max(np.abs(value).max(initial=0.0), 1e-3)
        if name.endswith("running_mean"):  # it may be the rounding of a sum that is zero: small beside the deviation
            scale = max(scale, 0.1 * np.sqrt(a[name.replace("mean", "var")]).max())
        assert np.abs(value - b[name]).max(initial=0.0) <= bound * scale, name


def fused(build, how, ops, **options):
    model = m.Model(build(), device=ops.name, **options)
    fusion.fuse(model, how)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [(), ("conv0.*", "bn0.*"), ("*.weight",)], ids=["all", "top", "shifts"])
def test_a_stack_gives_the_same_bits_fused(ops, precision, frozen):
    options = {"precision": precision, "frozen": frozen}
    close(run(fused(stack, "none", ops, **options)), run(fused(stack, "elementwise", ops, **options)), 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [stack, residual, wide, preactivation])
def test_what_convolutions_do_on_the_way_are_the_passes_of_their_own(ops, build, precision):
    """The same bits where no kernel does it on the way, as for float32."""
    apart, *others = (run(fused(build, how, ops, precision=precision)) for how in list(fusion.PLANS)[1:])
    for taken in others:
        close(apart, taken, 0.0 if ops.name == "cpu" or precision == "fp32" else 2.0**-6)


@pytest.mark.parametrize("build", [stack, residual, wide, preactivation])
def test_a_masked_gradient_is_masked_once(cpu_ops, build, monkeypatch):
    """Where a convolution masks for the ReLU below it, neither that nor the batch norm does; nor takes its sums."""
    masked, summed = [], []
    for name, calls in (("conv2d_backward_data_masked", masked), ("batch_norm_backward_sums", summed)):
        own = getattr(cpu_ops, name)
        monkeypatch.setattr(cpu_ops, name, lambda *a, own=own, calls=calls, **o: calls.append(1) or own(*a, **o))
    model = fused(build, "gradients", cpu_ops)
    takers = [site.taker for site in fusion.find_sites(model.graph) if site.taker]
    run(model, steps=1)
    # The projection's input gradient takes those of the block beside it.
    assert takers and len(masked) == len(takers) == len(summed) - (build in (residual, wide))


def test_only_a_convolution_that_is_asked_takes_statistics(cpu_ops, monkeypatch):
    """In training, where the batch norm has no further pass over its input."""
    model, passes = fused(preactivation, "statistics", cpu_ops), []
    own = cpu_ops.batch_norm_stats
    monkeypatch.setattr(cpu_ops, "batch_norm_stats", lambda x, **o: passes.append(x.shape) or own(x))
    x = np.zeros((2, *model.graph.nodes[0].shape), np.float32)
    model.forward(x)
    assert len(passes) == 1, "bn1 reads a sum, which no convolution writes"
    model.eval().forward(x)
    assert len(passes) == 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen statistics"])
@pytest.mark.parametrize("build", [residual, preactivation, mobile])
def test_any_plan_computes_the_same_network(ops, build, training):
    """Each batch norm fused or not, in every combination; also where no plan would: what is alone is finished later."""
    names = [site.name for site in fusion.find_sites(build())]
    measure = run if training else backward_in_evaluation
    expected = measure(m.Model(build(), device=ops.name).train(training))
    every = itertools.product((False, True), repeat=len(names))
    for ways in itertools.islice(every, 0, None, max(3, 2 ** len(names) // 40 | 1)):
        model = m.Model(build(), device=ops.name).train(training)
        for name, way in zip(names, ways, strict=True):
            model.graph[name].layer.deferred = way
        close(expected, measure(model), BOUND)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("build", [residual, wide, preactivation, mobile])
def test_in_16_bits_fusing_errs_no_more_than_not_fusing(ops, build, precision):
    """Against the same network in float32: a join that rounds once may flip a ReLU, as any rounding does."""
    exact = run(m.Model(build(), device=ops.name))
    plain, *others = (run(fused(build, how, ops, precision=precision)) for how in fusion.PLANS)
    for one in others:
        assert 0 < distance(exact, one) <= 1.25 * distance(exact, plain)


def distance(exact, found):
    """Root mean square over the arrays of their relative errors."""
    errors = [np.linalg.norm(found[name] - value) / np.linalg.norm(value) for name, value in exact.items()]
    return np.sqrt(np.mean(np.square(errors)))


def backward_in_evaluation(model):
    """Fine-tuning with frozen statistics: the running ones are constants, gradients flow."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, *model.graph.nodes[0].shape)).astype(model.precision.storage)
    y = model.forward(model.ops.from_host(x), grad=True)
    model.backward(model.ops.from_host(rng.standard_normal(y.shape).astype(model.precision.storage)))
    found = {"y": np.asarray(model.ops.to_host(y), np.float64)}
    for layer in model.layers:
        for spec in layer.specs:
            view = model.arena.layer(layer.name).grad(spec.name).view
            found[f"{layer.name}.{spec.name}"] = np.asarray(model.ops.to_host(view), np.float64)
    return found


def test_fusing_keeps_no_more_for_the_backward_pass(cpu_ops):
    kept = []
    for how in fusion.PLANS:
        model = fused(lambda: models.build("resnet20", (32, 32, 3), 10), how, cpu_ops)
        model.forward(np.zeros((2, 32, 32, 3), np.float32))
        kept.append(model.store.saved_bytes)
    assert kept[3] == kept[2] == kept[1] <= kept[0]
    sites = fusion.find_sites(model.graph)
    # The outputs of the ReLUs that are not made, in float32.
    assert kept[3] - kept[4] == sum(2 * prod(s.shape) * 4 for s in sites if s.kind == "relu" and s.sole) > 0


def test_inference_is_the_same_and_keeps_nothing(ops, rng):
    x = ops.from_host(rng.standard_normal((3, 6, 6, 3)).astype(np.float32))
    plain, *others = (fused(residual, how, ops).eval() for how in fusion.PLANS)
    expected = ops.to_host(plain.forward(x))
    for one in others:
        np.testing.assert_allclose(ops.to_host(one.forward(x)), expected, rtol=1e-5, atol=1e-6)
        assert one.store.saved_bytes == 0


def test_a_step_that_fails_half_way_leaves_the_model_usable(cpu_ops):
    model, other = (fused(residual, "elementwise", cpu_ops) for _ in range(2))
    model.forward(np.zeros((2, 6, 6, 3), np.float32))
    with pytest.raises(ValueError, match="fc"):
        model.backward(np.zeros((2, 6), np.float32))
    model.load_state_dict(other.state_dict())
    close(run(model), run(other), 0.0)


# -- inference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", fusion.PLANS)
@pytest.mark.parametrize("build", [stack, residual, preactivation])
def test_folding_computes_the_same_and_leaves_the_state_alone(ops, rng, build, how):
    model = fused(build, how, ops)
    run(model)  # running statistics of their own
    x = ops.from_host(rng.standard_normal((3, *model.graph.nodes[0].shape)).astype(np.float32))
    expected = ops.to_host(model.eval().forward(x))
    state = model.state_dict()
    names = fusion.fold(model)
    np.testing.assert_allclose(ops.to_host(model.forward(x)), expected, rtol=1e-4, atol=1e-5)
    after_a_sum = "bn1" if build is preactivation else None
    assert names == [s.name for s in fusion.find_sites(model.graph) if s.name != after_a_sum]
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    model.train().eval()
    np.testing.assert_array_equal(ops.to_host(model.forward(x)), expected)


def test_folding_is_for_inference_only(cpu_ops):
    model = m.Model(stack())
    with pytest.raises(RuntimeError, match="eval"):
        fusion.fold(model)
    fusion.fold(model.eval())
    x = np.ones((2, 8, 8, 3), np.float32)
    before = model.forward(x)
    with pytest.raises(RuntimeError, match="folded for inference"):
        model.forward(x, grad=True)
    state = model.state_dict()
    state["conv0.weight"] = state["conv0.weight"] * 2 + 1
    model.load_state_dict(state)
    other = m.Model(stack()).eval()
    other.load_state_dict(state)
    after = model.forward(x)
    np.testing.assert_array_equal(after, other.forward(x))
    assert not np.array_equal(after, before)


# -- owed masks -----------------------------------------------------------------------------------------------------


def test_an_owed_mask_at_a_plain_layer_is_an_error(cpu_ops):
    layer = m.Flatten()
    layer.forward(np.ones((1, 2, 2, 1), np.float32))
    with pytest.raises(RuntimeError, match="finish"):
        layer.backward(MaskedGradient(np.ones((1, 4), np.float32), y=np.ones((1, 4), np.float32)))


def test_an_owed_mask_is_applied_once(ops, rng):
    x, dy = (rng.standard_normal((7, 4)).astype(np.float32) for _ in range(2))
    moments = np.array([[0.1] * 4, [2.0] * 4], np.float32)
    term = Normalized(ops.from_host(x), ops.from_host(moments), None, None)
    gradient = MaskedGradient(ops.from_host(dy), term=term)
    masked = gradient.finish(ops)
    np.testing.assert_array_equal(ops.to_host(masked), np.where(x > np.float32(0.1), dy, 0))
    assert gradient.finish(ops) is masked and gradient.shape == dy.shape and gradient.dtype == dy.dtype


# -- sites and plans ------------------------------------------------------------------------------------------------


def kinds(graph):
    return {site.name: (site.kind, site.partner, site.first_back) for site in fusion.find_sites(graph)}


def test_sites_of_a_residual_network():
    assert kinds(residual()) == {
        "stem.bn": ("relu", None, True),
        "main1.bn": ("join", "side1.bn", False),
        "side1.bn": ("join", "main1.bn", True),
        "main2.bn": ("join", None, True),
        "main3.bn": ("sum", None, True),
    }


def test_sites_of_a_network_of_other_activations():
    found = kinds(mobile())
    assert {kind for name, (kind, *_) in found.items() if "narrow" not in name} == {"activation"}
    assert {kind for name, (kind, *_) in found.items() if "narrow" in name} == {"sum"}
    for site in fusion.find_sites(mobile()):
        possible = {mode for way in candidates(site) for mode in modes_of(way)}
        beside = {"statistics": site.producer, "gated": site.gated, "lazy": site.lazy}
        assert possible == {"elementwise", *(mode for mode, there in beside.items() if there)}
    assert [site.gated for site in fusion.find_sites(mobile()) if site.gated] == ["block1.deep.2"]


def test_depthwise_convolutions_take_statistics_on_every_gpu():
    """In bfloat16; others by the kernels of Hopper alone."""
    for device, storage in itertools.product(("A100", "H200"), ("bf16", "fp32")):
        graph = models.build("mobilenet_v2", (64, 64, 3), 10)
        plan = fusion.fuse_graph(graph, "auto", precision_of(storage), BUILT_IN[device])
        for site in fusion.find_sites(graph):
            deep = graph[site.producer].layer.groups > 1
            taken = "statistics" in modes_of(plan.sites[site.name])
            assert taken == (storage == "bf16" and (deep or device == "H200")), site.name


def test_an_activation_over_an_unfinished_batch_norm_keeps_nothing_of_its_own(cpu_ops):
    """Those that keep their input need the batch norm's output no more; others share theirs with the next layer. What a
    gate multiplies is not kept either."""
    kept = []
    for how in ("none", "elementwise"):
        model = fused(mobile, how, cpu_ops)
        model.forward(np.zeros((2, *model.graph.nodes[0].shape), np.float32))
        kept.append(model.store.saved_bytes)
    over_norms = [model.graph[site.readers[0]] for site in fusion.find_sites(model.graph) if site.kind == "activation"]
    outputs = [2 * 4 * prod(node.shape) for node in over_norms if isinstance(node.layer, (m.SiLU, m.Hardswish))]
    (gated,) = (4 * 2 * prod(model.graph[site.gated].shape) for site in fusion.find_sites(model.graph) if site.gated)
    assert len(outputs) == 4 and kept[0] - kept[1] == sum(outputs) + gated


def test_sites_that_stand_alone_say_why():
    sites = {site.name: site for site in fusion.find_sites(preactivation())}
    assert sites["bn0"].kind == "alone" and sites["bn0"].why == "read by several layers: relu0, add0"
    assert sites["bn1"].kind == "relu" and sites["post0"].kind == "sum" and sites["post1"].kind == "join"
    graph = m.Graph()
    x = m.BatchNorm2d(3, name="first")(graph.input((4, 4, 3)))
    x = m.BatchNorm2d(2, name="last")(m.Conv2d(3, 2, 1, name="conv")(x))
    whys = [site.why for site in fusion.find_sites(graph.output(x))]
    assert whys == ["read by conv, which needs it finished", "the network's output"]


@pytest.mark.parametrize(
    ("name", "sites", "joins"), [("resnet50", 53, 20), ("densenet121", 121, 0), ("vgg16_bn", 13, 0)]
)
def test_all_batch_norms_of_the_models_are_found(name, sites, joins):
    found = fusion.find_sites(models.build(name, (64, 64, 3), 10))
    assert len(found) == sites and sum(site.kind == "join" for site in found) == joins
    assert not [site for site in found if site.kind == "alone"]


def test_costs_count_passes_by_hand():
    """ResNet-50's first join: 256 channels at 56 x 56, with a projection; bf16, batch 2."""
    sites = {site.name: site for site in fusion.find_sites(models.build("resnet50", (224, 224, 3), 10))}
    size = 2 * 56 * 56 * 256 * 2
    own, partner = sites["layer1.0.downsample.1"], sites["layer1.0.bn3"]
    assert own.partner == partner.name and own.first_back and not partner.first_back
    total = lambda way: [fusion.site_cost(s, way, 2, 2) for s in (own, partner)]  # noqa: E731
    # both statistics 2, both normalisings 4, sum 3, ReLU 2; statistics 2, one pass over two inputs and an output 3
    assert sum(c.forward_bytes for c in total("none")) == 11 * size
    assert sum(c.forward_bytes for c in total("elementwise")) == 5 * size
    # ReLU 3, twice 5; masking by signs with sums 3, then 3, 2 and 3; in float32 the output is read
    assert sum(c.backward_bytes for c in total("none")) == 13 * size
    assert sum(c.backward_bytes for c in total("elementwise")) == 11 * size
    assert sum(fusion.site_cost(s, "elementwise", 2, 4).backward_bytes for s in (own, partner)) == 12 * 2 * size
    assert sum(c.forward_bytes for c in total("elementwise+statistics")) == 3 * size
    # masking reads one input; then 3, 2 and 3
    assert partner.taker == "layer1.1.conv1" and own.taker is None
    mixed = [fusion.site_cost(s, w, 2, 2) for s, w in ((own, "elementwise"), (partner, "elementwise+gradients"))]
    assert sum(c.backward_bytes for c in mixed) == 9 * size
    for site in sites.values():  # each mode spares a pass
        costs = {way: fusion.site_cost(site, way, 2, 2).bytes for way in candidates(site)}
        for way, mode in itertools.product(costs, fusion.MODES):
            fewer = way_of(set(modes_of(way)) - {mode})
            if fewer in costs and fewer != way:
                assert costs[way] < costs[fewer]


def test_plans_round_trip_through_files(tmp_path, cpu_ops):
    model = m.Model(residual())
    plan = fusion.fuse(model, "elementwise")
    plan.save(tmp_path / "plan.json")
    assert fusion.fuse(m.Model(residual()), tmp_path / "plan.json") == plan
    assert fusion.fuse(model, "none").sites == dict.fromkeys(plan.sites, "none")
    assert not any(getattr(layer, "deferred", False) for layer in model.layers)
    assert fusion.fuse(model, "statistics").sites == dict.fromkeys(plan.sites, "elementwise+statistics")
    assert all(layer.statistics for layer in model.layers if isinstance(layer, m.Conv2d))
    fusion.fuse(model, "elementwise")
    assert not any(getattr(layer, "statistics", False) for layer in model.layers)


def test_plans_that_do_not_fit_are_refused_by_name(tmp_path):
    model = m.Model(preactivation())
    own = fusion.choose(fusion.find_sites(model.graph), "elementwise")
    with pytest.raises(TypeError, match=r"fuse: model must be a Model, got Graph .*; Model\(graph"):
        fusion.fuse(model.graph, "auto")
    with pytest.raises(ValueError, match="did you mean 'elementwise'"):
        fusion.fuse(model, "elementwize")
    with pytest.raises(ValueError, match="another network: the plan has 'conv"):
        fusion.fuse(model, fusion.Plan(own.sites | {"conv9": "none"}, own.fingerprint))
    with pytest.raises(ValueError, match="another network: the plan lacks 'post1'"):
        fusion.fuse(model, fusion.Plan({n: w for n, w in own.sites.items() if n != "post1"}, own.fingerprint))
    with pytest.raises(ValueError, match="bn0 cannot be elementwise: it is read by several layers"):
        fusion.fuse(model, fusion.Plan(own.sites | {"bn0": "elementwise"}, own.fingerprint))
    with pytest.raises(ValueError, match="bn1 cannot be statistics: no convolution writes for it alone"):
        fusion.fuse(model, fusion.Plan(own.sites | {"bn1": "statistics"}, own.fingerprint))
    with pytest.raises(ValueError, match="other shapes or readers"):
        fusion.fuse(model, fusion.Plan(own.sites, "0" * 16))
    with pytest.raises(FileNotFoundError):
        fusion.fuse(model, tmp_path / "none.json")
    for text in ("not json", "[]", '{"schema": 2}', '{"schema": 9}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="bad.json"):
            fusion.fuse(model, tmp_path / "bad.json")


# -- commands -------------------------------------------------------------------------------------------------------


def test_fuse_tells_what_a_plan_saves_and_writes_it(tmp_path, capsys):
    path = tmp_path / "plan.json"
    options = ["--model", "resnet50", "--batch", "256", "--copy-gb-per-s", "4200", "--json", str(path)]
    assert cli.main(["fuse", *options, "--plan", "elementwise", "--device", "H200"]) == 0
    text = capsys.readouterr().out
    assert "78.60 GB unfused, 47.58 GB by the plan; at 4200 GB/s 18.71 and 11.33 ms" in text
    assert "layer1.0.bn1" in text and "layer1.0.add, layer1.0.relu_out" in text
    assert fusion.Plan.load(path) == fusion.choose(
        fusion.find_sites(models.build("resnet50", (224, 224, 3), 1000)), "elementwise"
    )
    with pytest.raises(SystemExit):
        cli.main(["fuse", "--model", "vgg16_bn", "--plan", str(path)])
    assert "another network: the plan has 'bn1'" in capsys.readouterr().err
    for rate in ("0", "-3", "nan"):
        with pytest.raises(SystemExit):
            cli.main(["fuse", *options[:5], rate])
        assert "--copy-gb-per-s must be a number above 0, finite, got" in capsys.readouterr().err


def test_training_with_fusion_has_the_curve_of_training_without(tmp_path):
    rows, curves = [], []
    for how in fusion.PLANS:
        options = ["--model", f"{__name__}:preactivation", "--epochs", "1", "--device", "cpu", "--fusion", how]
        rows.append(training.train(cli.parser().parse_args(["train", *options, "--output", str(tmp_path / how)])))
        reports = (tmp_path / how / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(report)["loss"] for report in reports])
    assert len(curves[0]) > 1 and curves[0][-1] < curves[0][0]
    for row, curve in zip(rows[1:], curves[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=2e-3)
        assert row["test_loss"] == pytest.approx(rows[0]["test_loss"], rel=2e-3)


def test_benchmark_rows_name_the_plan(tmp_path):
    path = tmp_path / "rows.json"
    options = ["--model", "resnet20", "--image-size", "8", "--batch", "2", "--device", "cpu", "--seconds", "0.01"]
    assert cli.main(["bench", "model", *options, "--fusion", "elementwise", "--json", str(path)]) == 0
    content = results.load(path)
    plans = {row["layer"]: row["plan"] for row in content["rows"]}
    assert plans["bn1"] == "elementwise" and plans["conv1"] is None
    assert content["setup"]["fusion"] == "elementwise"


def test_a_compiled_step_sees_every_mode_that_a_plan_sets():
    model = m.Model(preactivation())
    seen = set()
    for how in fusion.PLANS:
        fusion.fuse(model, how)
        seen.add(model.modes())
    assert len(seen) == len(fusion.PLANS)
