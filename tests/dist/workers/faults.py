"""One way in which a job can end, on purpose: ``faults.py OUT NAME DEVICE [RANK]``.

Rank RANK (default 1) misbehaves, the others wait for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import minidl as m
from minidl import data, models
from minidl.backend import get_ops
from minidl.compile import CompiledStep
from minidl.dist import abort, init, roll_call, watchdog
from minidl.dist.nccl import _Followed
from minidl.layers.parallel_conv2d import ChannelParallelConv2d, RowParallelConv2d
from minidl.layers.row_plan import share
from minidl.nonfinite import GradientWatch
from minidl.step import EagerStep
from minidl.train import Trainer

out, name, device = sys.argv[1:4]
comm = init(device)
ops = get_ops(device)
array = ops.from_host(np.ones(1000, "float32"))
misbehaves = comm.rank == int(sys.argv[4] if len(sys.argv) > 4 else 1)


def wait_for_the_others() -> None:
    comm.all_reduce(array)
    ops.synchronize()


def uncaught_exception():
    if misbehaves:
        abort.context.update(step=12, layer="layer1.0.conv2")
        raise ZeroDivisionError("broken on purpose")
    wait_for_the_others()


def exception_behind_another_hook():
    """As torch.distributed has one, which keeps what is printed until the hook before it returns: never."""
    before = sys.excepthook

    def hook(*error):
        stderr, sys.stderr = sys.stderr, io.StringIO()
        before(*error)
        stderr.write(sys.stderr.getvalue())

    sys.excepthook = hook
    uncaught_exception()


def exception_while_a_message_is_awaited():
    work = comm.start_all_reduce(array) if not misbehaves else None
    if misbehaves:
        raise ZeroDivisionError("broken on purpose")
    work.wait()
    ops.synchronize()


def exception_through_finally_close():
    try:
        uncaught_exception()
    finally:
        comm.close()


def exception_in_thread():
    if misbehaves:
        thread = threading.Thread(target=lambda: 1 // 0, name="loader-3")
        thread.start()
        thread.join()
    wait_for_the_others()
    comm.barrier()


def interrupt():
    if misbehaves:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    wait_for_the_others()


def exit_with_status():
    if misbehaves:
        sys.exit(3)
    wait_for_the_others()


def exit_with_text():
    if misbehaves:
        sys.exit("no data")
    wait_for_the_others()


def early_end():
    wait_for_the_others()
    if not misbehaves:
        wait_for_the_others()


def early_end_while_a_message_is_awaited():
    if not misbehaves:
        comm.start_all_reduce(array).wait()
        ops.synchronize()


def early_close():
    if misbehaves:
        comm.close()
        time.sleep(10)
    wait_for_the_others()


def killed():
    if misbehaves:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_the_others()


def ends_without_a_word():
    if misbehaves:
        os._exit(0)
    wait_for_the_others()


def sleeping():
    """A rank that is busy elsewhere for ever."""
    abort.context.update(step=12)
    if misbehaves:
        time.sleep(1000)
    comm.start_all_reduce(array, name="layer1.0.conv2").wait()


def slow():
    """A rank that is late, and comes: somebody tells what is waited for, and the job goes on."""
    comm.start_all_reduce(array, name="layer1.0.conv1").wait()  # in the first NCCL connects, for seconds at times
    ops.synchronize()
    roll_call.SUSPECT_SECONDS, roll_call.WARN_SECONDS = 0.2, 0.5
    if misbehaves:
        time.sleep(3)
    comm.start_all_reduce(array, name="layer1.0.conv2").wait()
    ops.synchronize()


def stopped():
    """A rank that does not even answer."""
    if misbehaves:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_the_others()


def stopped_at_the_end():
    """All calls are made, but one rank does not leave."""
    wait_for_the_others()
    if misbehaves:
        os.kill(os.getpid(), signal.SIGSTOP)


def other_size():
    comm.start_all_reduce(array[: 900 if misbehaves else 1000], name="conv1").wait()


def other_dtype():
    comm.all_reduce(array.view("int32") if misbehaves else array)


def other_order():
    """Messages of one size, in another order: their sums would be wrong and nobody would know."""
    names = ["conv1", "conv2"]
    for name in reversed(names) if misbehaves else names:
        comm.start_all_reduce(ops.from_host(np.ones(1000, "float32")), name=name).wait()


def other_call():
    comm.share(1) if misbehaves else comm.all_reduce(array)


def other_matter():
    """Both share something; what the one takes for a plan is another's weights."""
    comm.share(1, "weights" if misbehaves else "plan")


def blocking_or_not():
    comm.all_reduce(array) if misbehaves else comm.start_all_reduce(array).wait()


def other_halo():
    """One rank sends less than the other expects."""
    partner, got = 1 - comm.rank, ops.from_host(np.ones(1000, "float32"))
    comm.start_exchange({partner: array[: 900 if misbehaves else 1000]}, {partner: got}, "halo of conv1").wait()
    wait_for_the_others()


def other_root():
    comm.broadcast(array, root=comm.rank)


def device_waits():
    """As with NCCL: the host of rank 0 has gone on, and its GPU waits for a rank that does not come."""
    abort.context.update(step=12)
    if misbehaves:
        time.sleep(1000)
    log, followed = comm.roll_call.log, _Followed(comm.roll_call.log, "messages of the GPU")
    comm.roll_call.watch(followed.look)
    followed.add(log.enter("start_all_reduce", array, name="layer1.0.conv2"), SimpleNamespace(done=False))
    time.sleep(1000)


def device_waits_at_the_end():
    """The same, and the host has come to the end of the program before anybody looks at the GPU."""
    abort.context.update(step=12)
    if misbehaves:
        time.sleep(1000)
    log, followed = comm.roll_call.log, _Followed(comm.roll_call.log, "messages of the GPU")
    followed.add(log.enter("start_all_reduce", array, name="layer1.0.conv2"), SimpleNamespace(done=False))
    threading.Timer(0.3, comm.roll_call.watch, [followed.look]).start()


def calls_that_nobody_compares():
    """As with NCCL: the sums are wrong, and no call of either rank ever fails."""
    sizes = (1000, 900 if misbehaves else 1000, 1000)
    for size in sizes:
        comm.roll_call.log.enter("start_all_reduce", array[:size], name="conv1")


def calls_found_different_at_leisure():
    """The same, but a rank takes its time to word what it has found, and would have left meanwhile."""
    in_words = watchdog.contradiction

    def slowly(*positions):
        time.sleep(0.3)
        return in_words(*positions)

    watchdog.contradiction = slowly
    calls_that_nobody_compares()


def other_model():
    """One rank builds a layer of another width."""
    graph = m.Graph()
    graph.output(m.Linear(8, 5 if misbehaves else 4, name="fc")(graph.input((8,))))
    m.Model(graph, device=device, comm=comm)


def other_weights():
    """One rank starts from another seed: its gradients would be added to weights that are not the others'."""
    graph = m.Graph()
    graph.output(m.Linear(8, 4, name="fc")(graph.input((8,))))
    m.Model(graph, device=device, comm=comm, seed=int(misbehaves))


def forgotten_communicator():
    """The gradients of a loss that divides by the samples of one rank would be as many times too large as ranks."""
    m.SoftmaxCrossEntropy()


def other_rate():
    """One rank would take larger steps: weights would drift apart in silence."""
    graph = m.Graph()
    graph.output(m.Linear(8, 4, name="fc")(graph.input((8,))))
    m.SGD(m.Model(graph, device=device, comm=comm), 0.2 if misbehaves else 0.1)


def other_rows():
    """One rank takes an image for its own of which the others hold a part each."""
    alone = comm.split(comm.rank)
    group = alone if misbehaves else comm
    graph = m.Graph()
    x = graph.input((share(8, group.size, group.rank).count, 8, 3))
    graph.output(RowParallelConv2d(3, 4, 3, padding=1, height=8, group=group, name="conv")(x))
    m.Model(graph, device=device, comm=comm)


def filters_of_others():
    """Each rank has filters of its own, whose gradients would be added to those of other filters."""
    graph = m.Graph()
    graph.output(ChannelParallelConv2d(3, 6, 3, group=comm, name="conv")(graph.input((8, 8, 3))))
    m.Model(graph, device=device, comm=comm)


def _train(batch: int = 4, epochs: int = 1, change=lambda model, optimizer: None, order=range(16)):
    """A run in which ranks may disagree about so much."""
    images, labels = data.dataset("synthetic", None, "train", n=16, shape=(4, 4, 1), num_classes=3).take(
        np.array(order)
    )
    samples = data.ArrayDataset(images, labels, 3)
    loader = data.Loader(samples, batch, rank=comm.rank, size=comm.size)
    model = m.Model(models.mlp(3, (4, 4, 1)), device=device, comm=comm)
    loss = m.SoftmaxCrossEntropy(comm=comm)
    optimizer = m.SGD(model, 0.1, 0.9)
    change(model, optimizer)
    Trainer(model, optimizer, loss, loader, schedule=lambda step: 0.1, epochs=epochs).fit()


def other_batch():
    """One rank would be through its samples before the others, or after them."""
    _train(batch=8 if misbehaves else 4)


def other_number_of_steps():
    _train(epochs=2 if misbehaves else 1)


def other_order_of_samples():
    """Each rank splits its data by chance: samples of one rank's training set are tested on another."""
    _train(order=range(16)[:: -1 if misbehaves else 1])


def other_place_of_gradients():
    """One rank adds its gradients to the momentum: its messages would carry something else than those of the others."""
    _train(change=lambda model, optimizer: optimizer.gradients_in_momentum() if misbehaves else None)


def other_weights_read():
    """One rank reads other weights into its model, which was made alike: as with files of several hosts."""
    scale = 2 if misbehaves else 1
    _train(change=lambda model, _: model.load_state_dict({k: v * scale for k, v in model.state_dict().items()}))


def nan_on_one_rank():
    """In one pixel: after the sum all ranks would have it."""
    graph = m.Graph()
    x = m.ReLU(name="relu")(m.Conv2d(3, 4, 3, name="conv1")(graph.input((6, 6, 3))))
    graph.output(m.Linear(64, 4, name="fc")(m.Flatten()(x)))
    model = m.Model(graph, device=device, comm=comm)
    watch, step = GradientWatch(model.arena), EagerStep(model, m.SGD(model, 0.1), m.SoftmaxCrossEntropy(comm=comm))
    images = np.ones((2, 6, 6, 3), "float32")
    for number in range(3):
        if misbehaves and number == 2:
            images[1, 2, 3, 0] = np.nan
        step(ops.from_host(images), ops.from_host(np.zeros(2, "int32")))
        watch.check(comm, number)


def missing_replay():
    """A captured step waits on the GPU for a rank that does not replay its own."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        comm.all_reduce(array)
        graph = stream.end_capture()
        if misbehaves:
            time.sleep(1000)
        graph.launch(stream)
        comm.follow("the captured step")
        stream.synchronize()


def compiled_training():
    """Replayed steps wait on the GPU for a rank that takes no more; what they gave is not read before the end."""
    model = m.Model(models.mlp(3, (4, 4, 1)), device=device, comm=comm)
    loss = m.SoftmaxCrossEntropy(comm=comm)
    step = CompiledStep(model, m.SGD(model, 0.1), loss)
    x, labels = ops.from_host(np.ones((2, 4, 4, 1), np.float32)), ops.from_host(np.zeros(2, np.int32))
    for number in range(6):
        if misbehaves and number == 5:
            time.sleep(1000)
        totals = step(x, labels)
    totals.read()


def the_same_error_everywhere():
    raise ValueError("--lr must be positive")


def errors_of_their_own():
    raise ValueError(f"rank {comm.rank} has its own")


def all_exit_with_status():
    sys.exit(3)


def late_rank():
    """No fault: rank 0 still has work of its own when the others have ended."""
    if not misbehaves:
        time.sleep(2)


def exit_that_is_caught():
    """No fault either: the program goes on after it, and one rank takes its time at the end."""
    if misbehaves:
        with contextlib.suppress(SystemExit):
            sys.exit(2)
    wait_for_the_others()
    if not misbehaves:
        time.sleep(2)


def message_never_awaited():
    """No fault: started everywhere, and the program ends."""
    comm.start_all_reduce(ops.from_host(np.ones(1_000_000, "float32")))


def forked_child_fails():
    """No fault of the rank: a child's exception is its parent's business."""
    if misbehaves and os.fork() == 0:
        sys.excepthook(ZeroDivisionError, ZeroDivisionError("in the child"), None)
        os._exit(1)
    wait_for_the_others()
    time.sleep(0.5)


Path(out, f"{comm.rank}.at").touch()
globals()[name]()
Path(out, f"{comm.rank}.json").write_text("{}")
